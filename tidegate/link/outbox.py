"""The outbox orders and coalesces the frames of one stream: small frames first, large messages in turns.

gRPC from Python costs some 50 µs a message, whatever is in it; frames that are ready at the same moment therefore
share one Envelope. `take` returns the next Envelope: every small frame that waits (up to `envelope_bytes`), then one
chunk of one large message, each large message in its turn. So a small frame never waits for more than the Envelope that
is being written, a 20 MiB body does not starve another, and on a busy stream the Envelopes grow by themselves while the
cost per frame falls.

A parcel is encoded when it leaves, not when it is put in: its budget is the time that is left *then*, and a parcel that
was dropped in between costs nothing.

Bounds: callers with new work wait while `has_room` is False. Frames that answer the other side's frames (refusals,
pongs) cannot wait, so if a peer makes us write and does not read, the outbox becomes `swamped`, which is a reason to
close the stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from tidegate.link.frames import chunk

CHUNK_BYTES = 64 * 1024  # the wait of a small frame: 5 ms on 100 Mbit/s, 100 ms on a 5 Mbit/s uplink
_FRAME_OVERHEAD_BYTES = 512  # the memory of a queued small parcel beside its bytes


class Parcel(msgspec.Struct, eq=False):  # one goes with every frame: a dataclass takes three times as long to make
    """One frame, or one frame (`encode`) with a message (`body`) that follows it in chunks of the same `id`."""

    encode: Callable[[float], bytes]  # the instant at which it leaves → the frame; empty: it cannot be sent
    size_bytes: int  # of the frame, roughly
    id: int = 0
    body: bytes = b""
    sent_bytes: int = 0  # of the body
    left: bool = False  # the frame has been taken
    dropped: bool = False

    @property
    def done(self) -> bool:
        """Whether the body needs no more writing."""
        return self.dropped or self.sent_bytes == len(self.body)


class Outbox:
    """The queue of parcels of one stream: `put`, `take`, `drop`. It does no IO and never waits; its session does."""

    def __init__(
        self,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        envelope_bytes: int = 4 * CHUNK_BYTES,
        room_bytes: int = 8 * 1024 * 1024,
        swamp_bytes: int = 32 * 1024 * 1024,
    ) -> None:
        self._chunk_bytes = chunk_bytes
        self._envelope_bytes = envelope_bytes
        self._room_bytes = room_bytes
        self._swamp_bytes = swamp_bytes
        self._small: deque[Parcel] = deque()
        self._large: deque[Parcel] = deque()
        self._small_bytes = 0
        self._large_bytes = 0

    def __repr__(self) -> str:
        size_bytes = self._small_bytes + self._large_bytes
        return f"<Outbox {len(self._small)} frames, {len(self._large)} large messages, {size_bytes} bytes>"

    def __bool__(self) -> bool:
        return bool(self._small or self._large)

    @property
    def has_room(self) -> bool:
        """Whether new work may be put in. The last message may be larger than the room that was left."""
        return self._small_bytes + self._large_bytes < self._room_bytes

    @property
    def swamped(self) -> bool:
        """Whether frames that could not wait for room have piled up: the other side writes and does not read."""
        return self._small_bytes > self._swamp_bytes

    @property
    def chunk_bytes(self) -> int:
        """A message over this size goes as a parcel's body."""
        return self._chunk_bytes

    def put(self, parcel: Parcel) -> None:
        if parcel.body:
            self._large.append(parcel)
            self._large_bytes += len(parcel.body)
        else:
            self._small.append(parcel)
            self._small_bytes += parcel.size_bytes + _FRAME_OVERHEAD_BYTES

    def drop(self, parcel: Parcel) -> bool:
        """Write no more of a parcel. True if nothing of it was written, so that the other side needs no cancel."""
        if parcel.body and not parcel.dropped and parcel in self._large:  # small ones are skipped in their turn
            self._large.remove(parcel)
            self._large_bytes -= len(parcel.body) - parcel.sent_bytes
        parcel.dropped = True
        return not parcel.left

    def take(self, now: float) -> bytes:
        """The next Envelope, empty when nothing waits."""
        frames: list[bytes] = []
        self._take_small(frames, now)
        if self._large:
            self._take_chunk(frames, now)
        return frames[0] if len(frames) == 1 else b"".join(frames)

    def _take_small(self, frames: list[bytes], now: float) -> None:
        room_bytes = self._envelope_bytes
        while self._small and room_bytes > 0:
            parcel = self._small.popleft()
            self._small_bytes -= parcel.size_bytes + _FRAME_OVERHEAD_BYTES
            if parcel.dropped:
                continue
            parcel.left = True
            frame = parcel.encode(now)
            room_bytes -= len(frame)
            frames.append(frame)

    def _take_chunk(self, frames: list[bytes], now: float) -> None:
        parcel = self._large.popleft()
        if not parcel.left:
            parcel.left = True
            if not (frame := parcel.encode(now)):
                self._large_bytes -= len(parcel.body)
                return
            frames.append(frame)
        end = min(parcel.sent_bytes + self._chunk_bytes, len(parcel.body))
        frames.append(chunk(parcel.id, parcel.body[parcel.sent_bytes : end]))
        self._large_bytes -= end - parcel.sent_bytes
        parcel.sent_bytes = end
        if end < len(parcel.body):
            self._large.append(parcel)  # to the back: the next large message has its turn
