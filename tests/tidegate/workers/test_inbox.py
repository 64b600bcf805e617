"""Specification of a worker's inbox; the worker's whole life is in `test_process.py`."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from tidegate.workers.array_transport import Handover
from tidegate.workers.channel import CancelRun, RunEngine, lay_out, pack, pack_with
from tidegate.workers.generation.messages import CreditSequence
from tidegate.workers.inbox import CallFrames, CallInbox, SocketBytes, end_with_parent


class CountedSocket(socket.socket):
    """A socket that counts the calls of the system by which it is read."""

    reads = 0

    def recv_into(self, *arguments: Any, **words: Any) -> int:
        self.reads += 1
        return super().recv_into(*arguments, **words)


def test_the_pieces_of_a_small_frame_take_one_call_of_the_system() -> None:
    ours, theirs = socket.socketpair()
    with ours, CountedSocket(fileno=theirs.detach()) as counted:
        source = SocketBytes(counted)
        ours.sendall(b"prefix" + b"header" + b"payload")

        assert [bytes(source.take(size)) for size in (6, 6, 7)] == [b"prefix", b"header", b"payload"]
        assert counted.reads == 1


def test_large_pieces_come_whole_and_what_follows_them_is_not_lost() -> None:
    large = bytes(range(256)) * 4096
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer = threading.Thread(target=ours.sendall, args=(b"before" + large + b"after",))
        writer.start()
        source = SocketBytes(theirs)

        assert bytes(source.take(6)) == b"before"
        piece = source.take(len(large))
        assert bytes(source.take(5)) == b"after"
        writer.join()
        assert piece == large and not piece.readonly


def test_the_end_of_the_socket_is_the_end_even_in_the_midst_of_a_piece() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(b"half")
        ours.close()
        with pytest.raises(EOFError):
            SocketBytes(theirs).take(8)


def test_whether_anything_is_there_is_told_at_once() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        source = SocketBytes(theirs)
        assert not source.any_there()
        ours.sendall(b"piece")
        assert source.any_there()
        assert bytes(source.take(5)) == b"piece"
        ours.close()
        with pytest.raises(EOFError):
            source.any_there()


def call(call_id: int, size: int = 3) -> bytes:
    arrays = {"x": np.full(size, call_id, np.float32)}
    return b"".join(bytes(part) for part in pack_with(RunEngine(call_id, "key"), lay_out(arrays)))


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, CallInbox]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, CallInbox(CallFrames(theirs, Handover.nothing()))


@pytest.mark.parametrize("ahead", [False, True])
def test_calls_are_taken_in_order_with_their_arrays(
    ends: tuple[socket.socket, CallInbox], ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, inbox = ends
    ended: SimpleQueue[Exception] = SimpleQueue()
    monkeypatch.setattr("tidegate.workers.inbox.end_process", ended.put)
    if ahead:
        inbox.read_ahead(lambda message, arrays: {**arrays, "prepared": np.array(message.id)})
    ours.sendall(call(1) + call(2))
    for number in (1, 2):
        entry = inbox.take()
        assert isinstance(entry, tuple)
        (message, arrays), cancelled = entry
        assert (message.id, cancelled) == (number, False)
        assert arrays["x"].tolist() == [number] * 3
        assert ("prepared" in arrays) == ahead
    assert inbox.take_if_any() is None
    ours.close()
    if ahead:
        assert isinstance(ended.get(timeout=20.0), EOFError), "the parent's end is seen whatever is computed"
    else:
        with pytest.raises(EOFError):
            inbox.take()


def test_a_system_that_does_not_tell_of_a_hangup_alone_has_frames_read_ahead(
    ends: tuple[socket.socket, CallInbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, inbox = ends
    ended: SimpleQueue[Exception] = SimpleQueue()
    monkeypatch.setattr("tidegate.workers.inbox.end_process", ended.put)
    monkeypatch.delattr(select, "POLLRDHUP")
    end_with_parent(inbox, ours.fileno(), lambda _, arrays: arrays)
    ours.close()
    assert isinstance(ended.get(timeout=20.0), EOFError)


def test_a_call_is_marked_as_cancelled_only_while_it_waits(ends: tuple[socket.socket, CallInbox]) -> None:
    ours, inbox = ends
    ours.sendall(call(1) + call(2))
    entry = inbox.take()
    assert isinstance(entry, tuple)
    assert (entry[0][0].id, entry[1]) == (1, False)
    ours.sendall(pack(CancelRun(1)) + pack(CancelRun(2)))  # the first one has begun
    entry = inbox.take()
    assert isinstance(entry, tuple)
    assert (entry[0][0].id, entry[1]) == (2, True)
    assert repr(inbox) == "<CallInbox 0 waiting, 0 of them cancelled>"


def test_a_call_that_is_cancelled_in_the_breath_in_which_it_comes_is_not_begun(
    ends: tuple[socket.socket, CallInbox],
) -> None:
    ours, inbox = ends
    ours.sendall(call(1) + pack(CancelRun(1)))
    entry = inbox.take()
    assert isinstance(entry, tuple) and entry[1]


def test_what_is_said_of_a_sequence_keeps_its_place_among_the_calls(ends: tuple[socket.socket, CallInbox]) -> None:
    ours, inbox = ends
    ours.sendall(call(1) + pack(CreditSequence(9, 1)) + call(2))
    taken = [inbox.take() for _ in range(3)]
    assert [one[0][0].id if isinstance(one, tuple) else one for one in taken] == [1, CreditSequence(9, 1), 2]
