"""The flight recorder remembers finished requests as words and numbers, so that they can be explained later.

Request execution notes what happens as it happens (`RequestEvent`): one small record an event, no text. At its
end all of it becomes one `RequestRecord` in the `FlightRecorder`, which is always on, and the request's decision is
packed (`decision_record.py`). Packing may be put off for a moment, to do many in one go; until then a few decisions are
held as they are. Formatting belongs to `gateway/operate/explanation.py`, which runs when an operator looks.

Each is kept as one piece of bytes. As the objects that it is made of, some fifty, every new one is written where the
processor's caches hold nothing and every old one read back to be given up: with 4096 of them kept that took an eighth
of a gateway's CPU, measured, and hardly any with 32. A reader has them made again. They are msgspec's structs,
since a named tuple takes four times as long to make, and a request makes half a dozen.

Memory is bounded twice: by a count of requests, and by bytes, whichever is less; so the bound holds whatever callers
put into their ids and however many candidates a large fleet has. Nothing here may hold on to what a request came with
or went through: its tensors, an error that was raised (an exception keeps every frame that it passed through), or a
target that has left since.

A request that was turned away before it was placed (shed, expired, no right to it) is remembered as well, as a line
without decision: what a gateway refuses belongs to the traffic that it had.

Invariants: `held_bytes <= most_bytes` after every `add`; numbers rise by one; newest last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any, Final, Literal

import msgspec

from gateway.core.history.decision_record import DecisionRecord, pack_decision
from gateway.core.history.unanswered import unanswered_word
from gateway.core.placement.placer import Decision
from tidegate.generate.usage import Usage
from tidegate.types import Call, Route, SplitNote

MAX_EVENTS_PER_REQUEST: Final = 64
MAX_PACKED_BYTES: Final = 64  # whose decisions are still to be packed
MOST_WORDS: Final = 256  # of an error, and of an id: both may be a stranger's

What = Literal[
    "look", "launched", "accepted", "held", "judged", "begun", "differed", "answered", "failed", "cancelled", "lent"
]

_PIECE_BYTES: Final = 64  # of bytes as an object, and its place among the others


class RequestEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Something that happened to a request. What goes with it depends on `what`:

    look        `at` is when a hedge will be thought of, if there is no answer by then
    launched    `target`, `variant`, and `seconds`: in how many an answer was predicted
    accepted    `seconds`: until the target will be done, as it says
    held        nothing: the first token of its answer is here, and is held back until enough are to judge it
    judged      `confidence`, of the tokens that are held
    begun       nothing: the first token of its answer is here, and was given to the caller
    answered    `stages`, `seconds`: the link's share, `batch`: rows that were computed together, and `confidence` where
                the model judges itself
    failed      `words`
    cancelled   nothing: that attempt is not needed any more
    lent        `words`: why nothing else answered than the gateway's memory, and `seconds`: how old that answer is
    """

    at: float
    what: What
    attempt: int
    target: str = ""
    variant: str = ""
    seconds: float = 0.0
    stages: Mapping[str, float] | None = None
    words: str = ""
    confidence: float | None = None
    batch: int = 0


class AnswerRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The answer that the caller got: the number of its attempt, its route, and what it took as a generation."""

    attempt: int
    route: Route
    usage: Usage | None = None


ErrorText = str  # "code: words", as an error is kept and shown


def error_code(text: ErrorText) -> str:
    """The code of an error that is kept as text; it is a label of `tidegate.outcome.Outcome`."""
    return text.partition(":")[0]


class RequestRecord(msgspec.Struct, array_like=True, gc=False):
    """One finished request. Instants are of this process' monotonic clock. Mutable only until it is kept: its decision
    is set when that is packed.
    """

    number: int  # counts this gateway's requests: what to ask for where the caller gave no id
    request_id: str  # as the caller gave it
    trace_id: str  # of W3C trace context; "" where there was none
    protocol: str
    model: str
    tenant: str
    arrived_at: float  # its first byte was here
    taken_at: float  # it was read, let in, and handed on to be placed
    asked_at: float  # its work was known
    placed_at: float  # where to go was decided
    decision: DecisionRecord | None  # the first one; None: it was never placed
    reasons: tuple[str, ...]  # by attempt: why it was launched
    notes: tuple[RequestEvent, ...]
    end: AnswerRecord | ErrorText
    elapsed_s: float
    deadline: float | None
    wasted_tokens: int = 0  # of a generation: computed by more than one target, or made and given to no one
    asker: str = ""  # the device that asked for help with it, "edge/NAME"
    half: SplitNote | None = None  # of a model that may be cut between layers

    @property
    def ended_at(self) -> float:
        return self.arrived_at + self.elapsed_s

    @property
    def answer(self) -> AnswerRecord | None:
        """The attempt that answered the caller; None where the request ended in an error."""
        return self.end if isinstance(self.end, AnswerRecord) else None

    @property
    def late(self) -> bool:
        """Whether its answer came, and after the deadline."""
        return self.answer is not None and self.deadline is not None and self.ended_at > self.deadline

    @property
    def missed(self) -> bool:
        """Whether its caller got no answer in time, for whatever reason; a caller that left did not miss it."""
        return self.late or (self.answer is None and self.outcome != "cancelled")

    @property
    def outcome(self) -> str:
        """The label of `tidegate.outcome.Outcome`."""
        if isinstance(self.end, str):
            return error_code(self.end)
        return "late" if self.late else "degraded" if self.end.route.degraded else "ok"

    @property
    def ended(self) -> str:
        """How it ended, as screens call it: "answered", "late", or why there was no answer (`UnansweredWord`)."""
        if isinstance(self.end, str):
            return unanswered_word(error_code(self.end), attempted=bool(self.tried()))
        return "late" if self.late else "answered"

    @property
    def served_by(self) -> str:
        """The target that answered; "" where none did."""
        return "" if self.answer is None else self.answer.route.served_by

    @property
    def hedged(self) -> bool:
        """Whether a second attempt was launched beside a silent one; given up as hopeless it was a fallback."""
        return not {"hedge", "race", "last-resort"}.isdisjoint(self.reasons)

    def tried(self) -> tuple[str, ...]:
        """The targets of its attempts, in order of launch."""
        return tuple([note.target for note in self.notes if note.what == "launched"])


class FlightRecorder:
    """Mutable: `add` each request at its end; oldest first when iterated.

    `watchers` are called with each at once, without its decision, and `taps` when it is kept.
    """

    def __init__(
        self,
        most: int,
        most_bytes: int = 2**25,
        *,
        run: str = "0",
        defer: Callable[[Callable[[], None]], None] = lambda do: do(),
    ) -> None:
        """Args:
        run: distinguishes this run's numbers from those of other gateways and of earlier runs.
        defer: has decisions packed a moment later, many in one go, for a third of the cost each.
        """
        self.run = run
        self.watchers: list[Callable[[RequestRecord], None]] = []
        self.taps: list[Callable[[RequestRecord], None]] = []
        self.recording = False  # whether the work of refused requests is noted too
        self._defer = defer
        self._raw: list[tuple[RequestRecord, Decision]] = []  # to be packed
        self._held_bytes = 0
        self._most = most
        self._most_bytes = most_bytes
        self._kept: deque[bytes] = deque()
        self._numbers = count(1)

    def start_recording(self, tap: Callable[[RequestRecord], None]) -> None:
        """Pass every record to `tap` as well, and of refused requests also their work, until `stop_recording`."""
        self.recording = True
        self.taps.append(tap)

    def stop_recording(self, tap: Callable[[RequestRecord], None]) -> None:
        self.taps.remove(tap)
        self.recording = False

    def next_number(self) -> int:
        """For the next request's `RequestRecord`."""
        return next(self._numbers)

    def name_of(self, number: int) -> str:
        """What answers call a request: unique among gateways and their restarts, as far as `run` is."""
        return f"{self.run}-{number}"

    @property
    def held_bytes(self) -> int:
        self.pack()
        return self._held_bytes

    def add(self, record: RequestRecord, decision: Decision | None = None) -> None:
        """Args: decision: its first one, where `flown` does not have it packed yet."""
        for watch in self.watchers:
            watch(record)
        if decision is None:
            self.pack()  # numbers rise
            self._keep(record)
            return
        self._raw.append((record, decision))
        if len(self._raw) == 1:
            self._defer(self.pack)
        elif len(self._raw) >= MAX_PACKED_BYTES:
            self.pack()

    def pack(self) -> None:
        """Keep what was added meanwhile."""
        raw, self._raw = self._raw, []
        for record, decision in raw:
            record.decision = pack_decision(decision)
            self._keep(record)

    def _keep(self, record: RequestRecord) -> None:
        for tap in self.taps:
            tap(record)
        if self._most <= 0:
            return
        raw = pack_record(record)
        size = len(raw) + _PIECE_BYTES
        if size > self._most_bytes:
            return
        kept = self._kept
        kept.append(raw)
        held = self._held_bytes + size
        while held > self._most_bytes or len(kept) > self._most:
            held -= len(kept.popleft()) + _PIECE_BYTES
        self._held_bytes = held

    def __iter__(self) -> Iterator[RequestRecord]:
        self.pack()
        return map(unpack_record, list(self._kept))

    def __reversed__(self) -> Iterator[RequestRecord]:
        self.pack()
        return map(unpack_record, list(reversed(self._kept)))

    def __len__(self) -> int:
        self.pack()
        return len(self._kept)

    def __repr__(self) -> str:
        return f"<FlightRecorder of {len(self)} requests in {self._held_bytes / 2**20:.1f} MiB>"


def _plain(value: object) -> object:
    """What msgspec does not know: read-only mappings, as the stages of a foreign server's answer are, and numpy's."""
    return dict(value) if isinstance(value, Mapping) else float(value)  # type: ignore[arg-type]


_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=_plain)
_DECODER: Final = msgspec.msgpack.Decoder(RequestRecord)


def pack_record(record: RequestRecord) -> bytes:
    """All of it in one piece: some 900 bytes, which a garbage collector need not look at."""
    buffer = bytearray(1024)  # of its own: what `encode` returns keeps the room that it was written in
    try:
        _ENCODER.encode_into(record, buffer)
    except UnicodeEncodeError:  # a stranger's half of a surrogate pair
        _ENCODER.encode_into(_readable(msgspec.to_builtins(record, enc_hook=_plain)), buffer)
    return bytes(buffer)


def unpack_record(raw: bytes) -> RequestRecord:
    return _DECODER.decode(raw)


def record_bytes(record: RequestRecord) -> int:
    """Bytes that it holds when it is kept."""
    return len(pack_record(record)) + _PIECE_BYTES


def _readable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    return [_readable(one) for one in value] if isinstance(value, list | tuple) else value


def trace_id_of(call: Call) -> str:
    """W3C's trace-id, which `tidegate.oip.call` has checked; "" where the caller's trace is not known."""
    return call.headers.get("traceparent", "")[3:35] if call.trace is None else call.trace.hex_id


def truncated_words(words: str) -> str:
    """As much of a stranger's words as is remembered."""
    return words if len(words) <= MOST_WORDS else words[: MOST_WORDS - 1] + "…"
