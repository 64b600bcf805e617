"""The server side of a link stream: it takes requests in, runs each as a task, and sends the answers.

`service.py` runs one `LinkServer` for every stream. A request becomes a `Call` whose deadline is its budget, counted
from the moment at which the request was complete. The call is checked against the host's manifest like any other (the
gateway has done so, but a link is open to everyone who can dial it) and is answered by `host.infer`. An error that the
host raises goes back under its own code.

The cost that a peer can cause is bounded: requests in progress per stream, bytes of incomplete messages, bytes waiting
to be written. A request over a bound is refused, and the stream goes on; a frame that no correct peer sends ends the
stream. When a stream ends, the work in progress for it is cancelled, since no answer could be delivered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from tidegate import clock
from tidegate.fleet.offers import encode_offers
from tidegate.link import frames
from tidegate.link.attestation_challenge import ChallengeResponder, no_evidence
from tidegate.link.chunks import ChunkAssembly
from tidegate.link.frames import AnswerFrame, Greeting, ProtocolViolation
from tidegate.link.origin import credential_of, originated
from tidegate.link.outbox import Outbox, Parcel
from tidegate.link.session import KeepaliveTiming, LinkLost, LinkSession, MessageStream
from tidegate.link.token_frames import TokenFrames
from tidegate.oip.check import checker_of
from tidegate.oip.content_limits import DEFAULT, ContentLimits
from tidegate.oip.grpc.codec import bytes_from_response, request_from_bytes
from tidegate.oip.host import ModelHost
from tidegate.outcome import InternalError, Overloaded, ServeError
from tidegate.rpc import link_pb2
from tidegate.runtime.owned_task import cancel_and_wait, forget_cancellation
from tidegate.trace_context import MOST_STATE, PARENT_KEY, STATE_KEY
from tidegate.types import Call, LoadReport, Reply

log = structlog.get_logger(__name__)

_ANSWER_FRAME_BYTES = 96  # without the message


def _trace_of(frame: link_pb2.Request) -> Mapping[str, str]:
    if not frame.tracestate:
        return {PARENT_KEY: frame.traceparent}
    return {PARENT_KEY: frame.traceparent, STATE_KEY: frame.tracestate[:MOST_STATE]}


class LinkServer:
    """The `StreamHandler` that answers requests on one stream, from its greeting to its end."""

    def __init__(
        self,
        stream: MessageStream,
        host: ModelHost,
        *,
        greeting: Callable[[], Greeting],
        load: Callable[[], LoadReport],
        heartbeat: KeepaliveTiming,
        max_concurrent: int,
        max_message_bytes: int,
        limits: ContentLimits = DEFAULT,
        outbox: Outbox | None = None,
        challenged: ChallengeResponder | None = None,
        dialled: bool = False,
        on_work: Callable[[LinkServer], None] = lambda _server: None,
        is_site: bool = False,
        host_for: Callable[[str], ModelHost] | None = None,
    ) -> None:
        """Args:
        is_site: the host is a gateway, and what its peers say of their callers counts.
        host_for: the host as the bearer of a credential may see it, for requests that show one; None: none is read.
        """
        self._is_site = is_site
        self._host_for = host_for
        self.dialled = dialled  # by this side
        self._on_work = on_work  # a request of this stream began or ended
        self._host = host
        self._challenged = challenged or ChallengeResponder(no_evidence, None)
        self._greeting = greeting
        self._load = load
        self._max_concurrent = max_concurrent
        self._limits = limits
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._answers: dict[int, Parcel] = {}  # large ones that are still being written
        self._highest_id = 0
        self._partials: ChunkAssembly[link_pb2.Request] = ChunkAssembly(
            max_message_bytes=max_message_bytes, max_partial_bytes=4 * max_message_bytes
        )
        self._peer = ""
        self._takes_tokens = False  # whether the other side knows what they are
        self._sent_offers = b""
        self._leaving = ""
        self.session = LinkSession(stream, self, heartbeat=heartbeat, outbox=Outbox() if outbox is None else outbox)
        self._tokens = TokenFrames(self.session.send)

    def __repr__(self) -> str:
        return f"<LinkServer for {self._peer or 'ungreeted'}, {len(self._tasks)} under way, {self.session!r}>"

    @property
    def peer(self) -> str:
        """The name that the other side gave in its hello; "" before it."""
        return self._peer

    @property
    def under_way(self) -> int:
        return len(self._tasks)

    async def run(self) -> str:
        """Serve the stream until it ends; returns the reason in words, once all work for the stream has ended."""
        try:
            return await self.session.run()
        finally:
            await cancel_and_wait(*self._tasks.values())

    def announce(self) -> None:
        """Send the load now, with the offers if they changed since they were last sent on this stream."""
        if not self._peer:
            return
        offers = encode_offers(self._greeting().offers)
        changed = offers != self._sent_offers
        self._sent_offers = offers
        self.session.send(frames.load(self._load(), offers if changed else b""))

    def tell_load(self) -> None:
        """Send the load now, for what others have sent since this stream last heard of it."""
        if self._peer and not self._leaving:
            self.session.send(frames.load(self._load()))

    def leave(self, reason: str) -> None:
        """Take no new requests; the stream ends when the requests in progress are answered."""
        self._leaving = reason
        if self._peer:
            self.session.send(frames.goodbye(reason))
        self._end_if_done()

    # StreamHandler

    def hello(self) -> Greeting:
        greeting = self._greeting()
        self._sent_offers = encode_offers(greeting.offers)
        return greeting

    def handlers(self) -> Mapping[str, Callable[[Any], None]]:
        return {
            "request": self._take_request,
            "chunk": self._take_chunk,
            "cancel": self._take_cancel,
            "credit": self._take_credit,
            "challenge": self._take_challenge,
            "goodbye": lambda _frame: None,  # it will close the stream when it has its answers
        }

    def greeted(self, greeting: Greeting) -> None:
        self._peer = greeting.name
        self._takes_tokens = greeting.protocol >= frames.TOKENS_SINCE

    def measured(self, rtt_s: float) -> None:
        """Only the client side uses the round-trip time."""

    def ticked(self) -> None:
        self._forget_written()  # the next large answer may be an hour away
        self.announce()

    def ended(self, reason: str) -> None:
        """`run` cancels the requests in progress."""

    # frames

    def _take_request(self, frame: link_pb2.Request) -> None:
        if frame.id == 0 or frame.id in self._tasks or frame.id in self._partials:
            raise ProtocolViolation(f"request {frame.id} announced twice")
        self._highest_id = max(self._highest_id, frame.id)
        try:
            self._check_room()
            if frame.chunked_bytes:
                self._partials.open(frame.id, frame, frame.chunked_bytes)
            else:
                self._begin(frame, frame.message)
        except ServeError as exc:
            self._refuse(frame.id, exc)

    def _check_room(self) -> None:
        if self._leaving:
            raise Overloaded(f"leaving: {self._leaving}", retry_after_s=1.0)
        under_way = len(self._tasks) + len(self._partials)  # an incomplete request has its cost as well
        if under_way >= self._max_concurrent:
            raise Overloaded(f"{under_way} requests of this stream are under way", retry_after_s=0.1)

    def _take_chunk(self, frame: link_pb2.Chunk) -> None:
        if frame.id not in self._partials:
            if frame.id > self._highest_id:
                raise ProtocolViolation(f"a chunk of request {frame.id}, which was not announced")
            return  # of a request that was refused or cancelled while this chunk was on its way
        whole = self._partials.add(frame.id, frame.data)
        if whole is None:
            return
        try:
            self._check_room()
            self._begin(*whole)
        except ServeError as exc:
            self._refuse(frame.id, exc)

    def _take_cancel(self, frame: link_pb2.Cancel) -> None:
        self._partials.drop(frame.id)
        if (task := self._tasks.get(frame.id)) is not None:
            task.cancel()
        if (parcel := self._answers.pop(frame.id, None)) is not None:
            self.session.drop(parcel)

    def _take_credit(self, frame: link_pb2.Credit) -> None:
        if not 0 < frame.id <= self._highest_id:
            raise ProtocolViolation(f"credit for request {frame.id}, which was never sent")
        self._tokens.credit(frame.id, frame.tokens)

    def _take_challenge(self, frame: link_pb2.Challenge) -> None:
        if (parcel := self._challenged.take(frame.nonce)) is not None:
            self.session.post(parcel)

    # work

    def _begin(self, frame: link_pb2.Request, message: bytes) -> None:
        """Start the task of a complete request. The frame's bytes are released here: a 64 MiB body is held once."""
        id, arrived_at = frame.id, clock.now()
        call = Call(
            request=request_from_bytes(message, self._limits),
            protocol="link",
            arrived_at=arrived_at,
            deadline=arrived_at + frame.budget_us / 1e6 if frame.budget_us else None,
            priority=frame.priority,
            variant=frame.variant,
            headers=_trace_of(frame) if frame.traceparent else {},
            on_accepted=lambda ack: self.session.send(frames.accepted(id, ack)),
            tokens=self._tokens.open(id, frame.window) if frame.window and self._takes_tokens else None,
            ttft_s=frame.ttft_us / 1e6 if frame.ttft_us else None,
            tpot_s=frame.tpot_us / 1e6 if frame.tpot_us else None,
        )
        host = self._host
        if self._is_site:
            try:
                call = originated(call, frame, self._peer)
                if self._host_for is not None and (credential := credential_of(frame)):
                    host = self._host_for(credential)
            except ServeError:
                self._tokens.close(id)
                raise
        task = asyncio.create_task(self._serve(id, call, host), name=f"link request {id} of {self._peer}")
        self._tasks[id] = task
        self._on_work(self)
        task.add_done_callback(lambda task: self._over(id, task))

    def _over(self, id: int, task: asyncio.Task[None]) -> None:
        forget_cancellation(task)
        self._tasks.pop(id, None)
        self._tokens.close(id)
        self._on_work(self)
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._leaving and not self._tasks:
            self.session.finish(f"left: {self._leaving}")

    async def _serve(self, id: int, call: Call, host: ModelHost) -> None:
        try:
            checker = checker_of(host.manifest(call.request.model_name, call.request.model_version))
            checker.check(call.request)
            checker.check_variant(call.variant)
            reply = await host.infer(call)
            await self._answer(id, reply)
        except ServeError as exc:
            self._refuse(id, exc)
        except LinkLost:
            return  # the answer cannot be delivered
        except asyncio.CancelledError:
            if not _cancelled_from_outside():  # something inside the host was cancelled; the client must not wait
                self._refuse(id, InternalError("the work was cancelled where it was done"))
            raise
        except Exception:
            log.exception("request failed", model=call.request.model_name, peer=self._peer)
            self._refuse(id, InternalError("internal error; the target's log has the traceback"))

    async def _answer(self, id: int, reply: Reply) -> None:
        self._tokens.flush()  # before their end, which the answer is
        answered = AnswerFrame(
            message=bytes_from_response(reply.response),
            queue_s=reply.stages.get("queue", 0.0),
            compute_s=reply.stages.get("compute", 0.0),
            batch_size=reply.batch_size,
            variant=reply.variant,
            load=reply.load or self._load(),
            batch_wait_s=reply.batch_wait_s,
            route=reply.route if self._is_site else None,
            request_id=reply.request_id,
            attested=reply.attested,
        )
        if not self.session.has_room:
            await self.session.room()
        size_bytes = len(answered.message)
        if size_bytes <= self.session.chunk_bytes:
            self.session.post(Parcel(lambda _now: frames.answer(id, answered), size_bytes + _ANSWER_FRAME_BYTES))
        else:
            self._post_large(id, answered)

    def _post_large(self, id: int, answered: AnswerFrame) -> None:
        size_bytes = len(answered.message)

        def encode(_now: float) -> bytes:
            return frames.answer(id, answered, chunked_bytes=size_bytes)

        self._forget_written()
        self._answers[id] = parcel = Parcel(encode, _ANSWER_FRAME_BYTES, id, answered.message)
        self.session.post(parcel)

    def _forget_written(self) -> None:
        self._answers = {id: parcel for id, parcel in self._answers.items() if not parcel.done}

    def _refuse(self, id: int, error: ServeError) -> None:
        self._tokens.flush()
        self.session.send(frames.refused(id, error, self._load()))


def _cancelled_from_outside() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
