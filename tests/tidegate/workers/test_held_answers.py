"""Answers of short calls that follow one another leave together; no answer waits for a call that may take long."""

from __future__ import annotations

import gc
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tidegate import clock
from tidegate.workers import channel
from tidegate.workers.array_transport import Handover
from tidegate.workers.channel import CancelRun, LoadEngine, RunCompleted, RunEngine, RunFailed, lay_out, pack, pack_with
from tidegate.workers.child import ComputeServer
from tidegate.workers.inbox import CallFrames, CallInbox


class Quick:
    """Gives back what it gets, in one and the same memory. Fails where it gets -1, and takes its time for -2."""

    def __init__(self) -> None:
        self._memory = np.zeros(1 << 16, np.float32)

    def infer(self, inputs: Any) -> Any:
        values = inputs["x"]
        if values[0] == -1.0:
            raise ValueError("minus one")
        if values[0] == -2.0:
            clock.block_until(clock.now() + 0.01)
        given = self._memory[: len(values)]
        given[:] = values
        return {"y": given}


def call(call_id: int, value: float | None = None, *, key: str = "a", size: int = 4) -> bytes:
    arrays = {"x": np.full(size, call_id if value is None else value, np.float32)}
    return b"".join(bytes(part) for part in pack_with(RunEngine(call_id, key), lay_out(arrays)))


def answered(*calls: bytes, monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, float | str]]]:
    """What a worker sends, one list for each time: the calls' ids, and the values or the errors."""
    sends: list[list[tuple[int, float | str]]] = []

    def sent(_sock: socket.socket, parts: Sequence[Any]) -> None:
        sends.append(list(parsed(b"".join(bytes(part) for part in parts))))

    monkeypatch.setattr(gc, "callbacks", [])  # a worker times collections until its process ends, and this one goes on
    monkeypatch.setattr("tidegate.workers.child.load_engine", lambda *_, **__: Quick())
    monkeypatch.setattr("tidegate.workers.child.send", sent)
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as executor:
        handover = Handover.nothing()
        worker = ComputeServer(theirs, handover, CallInbox(CallFrames(theirs, handover)))
        loads = [pack(LoadEngine(-one, "ab"[one], "onnx", "x", (), 0, "cpu")) for one in range(2)]
        ours.sendall(b"".join([*loads, *calls]))
        serving = executor.submit(worker.serve)
        ended_by = clock.now() + 20.0
        while len([one for told in sends for one in told]) < 2 + len([one for one in calls if one != CANCEL]):
            assert clock.now() < ended_by
            clock.block_until(clock.now() + 0.001)
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(EOFError):
            serving.result()
    assert sends[:2] == [[(0, "EngineLoaded")], [(-1, "EngineLoaded")]]
    return sends[2:]


def parsed(sent: bytes) -> Any:
    while sent:
        header_bytes, payload_bytes = channel.parse_prefix(sent[: channel.PREFIX_BYTES])
        ends = channel.PREFIX_BYTES + header_bytes
        message = channel.parse_from_child(sent[channel.PREFIX_BYTES : ends])
        payload, sent = sent[ends : ends + payload_bytes], sent[ends + payload_bytes :]
        if isinstance(message, RunCompleted):
            yield message.id, float(channel.unpack(message.arrays, payload)["y"][-1])
        elif isinstance(message, RunFailed):
            yield message.id, message.message
        else:
            yield message.id, type(message).__name__  # type: ignore[union-attr]


CANCEL = pack(CancelRun(2))


def test_answers_of_short_calls_leave_together_and_each_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    sends = answered(*[call(number) for number in range(1, 7)], monkeypatch=monkeypatch)
    assert [one for told in sends for one in told] == [(number, float(number)) for number in range(1, 7)]
    assert len(sends) < 6


def test_an_answer_does_not_wait_for_a_larger_call_nor_for_another_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [call(1), call(2, size=64), call(3, key="b", size=64), call(4, key="b", size=1024)]
    sends = answered(*calls, monkeypatch=monkeypatch)
    assert sends == [[(number, float(number))] for number in range(1, 5)]


def test_the_answer_of_a_long_call_leaves_at_once_with_what_waited_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sends = answered(call(1, -2.0), call(2), monkeypatch=monkeypatch)
    assert sends == [[(1, -2.0)], [(2, 2.0)]]


def test_a_failure_and_a_cancellation_hold_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    sends = answered(call(1), call(2), CANCEL, call(3, -1.0), call(4), monkeypatch=monkeypatch)
    told = [one for told in sends for one in told]
    assert told == [(1, 1.0), (2, "RunSkipped"), (3, "ValueError: minus one"), (4, 4.0)]


def test_large_answers_are_not_copied_to_be_held(monkeypatch: pytest.MonkeyPatch) -> None:
    sends = answered(*[call(number, size=1 << 14) for number in (1, 2)], monkeypatch=monkeypatch)
    assert sends == [[(1, 1.0)], [(2, 2.0)]]
