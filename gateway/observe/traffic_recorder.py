"""Records traffic as it comes: one recording at a time, streamed to an operator over the admin port.

    GET /debug/recording?for=60      lines of JSON for a minute (`gateway/core/history/trace_format.py`), then `end`

Nothing is kept here but what the reader has not taken yet, and of that at most `MOST_BYTES`: a reader that is too slow
loses lines, which are counted and reported at the end. Requests are tapped where the flight recorder takes them, at
their end; those that arrived in the time and end within `_GRACE_S` after it belong to it. Each second every link is
sampled, of a large fleet a share of `LINKS_A_SECOND` in turn. Without a recording none of this costs anything.

A tenant's alias is a keyed hash whose key is forgotten with the recording.
"""

from __future__ import annotations

from collections import deque
from hashlib import blake2b
from secrets import token_bytes
from typing import Final

import msgspec
from aiohttp import web

from gateway.core.fleet.fleet import Fleet
from gateway.core.history.recorder import FlightRecorder, RequestRecord
from gateway.core.history.trace_format import (
    FORMAT,
    VERSION,
    RecordedEnd,
    RecordedHeader,
    RecordedLine,
    link_line,
    request_line,
    target_line,
)
from tidegate import __version__, clock
from tidegate.servers.http_connection import mark_endless

MOST_S: Final = 3600.0
MOST_BYTES: Final = 2**23
LINKS_A_SECOND: Final = 500
_TICK_S: Final = 0.2
_GRACE_S: Final = 5.0
_LOST_WITHOUT_ACK: Final = ("unreachable", "deadline_exceeded")


class TrafficRecorder:
    """Makes recordings of one gateway's traffic, one at a time. `serves`: whether callers come to this process."""

    def __init__(self, memory: FlightRecorder, fleet: Fleet, *, gateway: str, policy: str, serves: bool = True) -> None:
        self._serves = serves
        self._memory = memory
        self._fleet = fleet
        self._gateway = gateway
        self._policy = policy

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """The handler of the route."""
        if not self._serves:
            raise web.HTTPNotImplemented(
                text="callers come to this gateway's workers, which make no recordings: record it with workers: 1, "
                "or start several gateways (docs/gateways.md) and record each"
            )
        for_s = _duration(request.query.get("for", "60"))
        memory = self._memory
        if memory.recording:
            raise web.HTTPConflict(text="another recording is being made; one at a time")
        answer = web.StreamResponse(headers={"Content-Type": "application/jsonl"})
        tape = RecordingBuffer(self._fleet, clock.now(), for_s)
        memory.start_recording(tape.take)
        try:
            mark_endless(request)
            await answer.prepare(request)
            tape.write(
                RecordedHeader(
                    format=FORMAT,
                    version=VERSION,
                    made_by=__version__,
                    gateway=self._gateway,
                    policy=self._policy,
                    began_utc_s=round(clock.utc_s(), 3),
                    for_s=for_s,
                )
            )
            ends_at = tape.began_at + for_s
            while (now := clock.now()) < ends_at + _GRACE_S and (now < ends_at or tape.under_way()):
                if now < ends_at:
                    tape.sample(now)
                await answer.write(tape.read())
                await clock.sleep(_TICK_S)
            tape.write(RecordedEnd(tape.requests, tape.lost, round(min(clock.now(), ends_at) - tape.began_at, 3)))
            await answer.write(tape.read())
        finally:
            memory.stop_recording(tape.take)
        await answer.write_eof()
        return answer

    def __repr__(self) -> str:
        return f"<TrafficRecorder {'one under way' if self._memory.recording else 'none'}>"


class RecordingBuffer:
    """Lines that the reader has not taken yet."""

    def __init__(self, fleet: Fleet, began_at: float, for_s: float, most_bytes: int = MOST_BYTES) -> None:
        self.began_at = began_at
        self.requests = 0
        self.lost = 0
        self._for_s = for_s
        self._most_bytes = most_bytes
        self._fleet = fleet
        self._lines: deque[bytes] = deque()
        self._held_bytes = 0
        self._key = token_bytes(16)
        self._encode = msgspec.json.Encoder().encode
        self._offers: dict[str, object] = {}  # by target: the offers that were written
        self._due: deque[str] = deque()  # targets whose link is still to be sampled in this second
        self._sampled_at = -1.0
        self._sent: dict[str, int] = {}  # by target, since its link was sampled
        self._unheard: dict[str, int] = {}

    def write(self, line: RecordedLine) -> None:
        encoded = self._encode(line) + b"\n"
        if self._held_bytes + len(encoded) > self._most_bytes and not isinstance(line, RecordedHeader | RecordedEnd):
            self.lost += 1
            return
        self._lines.append(encoded)
        self._held_bytes += len(encoded)

    def read(self) -> bytes:
        taken = b"".join(self._lines)
        self._lines.clear()
        self._held_bytes = 0
        return taken

    def take(self, record: RequestRecord) -> None:
        """A request has come to its end."""
        if not 0.0 <= record.arrived_at - self.began_at < self._for_s:
            return
        self.requests += 1
        line = request_line(record, self.began_at, self._alias)
        for attempt in line.attempts:
            self._sent[attempt.target] = self._sent.get(attempt.target, 0) + 1
            if attempt.end != "answered" and attempt.acked_s is None:
                self._unheard[attempt.target] = self._unheard.get(attempt.target, 0) + 1
        self.write(line)

    def under_way(self) -> bool:
        """Whether any target still has a request in flight."""
        return any(target.queue_estimate.in_flight for target in self._fleet.targets.values())

    def sample(self, now: float) -> None:
        """Write a line for each link once a second, and for each target whose offers changed."""
        targets, at_s = self._fleet.targets, now - self.began_at
        if now - self._sampled_at >= 1.0 and not self._due:
            self._sampled_at = now
            self._due.extend(targets)
        for _ in range(min(len(self._due), int(LINKS_A_SECOND * _TICK_S))):
            target = targets.get(self._due.popleft())
            if target is None:
                continue
            if self._offers.get(target.id) is not target.offers:
                self._offers[target.id] = target.offers
                self.write(target_line(target, self._fleet, at_s))
            lost, sent = self._unheard.pop(target.id, 0), self._sent.pop(target.id, 0)
            self.write(link_line(target, at_s, lost, sent))

    def _alias(self, tenant: str) -> str:
        return blake2b(tenant.encode(), key=self._key, digest_size=6).hexdigest()

    def __repr__(self) -> str:
        return (
            f"<RecordingBuffer {self.requests} requests, {self._held_bytes} bytes to be read, {self.lost} lines lost>"
        )


def _duration(words: str) -> float:
    """Raises HTTPBadRequest for what is no duration."""
    try:
        for_s = float(words)
    except ValueError:
        for_s = -1.0
    if not 0.0 < for_s <= MOST_S:
        raise web.HTTPBadRequest(text=f"`for` must be seconds, above 0 and up to {MOST_S:g}")
    return for_s
