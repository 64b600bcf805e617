"""A session runs one link stream: it exchanges frames, and its heartbeat finds a silent link within seconds.

Both ends run the same session, whichever side dialled: each sends Hello first, then exchanges frames until the stream
ends. What the frames mean is decided by the session's `StreamHandler` (`client.py`, `server.py`); the session greets,
pings, measures the round trip, writes what waits in the outbox, and ends when

- the other side closes the stream, or its transport fails (`LinkLost`),
- the other side breaks the protocol (`ProtocolViolation`) or makes us write without reading,
- `silent_ticks` heartbeats pass in which nothing at all was received: a half-open TCP connection, a stopped process, a
  pulled cable. TCP would take minutes to notice (gRPC's own keepalive some 15 s; it is the second line of defence).

Silence is counted in our own ticks and not in seconds, so a process that was itself suspended, or starved for a while,
does not declare every healthy link dead on waking up: it reads what arrived meanwhile before the next tick.

Source: heartbeats on the data path as in AMQP 0-9-1 §4.2.7; h11 for "the stream's end is a value with a reason".
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tidegate import clock
from tidegate.link import frames
from tidegate.link.frames import Greeting, ProtocolViolation
from tidegate.link.outbox import Outbox, Parcel
from tidegate.rpc import link_pb2
from tidegate.runtime.owned_task import cancel_and_wait

_PING_BYTES = 16


class LinkLost(Exception):
    """The transport below the stream failed; the message says how."""


class MessageStream(Protocol):
    """A message stream in both directions, dialled by either side."""

    async def read(self) -> bytes | None:
        """The next message; None once the other side has closed. Raises LinkLost."""
        ...

    async def write(self, message: bytes) -> None:
        """Return once the transport has taken the message. Raises LinkLost."""
        ...


class StreamHandler(Protocol):
    """One side's part in a stream. None of these methods awaits; each may raise ProtocolViolation."""

    def hello(self) -> Greeting: ...

    def handlers(self) -> Mapping[str, Callable[[Any], None]]:
        """The handler of each kind of frame; a kind that is missing here is forbidden to the other side."""
        ...

    def greeted(self, greeting: Greeting) -> None: ...

    def measured(self, rtt_s: float) -> None: ...

    def ticked(self) -> None:
        """A heartbeat has passed: the moment to send what must not be older than one heartbeat."""
        ...

    def ended(self, reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class KeepaliveTiming:
    """A dead link is found after between `silent_ticks` and `silent_ticks` + 1 intervals."""

    interval_s: float = 1.0
    silent_ticks: int = 3


class LinkSession:
    """Runs one stream for a handler; `run` returns why it ended and raises only on cancellation and defects."""

    def __init__(
        self, stream: MessageStream, handler: StreamHandler, *, heartbeat: KeepaliveTiming, outbox: Outbox
    ) -> None:
        self._stream = stream
        self._handler = handler
        self._heartbeat = heartbeat
        self._outbox = outbox
        self._handlers: dict[str, Callable[[Any], None]] = {}
        self._work = asyncio.Event()
        self._waiters: deque[asyncio.Future[None]] = deque()  # for room, in order of arrival
        self._peer = ""
        self._silent_ticks = 0
        self._ping_waits = False
        self._pong_us: int | None = None  # of the newest ping that has not been answered
        self._rtt_s: float | None = None
        self._finishing = ""
        self.envelopes_sent = 0
        self.frames_sent = 0

    def __repr__(self) -> str:
        rtt = "-" if self._rtt_s is None else f"{self._rtt_s * 1e3:.2f} ms"
        return (
            f"<LinkSession {self._peer or 'ungreeted'}, rtt {rtt}, silent ticks {self._silent_ticks}, {self._outbox!r}>"
        )

    # for the handler

    @property
    def has_room(self) -> bool:
        return self._outbox.has_room

    @property
    def chunk_bytes(self) -> int:
        return self._outbox.chunk_bytes

    def post(self, parcel: Parcel) -> None:
        """Queue a parcel for writing. Post work only while `has_room`; `room` waits for that."""
        self.frames_sent += 1
        self._outbox.put(parcel)
        self._work.set()

    def send(self, frame: bytes) -> None:
        """Queue one encoded frame for writing."""
        self.post(Parcel(lambda _now: frame, len(frame)))

    def drop(self, parcel: Parcel) -> bool:
        """Write no more of a parcel; True if nothing of the parcel had been written."""
        return self._outbox.drop(parcel)

    async def room(self) -> None:
        """Wait until there is room for one more message, in order of arrival. Raises LinkLost when the stream ends."""
        while not self._outbox.has_room:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                self._make_room()  # wakes the next even if this one was cancelled in its turn

    def finish(self, reason: str) -> None:
        """End the stream once everything queued has been written."""
        self._finishing = reason
        self._work.set()

    # running

    async def run(self) -> str:
        """Exchange frames until the stream ends; returns the reason in words."""
        self.send(frames.hello(self._handler.hello()))
        self._ping()
        reason = "this side closed the stream"
        try:
            reason = await first_of(
                self._read(), self._write(), self._beat(), names=("link read", "link write", "link heartbeat")
            )
        except (LinkLost, ProtocolViolation) as exc:
            reason = str(exc)
        finally:
            self._end(reason)
        return reason

    def _end(self, reason: str) -> None:
        self._handler.ended(reason)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(LinkLost(reason))

    async def _read(self) -> str:
        while (envelope := await self._stream.read()) is not None:
            self._silent_ticks = 0
            for frame in frames.parse(envelope):
                kind = frame.WhichOneof("kind")
                handle = self._handlers.get(kind)  # hello brings them: the next frame may be for one
                if handle is not None:
                    handle(getattr(frame, kind))
                else:
                    self._take_in(kind, frame)
            if self._outbox.swamped:
                raise ProtocolViolation("the other side sends and does not read")
        return "the other side closed the stream"

    async def _write(self) -> str:
        while True:
            if not self._outbox:
                if self._finishing:
                    return self._finishing
                self._work.clear()
                await self._work.wait()
            envelope = self._outbox.take(clock.now())
            self._make_room()  # also where all that waited was dropped
            if envelope:
                self.envelopes_sent += 1
                await self._stream.write(envelope)

    async def _beat(self) -> str:
        interval_s = self._heartbeat.interval_s
        while self._silent_ticks < self._heartbeat.silent_ticks:
            await clock.sleep(interval_s)
            self._silent_ticks += 1
            self._ping()
            if self._peer:
                self._handler.ticked()
        return f"silent for {self._silent_ticks} heartbeats of {interval_s:g} s"

    def _take_in(self, kind: str | None, frame: link_pb2.Frame) -> None:
        """A frame that no handler is for."""
        if kind == "hello" and not self._peer:
            self._greet(frames.greeting_of(frame.hello))
        elif not self._peer:
            raise ProtocolViolation(f"{kind or 'an unknown frame'} before hello")
        elif kind is not None:  # None: a kind of frame that only a newer peer knows; it is ignored
            raise ProtocolViolation(f"a {kind} frame, which this side does not take")

    def _greet(self, greeting: Greeting) -> None:
        self._peer = greeting.name or "unnamed"
        self._handlers = {"ping": self._answer_ping, "pong": self._take_pong, **self._handler.handlers()}
        self._handler.greeted(greeting)

    def _ping(self) -> None:
        """Queue a ping, unless one is queued already: pings must not pile up on a stalled link."""
        if not self._ping_waits:
            self._ping_waits = True
            self.post(Parcel(self._leaving_ping, _PING_BYTES))

    def _leaving_ping(self, now: float) -> bytes:
        self._ping_waits = False
        return frames.ping(now)

    def _answer_ping(self, ping: link_pb2.Ping) -> None:
        """Answer only the newest ping, so a flood of pings queues one frame."""
        if self._pong_us is None:
            self.post(Parcel(self._leaving_pong, _PING_BYTES))
        self._pong_us = ping.sent_at_us

    def _leaving_pong(self, _now: float) -> bytes:
        sent_at_us, self._pong_us = self._pong_us or 0, None
        return frames.pong(sent_at_us)

    def _take_pong(self, pong: link_pb2.Pong) -> None:
        rtt_s = clock.now() - pong.sent_at_us / 1e6
        if rtt_s >= 0.0:  # the echoed time is untrusted, too
            self._rtt_s = rtt_s
            self._handler.measured(rtt_s)

    def _make_room(self) -> None:
        while self._waiters and self._outbox.has_room:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return  # this waiter wakes the next one after its turn


async def first_of(*work: Coroutine[Any, Any, str], names: tuple[str, ...]) -> str:
    """Return or raise the result of the first coroutine to end; the others are cancelled and have ended by then."""
    tasks = [asyncio.create_task(part, name=name) for part, name in zip(work, names, strict=True)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in tasks if task.done()][:1]
    finally:
        await cancel_and_wait(*tasks)
        # What is raised below has this frame in its traceback. Were its task still here, the two would keep each
        # other alive, and with them the stream and its connection, until the garbage collector comes by.
        tasks.clear()
    return ended.pop().result()
