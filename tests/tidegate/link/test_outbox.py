"""The order in which frames leave an outbox, and the number of Envelopes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.link import frames
from tidegate.link.outbox import Outbox, Parcel


def small(id: int) -> Parcel:
    return Parcel(lambda _now: frames.cancel(id), 8)


def large(id: int, size_bytes: int) -> Parcel:
    return Parcel(lambda _now: frames.cancel(id), 8, id, bytes([id]) * size_bytes)


def leaving(outbox: Outbox, now: float = 0.0) -> list[str]:
    """The next Envelope in words: `c7` a small frame (or a large message's announcement), `7:3` a chunk of 3 bytes."""
    words = []
    for frame in frames.parse(outbox.take(now)):
        kind = frame.WhichOneof("kind")
        words.append(f"c{frame.cancel.id}" if kind == "cancel" else f"{frame.chunk.id}:{len(frame.chunk.data)}")
    return words


def test_frames_that_wait_together_leave_in_one_envelope_in_their_order() -> None:
    outbox = Outbox()
    for id in (1, 2, 3):
        outbox.put(small(id))

    assert leaving(outbox) == ["c1", "c2", "c3"]
    assert not outbox
    assert outbox.take(0.0) == b""


def test_an_envelope_is_bounded_and_what_does_not_fit_leaves_in_the_next() -> None:
    outbox = Outbox(envelope_bytes=2 * len(frames.cancel(1)))
    for id in (1, 2, 3):
        outbox.put(small(id))

    assert leaving(outbox) == ["c1", "c2"]
    assert leaving(outbox) == ["c3"]


def test_large_messages_take_turns_and_small_frames_go_before_their_chunks() -> None:
    outbox = Outbox(chunk_bytes=4)
    outbox.put(large(1, 10))
    outbox.put(large(2, 6))
    assert leaving(outbox) == ["c1", "1:4"]

    outbox.put(small(9))

    assert leaving(outbox) == ["c9", "c2", "2:4"]
    assert leaving(outbox) == ["1:4"]
    assert leaving(outbox) == ["2:2"]
    assert leaving(outbox) == ["1:2"]
    assert not outbox


def test_a_frame_is_encoded_at_the_instant_it_leaves() -> None:
    outbox = Outbox()
    outbox.put(Parcel(frames.ping, 8))

    [frame] = frames.parse(outbox.take(now=7.5))

    assert frame.ping.sent_at_us == 7_500_000


def test_what_is_dropped_before_its_turn_leaves_no_trace() -> None:
    outbox = Outbox(chunk_bytes=4)
    parcels = [small(1), large(2, 8), small(3)]
    for parcel in parcels:
        outbox.put(parcel)

    assert outbox.drop(parcels[0]) is True
    assert outbox.drop(parcels[1]) is True

    assert leaving(outbox) == ["c3"]
    assert repr(outbox) == "<Outbox 0 frames, 0 large messages, 0 bytes>"


def test_dropping_what_has_begun_to_leave_stops_the_rest_and_says_that_the_other_side_knows_of_it() -> None:
    outbox = Outbox(chunk_bytes=4)
    parcel = large(1, 100)
    outbox.put(parcel)
    leaving(outbox)
    assert not parcel.done

    assert outbox.drop(parcel) is False
    assert outbox.drop(parcel) is False

    assert parcel.done
    assert not outbox
    assert repr(outbox) == "<Outbox 0 frames, 0 large messages, 0 bytes>"


def test_dropping_what_has_left_changes_nothing() -> None:
    outbox = Outbox()
    parcel = small(1)
    outbox.put(parcel)
    leaving(outbox)

    assert outbox.drop(parcel) is False
    assert not outbox


def test_what_cannot_be_encoded_leaves_nothing_and_what_waits_behind_it_leaves() -> None:
    outbox = Outbox(chunk_bytes=4)
    for parcel in (Parcel(lambda _: b"", 8, 1), Parcel(lambda _: b"", 8, 2, b"12345678"), small(3), large(4, 4)):
        outbox.put(parcel)

    assert leaving(outbox) == ["c3"]
    assert leaving(outbox) == ["c4", "4:4"]
    assert repr(outbox) == "<Outbox 0 frames, 0 large messages, 0 bytes>"


def test_room_ends_with_the_bytes_that_wait_and_returns_as_they_leave() -> None:
    outbox = Outbox(chunk_bytes=4, room_bytes=6)
    outbox.put(large(1, 8))
    assert not outbox.has_room

    leaving(outbox)

    assert outbox.has_room


def test_frames_that_do_not_wait_for_room_are_noticed_when_they_pile_up() -> None:
    outbox = Outbox(room_bytes=1000, swamp_bytes=4000)
    for id in range(1, 8):
        outbox.put(small(id))
        assert not outbox.swamped
    outbox.put(small(8))

    assert outbox.swamped


@pytest.mark.slow
@given(
    bodies=st.lists(st.integers(0, 50), max_size=20),
    chunk_bytes=st.integers(1, 16),
    envelope_bytes=st.integers(1, 60),
    dropped=st.sets(st.integers(0, 19)),
)
def test_everything_leaves_exactly_once_and_each_body_in_its_own_order(
    bodies: list[int], chunk_bytes: int, envelope_bytes: int, dropped: set[int]
) -> None:
    outbox = Outbox(chunk_bytes=chunk_bytes, envelope_bytes=envelope_bytes)
    parcels = [large(id, size) if size else small(id) for id, size in enumerate(bodies)]
    for parcel in parcels:
        outbox.put(parcel)
    for index in dropped & set(range(len(parcels))):
        assert outbox.drop(parcels[index])

    announced: list[int] = []
    received: dict[int, int] = {}
    while outbox:
        for frame in frames.parse(outbox.take(0.0)):
            if frame.WhichOneof("kind") == "cancel":
                announced.append(frame.cancel.id)
            else:
                assert frame.chunk.id in announced
                assert 0 < len(frame.chunk.data) <= chunk_bytes
                received[frame.chunk.id] = received.get(frame.chunk.id, 0) + len(frame.chunk.data)

    kept = [id for id in range(len(bodies)) if id not in dropped]
    assert sorted(announced) == kept
    assert received == {id: bodies[id] for id in kept if bodies[id]}
    assert repr(outbox) == "<Outbox 0 frames, 0 large messages, 0 bytes>"
