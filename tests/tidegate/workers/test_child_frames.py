"""A child's frames are handed on as they come, however the socket cuts them."""

from __future__ import annotations

import numpy as np
import pytest

from tidegate.types import Buffer
from tidegate.workers import channel
from tidegate.workers.channel import FromChild, RunCompleted, RunFailed, WorkerHello
from tidegate.workers.process import ChildFrames

Taken = list[tuple[FromChild, bytes]]


def frame(id: int, rows: int) -> bytes:
    laid = channel.lay_out({"x": np.arange(rows, dtype="<i8")})
    return b"".join(bytes(part) for part in channel.pack_with(RunCompleted(id, 0.5), laid))


SENT = channel.pack(WorkerHello(7)) + frame(1, 3) + frame(2, 0) + channel.pack(RunFailed(3, "why")) + frame(4, 40)


def reader() -> tuple[ChildFrames, Taken]:
    taken: Taken = []

    def take(message: FromChild, followed: Buffer) -> None:
        taken.append((message, bytes(followed)))

    return ChildFrames(take), taken


def numbers(taken: Taken) -> list[int]:
    return [message.pid if isinstance(message, WorkerHello) else message.id for message, _ in taken]


@pytest.mark.parametrize("piece_bytes", [1, 7, 8, 9, 64, 1000, len(SENT)])
async def test_frames_arrive_whole_however_they_are_cut(piece_bytes: int) -> None:
    frames, taken = reader()
    for at in range(0, len(SENT), piece_bytes):
        frames.data_received(SENT[at : at + piece_bytes])
    assert numbers(taken) == [7, 1, 2, 3, 4]
    for (message, followed), rows in ((taken[1], 3), (taken[2], 0), (taken[4], 40)):
        assert isinstance(message, RunCompleted)
        assert channel.unpack(message.arrays, followed)["x"].tolist() == list(range(rows))
    frames.connection_lost(None)
    await frames.ended


async def test_a_frame_is_handed_on_before_the_next_one_is_there() -> None:
    frames, taken = reader()
    frames.data_received(SENT[: len(SENT) - 1])
    assert numbers(taken) == [7, 1, 2, 3]
    frames.data_received(SENT[-1:])
    assert numbers(taken)[-1] == 4


async def test_what_is_no_frame_ends_it_and_nothing_after_it_is_taken() -> None:
    frames, taken = reader()
    frames.data_received(SENT[: len(channel.pack(WorkerHello(7)))] + b"\xff" * 64)
    frames.data_received(SENT)
    with pytest.raises(channel.FrameError, match="over the limits"):
        await frames.ended
    frames.connection_lost(None)
    assert numbers(taken) == [7]
