"""One direction of one connection: bytes come in, wait until their instant, and go out.

    source ─read─▶ │ waiting to enter │ planned: (left at, due at, bytes) │ due │ ─write─▶ sink
                     gates, room         on its way                         as fast as the sink takes them

The bytes themselves are in one queue; the plan beside it holds only sizes and instants. So a change of the
link throws away plans and never bytes: what has not left the capacity yet is planned anew, what is on its way keeps its
instant.

Nothing is read that cannot be held: at most `buffer_bytes`, and little while bytes still wait to enter, so the sender
feels the link's own queue and not one of ours. While the link is cut nothing is planned and nothing leaves.

The end of a stream (FIN, or the RST of one side) waits behind the bytes and takes the same way.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from math import inf
from typing import Final, Literal, NamedTuple, Protocol

from tidegate.netsim.links.limit import ByteLimit
from tidegate.netsim.links.nat import NatBinding
from tidegate.netsim.links.stream import CHUNK_BYTES, NAMES, LinkLayer, StreamPath
from tidegate.netsim.proxy.ledger import ByteLedger, Why

End = Literal["eof", "reset", "limit-close", "limit-reset"]
READ_AHEAD_BYTES: Final = 16384  # waiting to enter; a few segments more where those are large
_EARLY_S: Final = 1e-4  # a timer may fire a clock tick early; waking again for it costs more than the error


class FlowOwner(Protocol):
    """The interface of a connection to its flows."""

    def now(self) -> float: ...
    def over(self, flow: Flow, end: End) -> None: ...
    def gone(self, flow: Flow) -> None: ...
    def stalled(self, flow: Flow, until: float) -> None: ...
    def unheard(self, flow: Flow) -> None: ...


class _Planned(NamedTuple):
    left_at: float
    due_at: float
    size_bytes: int


class Flow:
    """Mutable. `start`, then it runs by itself on the loop's readiness and timers until `stop`."""

    def __init__(
        self,
        number: int,
        path: StreamPath,
        source: socket.socket,
        sink: socket.socket,
        owner: FlowOwner,
        *,
        buffer_bytes: int,
        limit: ByteLimit | None = None,
        nat: NatBinding | None = None,
    ) -> None:
        self.number = number
        self.path = path
        self.ledger = ByteLedger()
        self.cut = False
        self.over = False  # its end has come out, or it was stopped
        self.source_ended = False
        self.ended_unseen = False  # the source has ended, and the sink will not learn of it
        self._source, self._sink, self._owner = source, sink, owner
        self._loop = asyncio.get_running_loop()
        self._buffer_bytes = buffer_bytes
        self._limit, self._nat = limit, nat
        self._bytes: deque[memoryview] = deque()
        self._waiting_bytes = 0
        self._plan: deque[_Planned] = deque()
        self._due_bytes = 0
        self.held_bytes = 0
        self._end: End | None = None
        self._end_at: _Planned | None = None
        self._ask_at = inf
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf
        self._reading = self._writing = self._stopped = False

    def start(self) -> None:
        self._read_on()
        if self._limit is not None and self._limit.left_bytes == 0:
            self._reach_limit()
            self.pump()

    def stop(self, why: Why) -> None:
        """Let go of sockets and timers; what is still held is lost for this reason."""
        self._stopped = self.over = True
        self._read_off()
        self._write_off()
        self._disarm()
        self.ledger.lose(self.held_bytes, why)
        self.held_bytes = 0
        self._bytes.clear()

    def change(self, layers: list[LinkLayer]) -> None:
        """The link has changed; call `pump` when every flow has been changed."""
        now = self._owner.now()
        kept: deque[_Planned] = deque()
        while self._plan and self._plan[0].left_at <= now:
            kept.append(self._plan.popleft())
        self._waiting_bytes += sum(one.size_bytes for one in self._plan)
        self._plan = kept
        if self._end_at is not None and (self._waiting_bytes or self._end_at.left_at > now):
            self._end_at = None
        last = self._end_at or (kept[-1] if kept else None)
        self.path.change(layers, on_its_way_until=last.due_at if last else 0.0)

    def end(self, how: End) -> None:
        """No more bytes come; tell the sink when those before have come out. The first end is the one that counts."""
        self._read_off()
        self.source_ended = True
        if self._end is None:
            self._end = how
            self.pump()

    def pump(self) -> None:
        """Plan what may enter, release what is due, and set the timer for what comes next."""
        if self._stopped or self.cut:
            self._disarm()
            self._write_off()  # a sink that could take bytes would call again and again, and get none
            return
        now = self._owner.now()
        self._enter(now)
        self._release(now)
        self._write()
        if not self._stopped:
            self._arm()
            self._read_on()

    def __repr__(self) -> str:
        state = "cut" if self.cut else "over" if self.over else "open"
        return f"<Flow {NAMES[self.number]} {state}, {self.held_bytes} bytes held, {self.ledger!r}>"

    # in

    def _readable(self) -> None:
        room = min(self._read_ahead() - self._waiting_bytes, self._buffer_bytes - self.held_bytes, CHUNK_BYTES)
        if room <= 0:  # a change of the link has sent planned bytes back to wait
            self._read_off()
            return
        try:
            piece = self._source.recv(room)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.end("reset")
            return
        if self._nat is not None and not self._nat.passes(self._owner.now()):
            self._vanish(piece, "nat")
        elif self._limit is not None and self._limit.left_bytes == 0:
            self._vanish(piece, "limit")
        elif not piece:
            self.end("eof")
        else:
            self._take(piece)
            self.pump()
        if not self._has_room():
            self._read_off()

    def _take(self, piece: bytes) -> None:
        view = memoryview(piece)
        if self._limit is not None:
            passing = self._limit.take(len(view))
            if passing < len(view):
                self.ledger.refuse(len(view) - passing, "limit")
                view = view[:passing]
        self.ledger.take(view)
        self._bytes.append(view)
        self._waiting_bytes += len(view)
        self.held_bytes += len(view)
        if self._limit is not None and self._limit.left_bytes == 0:
            self._reach_limit()

    def _reach_limit(self) -> None:
        assert self._limit is not None
        if self._end is None and self._limit.then != "stall":  # a stalled sender is read on, and goes unheard
            self._end = "limit-close" if self._limit.then == "close" else "limit-reset"

    def _vanish(self, piece: bytes, why: Why) -> None:
        """Read and never passed on, the end of the stream neither: the sender does not learn of it."""
        self.ledger.refuse(len(piece), why)
        if not piece:
            self._read_off()
            self.source_ended = self.ended_unseen = True
        self._owner.unheard(self)

    # through

    def _enter(self, now: float) -> None:
        self._ask_at = inf
        while self._waiting_bytes:
            size = min(self.path.next_segment_bytes(), self._waiting_bytes)
            if not self._may_enter(size, now):
                return
            self._plan.append(_Planned(*self.path.send(size, now), size))
            self._waiting_bytes -= size
        if self._end is not None and self._end_at is None and self._may_enter(0, now):
            self._end_at = _Planned(*self.path.send(0, now), 0)

    def _may_enter(self, size_bytes: int, now: float) -> bool:
        at = self.path.enters_at(size_bytes, now)
        if at <= now:
            return True
        self._ask_at = at
        self._owner.stalled(self, at)
        return False

    def _release(self, now: float) -> None:
        while self._plan and self._plan[0].due_at <= now + _EARLY_S:
            self._due_bytes += self._plan.popleft().size_bytes

    # out

    def _write(self) -> None:
        while self._due_bytes:
            piece = self._bytes[0][: self._due_bytes]
            try:
                sent = self._sink.send(piece)
            except (BlockingIOError, InterruptedError):
                self._write_on()
                return
            except OSError:
                self._owner.gone(self)
                return
            self._sent(piece[:sent])
        self._write_off()
        if self._end_is_due():
            assert self._end is not None
            self.over = True
            self._disarm()
            self._owner.over(self, self._end)

    def _sent(self, piece: memoryview) -> None:
        size = len(piece)
        self.ledger.give(piece)
        self._due_bytes -= size
        self.held_bytes -= size
        if size == len(self._bytes[0]):
            self._bytes.popleft()
        else:
            self._bytes[0] = self._bytes[0][size:]

    def _end_is_due(self) -> bool:
        if self._end_at is None or self.over or self._plan or self._waiting_bytes:
            return False
        return self._end_at.due_at <= self._owner.now() + _EARLY_S

    # readiness and timers

    def _read_ahead(self) -> int:
        return max(READ_AHEAD_BYTES, 4 * self.path.segment)

    def _has_room(self) -> bool:
        return self._waiting_bytes < self._read_ahead() // 2 and self.held_bytes < self._buffer_bytes // 2

    def _read_on(self) -> None:
        if not (self._reading or self.source_ended or self._stopped) and self._has_room():
            self._reading = True
            self._loop.add_reader(self._source, self._readable)

    def _read_off(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._source)

    def _write_on(self) -> None:
        if not self._writing:
            self._writing = True
            self._loop.add_writer(self._sink, self.pump)

    def _write_off(self) -> None:
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._sink)

    def _arm(self) -> None:
        at = self._ask_at
        if self._plan:
            at = min(at, self._plan[0].due_at)
        elif self._end_at is not None and not self.over:
            at = min(at, self._end_at.due_at)
        if self._writing and self._ask_at == inf:
            at = inf  # the sink will call
        if at == self._timer_at:
            return
        self._disarm()
        if at < inf:
            self._timer_at = at
            self._timer = self._loop.call_later(max(0.0, at - self._owner.now()), self._tick)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = inf

    def _tick(self) -> None:
        self._timer = None
        self._timer_at = inf
        self.pump()
