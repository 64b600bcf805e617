"""The client side of a link stream: it sends requests and matches the answers to the calls that wait for them.

Each question has an id, a future and a deadline. It ends in exactly one way: its answer, the server's refusal (rebuilt
as the error that was raised there), DeadlineExceeded when its budget is spent, Disconnected when the stream ends, or
cancellation. If a question ends before its answer, the server is sent a cancel, unless nothing of the question had been
written yet. Frames that still arrive for the question are ignored: an id that was never used is a protocol violation,
an id that has ended is only late.

A client lives for one stream. A new dial makes a new client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from math import inf
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from tidegate import clock
from tidegate.fleet.offers import ModelOffer
from tidegate.link import frames
from tidegate.link.chunks import ChunkAssembly
from tidegate.link.frames import AnswerFrame, Greeting, ProtocolViolation
from tidegate.link.origin import Origin
from tidegate.link.outbox import Outbox, Parcel
from tidegate.link.received_tokens import ReceivedTokens
from tidegate.link.session import KeepaliveTiming, LinkLost, LinkSession, MessageStream
from tidegate.outcome import (
    BadAnswer,
    CapacityError,
    DeadlineExceeded,
    Disconnected,
    InvalidRequest,
    NotSupported,
    TooLarge,
    Unreachable,
)
from tidegate.rpc import link_pb2
from tidegate.token_sink import TokenSink
from tidegate.types import Accepted, LoadReport

ROOM_BYTES: Final = 2**20  # what a message may be larger than a body that is just allowed: names, shapes, parameters
MAX_MESSAGE_BYTES: Final = 64 * 2**20 + ROOM_BYTES
_MOST_WORDS: Final = 300  # of a refusal from the other side
_REQUEST_FRAME_BYTES = 96  # without the message


class Listener(Protocol):
    """The callbacks through which a client reports to its owner, called in the order of the events."""

    def greeted(self, greeting: Greeting) -> None: ...

    def loaded(self, load: LoadReport, offers: tuple[ModelOffer, ...] | None) -> None:
        """A load report that comes with no answer to a waiting call: with a refusal, a late answer, or a load frame."""
        ...

    def measured(self, rtt_s: float) -> None: ...

    def leaving(self, reason: str) -> None:
        """The server takes no new requests."""
        ...


class Question(NamedTuple):
    """One request as it is sent to one target."""

    message: bytes  # tidegate.oip.ModelInferRequest, serialized
    deadline: float  # an instant
    priority: int
    variant: str
    traceparent: str
    on_accepted: Callable[[Accepted], None]
    tracestate: str = ""
    tokens: TokenSink | None = None  # where a generation's tokens go as they come
    first_by: float | None = None  # an instant, by which the first of them should be made
    next_s: float | None = None  # and each further one, on average
    origin: Origin | None = None  # what a site has to know of the caller


class _Pending(msgspec.Struct, eq=False):
    parcel: Parcel
    answer: asyncio.Future[AnswerFrame]
    deadline: float
    on_accepted: Callable[[Accepted], None]
    tokens: ReceivedTokens | None = None


class LinkClient:
    """The `StreamHandler` that sends requests. `run` lasts until the stream ends; `ask` may be called while `open`."""

    def __init__(
        self,
        stream: MessageStream,
        greeting: Greeting,
        listener: Listener,
        *,
        heartbeat: KeepaliveTiming,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        outbox: Outbox | None = None,
    ) -> None:
        self._greeting = greeting
        self._listener = listener
        self._max_message_bytes = max_message_bytes
        self._pending: dict[int, _Pending] = {}
        self._last_id = 0
        self._expiry: asyncio.TimerHandle | None = None
        self._expiry_at = inf  # the earliest deadline that the timer is set for
        self._loop = asyncio.get_running_loop()
        self._partials: ChunkAssembly[link_pb2.Answer] = ChunkAssembly(
            max_message_bytes=max_message_bytes, max_partial_bytes=4 * max_message_bytes
        )
        self._protocol = frames.PROTOCOL  # the newest that both sides speak
        self._challenged = False  # whether a challenge was ever sent on this stream
        self._evidence: asyncio.Future[bytes] | None = None  # to the newest challenge
        self._closed = "the other side has not said hello yet"
        self.session = LinkSession(stream, self, heartbeat=heartbeat, outbox=Outbox() if outbox is None else outbox)

    def __repr__(self) -> str:
        return f"<LinkClient {self._closed or 'open'}, {len(self._pending)} pending, {self.session!r}>"

    @property
    def open(self) -> bool:
        """Whether the stream takes new questions."""
        return not self._closed

    @property
    def pending(self) -> int:
        return len(self._pending)

    async def run(self) -> str:
        """Exchange frames until the stream ends; returns the reason in words."""
        return await self.session.run()

    async def ask(self, question: Question) -> AnswerFrame:
        """Send one question and return the server's answer.

        Raises:
            ServeError: what the server raised; Unreachable when the stream is not open or ends; DeadlineExceeded;
                TooLarge for a message over `max_message_bytes` in either direction.
        """
        self._check(question)
        if not self.session.has_room:
            await self._wait_for_room(question.deadline)
        id, pending = self._post(question)
        if question.deadline < self._expiry_at:
            self._expire_at(question.deadline)
        try:
            return await pending.answer
        except asyncio.CancelledError:
            self._withdraw(id)
            raise
        finally:
            self._forget(id)

    async def evidence(self, nonce: bytes) -> bytes:
        """The server's attestation evidence for this nonce. One caller at a time.

        Raises:
            NotSupported: the server has no evidence; the message has its reason.
            Unreachable: the stream is not open or ends.
        """
        if self._closed:
            raise Unreachable(self._closed)
        self._challenged = True
        self._evidence = self._loop.create_future()
        self.session.send(frames.challenge(nonce))
        try:
            return await self._evidence
        finally:
            self._evidence = None

    def _check(self, question: Question) -> None:
        if self._closed:
            raise Unreachable(self._closed)
        if question.deadline <= clock.now():
            raise DeadlineExceeded("no time was left to ask")
        if len(question.message) > self._max_message_bytes:
            raise TooLarge(f"a request of {len(question.message)} bytes; at most {self._max_message_bytes}")
        if question.tokens is not None and self._protocol < frames.TOKENS_SINCE:
            raise NotSupported(f"the target speaks link protocol {self._protocol}, which has no streams of tokens")
        if question.origin is not None and self._protocol < frames.ORIGINS_SINCE:
            raise Unreachable(f"the site speaks link protocol {self._protocol}, by which no gateway asks another one")

    async def _wait_for_room(self, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await self.session.room()
        except TimeoutError as exc:
            raise DeadlineExceeded("the link had no room in time") from exc
        except LinkLost as exc:
            raise Disconnected(str(exc)) from exc
        if self._closed:
            raise Unreachable(self._closed)

    def _post(self, question: Question) -> tuple[int, _Pending]:
        self._last_id = id = self._last_id + 1
        message = question.message
        chunked = len(message) > self.session.chunk_bytes
        tokens = question.tokens
        has_objectives = self._protocol >= frames.TOKENS_SINCE
        first_by, next_s = (question.first_by, question.next_s) if has_objectives else (None, None)

        def encode(now: float) -> bytes:
            try:
                return frames.request(
                    id,
                    message,
                    budget_s=question.deadline - now,
                    priority=question.priority,
                    variant=question.variant,
                    traceparent=question.traceparent,
                    tracestate=question.tracestate,
                    chunked_bytes=len(message) if chunked else 0,
                    window=0 if tokens is None else tokens.window,
                    ttft_s=None if first_by is None else max(0.0, first_by - now),
                    tpot_s=next_s,
                    origin=question.origin,
                )
            except UnicodeEncodeError as exc:  # it ends its own question, and not the stream with all others
                self._fail(id, InvalidRequest(f"the request holds text that cannot be passed on: {exc.reason}"))
                return b""

        size_bytes = _REQUEST_FRAME_BYTES + (0 if chunked else len(message))
        parcel = Parcel(encode, size_bytes, id, message if chunked else b"")
        pending = _Pending(parcel, self._loop.create_future(), question.deadline, question.on_accepted)
        self._pending[id] = pending
        if tokens is not None:
            pending.tokens = ReceivedTokens(tokens, lambda count: self._credit(id, count))
        self.session.post(parcel)
        return id, pending

    def _credit(self, id: int, count: int) -> None:
        if id in self._pending:
            self.session.send(frames.credit(id, count))

    def _expire_at(self, instant: float) -> None:
        """Set the one timer that expires questions: most of them are answered long before their deadline."""
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry_at = instant
        self._expiry = self._loop.call_at(instant, self._expire)

    def _expire(self) -> None:
        now = clock.now()
        for id in [id for id, pending in self._pending.items() if pending.deadline <= now]:
            self._withdraw(id)
            self._fail(id, DeadlineExceeded("the target did not answer in time"))
        self._expiry, self._expiry_at = None, inf
        if self._pending:
            self._expire_at(min(pending.deadline for pending in self._pending.values()))

    def _withdraw(self, id: int) -> None:
        """Cancel a question on the server, if the server may have begun to work on it."""
        pending = self._pending.get(id)
        if pending is None or (pending.answer.done() and not pending.answer.cancelled()):
            return
        if not self.session.drop(pending.parcel):
            self.session.send(frames.cancel(id))

    def _fail(self, id: int, error: Exception) -> None:
        pending = self._forget(id)
        if pending is not None and not pending.answer.done():
            pending.answer.set_exception(error)

    def _forget(self, id: int) -> _Pending | None:
        """Expect and send no more of a question: a large one may be refused before all of it has been written."""
        pending = self._pending.pop(id, None)
        if pending is not None:
            self._partials.drop(id)
            self.session.drop(pending.parcel)
        return pending

    # StreamHandler

    def hello(self) -> Greeting:
        return self._greeting

    def handlers(self) -> Mapping[str, Callable[[Any], None]]:
        return {
            "accepted": self._take_accepted,
            "started": self._take_started,
            "tokens": self._take_tokens,
            "answer": self._take_answer,
            "chunk": self._take_chunk,
            "refused": self._take_refused,
            "load": self._take_load,
            "goodbye": self._take_goodbye,
            "evidence": self._take_evidence,
        }

    def greeted(self, greeting: Greeting) -> None:
        self._closed = ""
        self._protocol = min(greeting.protocol, self._greeting.protocol)
        self._listener.greeted(greeting)

    def measured(self, rtt_s: float) -> None:
        self._listener.measured(rtt_s)

    def ticked(self) -> None:
        """The client has nothing to send periodically."""

    def ended(self, reason: str) -> None:
        self._closed = reason
        if self._expiry is not None:
            self._expiry.cancel()
        for id in tuple(self._pending):
            self._fail(id, Disconnected(reason))
        if self._evidence is not None and not self._evidence.done():
            self._evidence.set_exception(Disconnected(reason))

    # frames

    def _find(self, id: int) -> _Pending | None:
        """The pending question of an id; None if it has ended. Raises ProtocolViolation for an unused id."""
        if not 0 < id <= self._last_id:
            raise ProtocolViolation(f"a frame for request {id}, which was never sent")
        return self._pending.get(id)

    def _take_accepted(self, frame: link_pb2.Accepted) -> None:
        pending = self._find(frame.id)
        if pending is not None and not pending.answer.done():
            pending.on_accepted(frames.accepted_of(frame))

    def _take_started(self, frame: link_pb2.Started) -> None:
        pending = self._find(frame.id)
        if pending is not None and pending.tokens is not None and not pending.answer.done():
            pending.tokens.started(frame.prompt_tokens, frame.cached_tokens)

    def _take_tokens(self, frame: link_pb2.Tokens) -> None:
        id = frame.id
        pending = self._pending.get(id) or self._find(id)
        if pending is None or pending.answer.done():
            return
        if pending.tokens is None:
            raise ProtocolViolation(f"tokens of request {id}, which wants them with its answer")
        try:
            pending.tokens.put(frames.token_batch_of(frame))
        except BadAnswer as exc:
            self._give_up(id, exc)

    def _take_answer(self, frame: link_pb2.Answer) -> None:
        pending = self._find(frame.id)
        if pending is None:
            if frame.HasField("load"):  # the load report is current, although its answer is late
                self._listener.loaded(frames.load_of(frame.load), None)
        elif frame.chunked_bytes:
            self._expect(frame)
        elif not pending.answer.done():
            pending.answer.set_result(frames.answered_of(frame, frame.message))

    def _expect(self, frame: link_pb2.Answer) -> None:
        try:
            self._partials.open(frame.id, frame, frame.chunked_bytes)
        except (TooLarge, CapacityError) as exc:
            self._give_up(frame.id, exc)

    def _give_up(self, id: int, error: Exception) -> None:
        """Refuse an answer that exceeds a bound, so that the server need not send the rest of it."""
        self.session.send(frames.cancel(id))
        self._fail(id, error)

    def _take_chunk(self, frame: link_pb2.Chunk) -> None:
        pending = self._find(frame.id)
        if pending is None:
            return
        if frame.id not in self._partials:
            raise ProtocolViolation(f"a chunk of answer {frame.id}, which was not announced")
        whole = self._partials.add(frame.id, frame.data)
        if whole is not None and not pending.answer.done():
            pending.answer.set_result(frames.answered_of(*whole))

    def _take_refused(self, frame: link_pb2.Refused) -> None:
        pending = self._find(frame.id)
        if frame.HasField("load"):
            self._listener.loaded(frames.load_of(frame.load), None)
        if pending is not None:
            self._fail(frame.id, frames.error_of(frame))

    def _take_load(self, frame: link_pb2.Load) -> None:
        offers = frames.offers_of(frame.offers) if frame.offers else None
        self._listener.loaded(frames.load_of(frame), offers)

    def _take_evidence(self, frame: link_pb2.Evidence) -> None:
        if not self._challenged:
            raise ProtocolViolation("evidence that nobody asked for")
        if self._evidence is None or self._evidence.done():
            return  # the challenge has ended
        if frame.refusal or not frame.proof:
            self._evidence.set_exception(NotSupported(frame.refusal[:_MOST_WORDS] or "it sent no evidence"))
        else:
            self._evidence.set_result(frame.proof)

    def _take_goodbye(self, frame: link_pb2.Goodbye) -> None:
        reason = frame.reason[:_MOST_WORDS]
        self._closed = f"the other side is leaving: {reason}"
        self._listener.leaving(reason)
