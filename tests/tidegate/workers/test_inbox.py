"""Specification of the reading side of a worker process; its whole life is in `test_process.py`."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from tidegate.workers.channel import CancelRun, LoadEngine
from tidegate.workers.child import CallQueue, SocketBytes


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


def test_a_call_is_marked_as_cancelled_only_while_it_waits() -> None:
    inbox = CallQueue()
    calls = [LoadEngine(number, "key", "paced", "a", (), 1, "cpu") for number in (1, 2)]
    for call in calls:
        inbox.put((call, {}))
    inbox.cancel(2)
    assert inbox.take() == ((calls[0], {}), False)
    inbox.cancel(CancelRun(1).id)  # it has begun

    assert inbox.take() == ((calls[1], {}), True)
    assert repr(inbox) == "<CallQueue 0 waiting, 0 of them cancelled>"
