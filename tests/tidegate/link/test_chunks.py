"""Messages joined from chunks, and the memory that a hostile sender can make the receiver hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.link.chunks import ChunkAssembly
from tidegate.link.frames import ProtocolViolation
from tidegate.outcome import Overloaded, TooLarge


def assembly() -> ChunkAssembly[str]:
    return ChunkAssembly(max_message_bytes=100, max_partial_bytes=150)


def test_a_message_is_whole_with_its_last_byte() -> None:
    partials = assembly()
    partials.open(7, "head", 5)

    assert partials.add(7, b"abc") is None
    assert 7 in partials
    assert partials.add(7, b"de") == ("head", b"abcde")
    assert 7 not in partials
    assert repr(partials) == "<ChunkAssembly 0 open, 0 bytes announced>"


def test_messages_that_arrive_between_each_other_do_not_mix() -> None:
    partials = assembly()
    partials.open(1, "one", 4)
    partials.open(2, "two", 4)

    partials.add(1, b"aa")
    partials.add(2, b"bb")

    assert partials.add(1, b"AA") == ("one", b"aaAA")
    assert partials.add(2, b"BB") == ("two", b"bbBB")


@pytest.mark.parametrize(
    ("pieces", "why"),
    [([b"abcdef"], "over the announced size at once"), ([b"abc", b"def"], "over it together"), ([b""], "empty")],
)
def test_chunks_that_do_not_fit_the_announcement_break_the_protocol(pieces: list[bytes], why: str) -> None:
    partials = assembly()
    partials.open(1, "head", 5)

    with pytest.raises(ProtocolViolation):
        for piece in pieces:
            partials.add(1, piece)


def test_an_id_that_is_open_cannot_be_announced_again() -> None:
    partials = assembly()
    partials.open(1, "head", 5)

    with pytest.raises(ProtocolViolation):
        partials.open(1, "head", 5)


def test_a_message_over_the_limit_is_refused_before_a_byte_of_it_is_held() -> None:
    partials = assembly()

    with pytest.raises(TooLarge, match="101 bytes; at most 100"):
        partials.open(1, "head", 101)
    with pytest.raises(TooLarge):
        partials.open(1, "head", 2**64 - 1)

    assert repr(partials) == "<ChunkAssembly 0 open, 0 bytes announced>"


def test_announcements_count_together_until_they_are_whole_or_dropped() -> None:
    partials = assembly()
    partials.open(1, "one", 100)
    with pytest.raises(Overloaded) as refusal:
        partials.open(2, "two", 51)
    assert refusal.value.retry_after_s is not None

    partials.drop(1)
    partials.drop(1)

    partials.open(2, "two", 51)
    assert repr(partials) == "<ChunkAssembly 1 open, 51 bytes announced>"


@given(st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=9))
def test_however_a_message_is_cut_it_comes_back_as_it_was(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    partials = assembly()
    partials.open(1, "head", len(whole))

    results = [partials.add(1, piece) for piece in pieces]

    assert results == [None] * (len(pieces) - 1) + [("head", whole)]
