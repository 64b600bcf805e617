"""Segments that two ends share: here both are in one process, with files of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from tidegate.workers import shared_memory
from tidegate.workers.channel import FrameError
from tidegate.workers.shared_memory import KEPT_BYTES, MOST_BYTES, SOCKET, Incoming, Outgoing

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="there is no memfd here")

Ends = tuple[Outgoing, Incoming]


@pytest.fixture
def ends() -> Iterator[Ends]:
    files = shared_memory.create(2)
    outgoing, incoming = Outgoing(files), Incoming([os.dup(file) for file in files])
    yield outgoing, incoming
    outgoing.close()
    incoming.close()


def resident_bytes(end: Outgoing, number: int) -> int:
    return os.fstat(end.files[number]).st_blocks * 512


def test_what_one_end_writes_the_other_reads_in_place(ends: Ends) -> None:
    outgoing, incoming = ends
    number = outgoing.write([b"abc", np.arange(2, dtype=np.uint8).data], 5)
    assert bytes(incoming.view(number, 5)) == b"abc\0\1"


def test_a_segment_that_has_grown_is_read_to_its_new_end(ends: Ends) -> None:
    outgoing, incoming = ends
    number = outgoing.write([b"small"], 5)
    assert bytes(incoming.view(number, 5)) == b"small"
    outgoing.free(number)
    large = os.urandom(1 << 20)
    assert outgoing.write([large], len(large)) == number, "the one whose memory is there comes first"
    assert bytes(incoming.view(number, len(large))) == large


def test_without_a_free_segment_or_for_too_much_it_is_the_socket(ends: Ends) -> None:
    outgoing, _ = ends
    assert outgoing.write([], MOST_BYTES + 1) == SOCKET
    numbers = {outgoing.write([b"x"], 1) for _ in range(2)}
    assert numbers == {0, 1}
    assert outgoing.write([b"x"], 1) == SOCKET
    outgoing.free(1)
    assert outgoing.write([b"x"], 1) == 1


def test_a_lent_segment_is_back_when_the_last_array_in_it_has_died(ends: Ends) -> None:
    outgoing, incoming = ends
    number = outgoing.write([bytes(64)], 64)
    first = np.frombuffer(incoming.lend(number, 64)[:32], np.float32)
    second = first.reshape(2, 4)[1:, ::2]
    assert incoming.take_freed() == ()
    del first
    assert incoming.take_freed() == (), "a view of a view holds it"
    del second
    assert incoming.take_freed() == (number,)
    assert incoming.take_freed() == ()


def test_whoever_writes_over_what_is_still_read_is_found_out(ends: Ends) -> None:
    outgoing, incoming = ends
    held = incoming.lend(outgoing.write([b"x"], 1), 1)
    with pytest.raises(FrameError, match="still read"):
        incoming.lend(1 - outgoing.write([b"y"], 1), 1)
    assert held[0] == ord("x")


@pytest.mark.parametrize(("number", "size_bytes"), [(2, 1), (-2, 1), (1, 1), (0, MOST_BYTES * 2), (0, (1 << 18) + 1)])
def test_a_segment_that_does_not_hold_what_was_named_is_a_frame_error(ends: Ends, number: int, size_bytes: int) -> None:
    outgoing, incoming = ends
    assert outgoing.write([b"x"], 1) == 0
    with pytest.raises(FrameError, match="segment"):
        incoming.view(number, size_bytes)


def test_nobody_can_take_memory_away_that_the_other_end_reads(ends: Ends) -> None:
    outgoing, _ = ends
    number = outgoing.write([b"x"], 1)
    with pytest.raises(PermissionError):
        os.ftruncate(outgoing.files[number], 0)


@pytest.mark.slow
def test_a_large_segment_gives_its_memory_back_when_it_is_free_and_a_small_one_keeps_it(ends: Ends) -> None:
    outgoing, _ = ends
    small, large = os.urandom(1 << 16), np.ones(KEPT_BYTES + 1, np.uint8).data
    kept = outgoing.write([small], len(small))
    given_back = outgoing.write([large], len(large))
    assert resident_bytes(outgoing, given_back) > KEPT_BYTES
    outgoing.free(kept)
    outgoing.free(given_back)
    assert resident_bytes(outgoing, kept) >= len(small)
    assert resident_bytes(outgoing, given_back) == 0


@pytest.mark.slow
def test_what_was_read_and_is_large_gives_its_memory_back_before_the_writer_is_told(ends: Ends) -> None:
    outgoing, incoming = ends
    small, large = os.urandom(1 << 16), np.ones(KEPT_BYTES + 1, np.uint8).data
    kept, given_back = outgoing.write([small], len(small)), outgoing.write([large], len(large))
    views = [incoming.lend(kept, len(small)), incoming.lend(given_back, len(large))]
    assert resident_bytes(outgoing, given_back) > KEPT_BYTES
    views.clear()
    assert resident_bytes(outgoing, given_back) == 0
    assert resident_bytes(outgoing, kept) >= len(small)
    assert sorted(incoming.take_freed()) == [kept, given_back]
    outgoing.free(given_back)
    assert outgoing.write([large], len(large)) == given_back
    assert bytes(incoming.lend(given_back, 2)) == b"\1\1", "it takes memory again"


def test_what_was_lent_outlives_its_end(ends: Ends) -> None:
    outgoing, incoming = ends
    array = np.frombuffer(incoming.lend(outgoing.write([b"abcd"], 4), 4), np.uint8)
    outgoing.close()
    incoming.close()
    assert array.tobytes() == b"abcd"


def test_a_system_that_has_none_or_forbids_them_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "memfd_create", forbidden)
    assert shared_memory.create(2) == []
    monkeypatch.delattr(os, "memfd_create")
    assert shared_memory.create(2) == []


def test_both_say_what_is_free(ends: Ends) -> None:
    outgoing, incoming = ends
    held = incoming.lend(outgoing.write([b"x"], 1), 1)
    assert repr(outgoing) == "<Outgoing 1 of 2 segments free>"
    assert repr(incoming) == "<Incoming 1 of 2 segments lent>"
    del held
    assert repr(incoming) == "<Incoming 0 of 2 segments lent>"
