"""A target of our own, over a link stream that this side keeps up.

One task dials, greets, and runs the stream until it ends; then says `LinkDown` once and dials again after a full-
jitter backoff, for as long as the target exists. Every dial is a new channel and so a new connection: a stream that
fell silent because its TCP connection is half open must not be put back on that same connection.

While there is no stream, `infer` fails at once: the request machine has better uses for the time than to wait for a
link. A target that says goodbye takes nothing new, still answers what it has, and is dialled again when it has
closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

import grpc
import structlog

from gateway.core.events import LinkDown, LinkEvent, LinkLoad, LinkRtt, LinkUp
from gateway.upstream.messages import request_bytes, response_from_bytes
from tidegate import __version__, clock
from tidegate.backoff import Backoff
from tidegate.fleet.offers import ModelOffer
from tidegate.link.asker import MAX_MESSAGE_BYTES, Asker, Question
from tidegate.link.frames import Greeting
from tidegate.link.session import Heartbeat
from tidegate.link.streams import DIAL_OPTIONS, DialledStream
from tidegate.outcome import Unreachable
from tidegate.types import Accepted, InferRequest, LoadReport, Reply

log = structlog.get_logger(__name__)

BACKOFF_BASE_S = 0.25
BACKOFF_CAP_S = 5.0


class LinkTarget:
    """A `Target`. `async with` keeps the link up; events are told in the order in which they happened."""

    def __init__(
        self,
        id: str,
        address: str,
        *,
        gateway_name: str,
        on_event: Callable[[LinkEvent], None],
        draw: Callable[[], float],
        ping_interval_s: float = 1.0,
        silent_pings: int = 3,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self._id = id
        self._address = address
        self._on_event = on_event
        self._greeting = Greeting(f"gateway/{gateway_name}", 0, __version__)
        self._heartbeat = Heartbeat(ping_interval_s, silent_pings)
        self._max_message_bytes = max_message_bytes
        self._backoff = Backoff(draw, BACKOFF_BASE_S, BACKOFF_CAP_S)
        self._asker: Asker | None = None
        self._task: asyncio.Task[None] | None = None
        self._up = False
        self._down_reason: str | None = None  # None: not told yet

    def __repr__(self) -> str:
        state = repr(self._asker) if self._up else f"down: {self._down_reason or 'dialling'}"
        return f"<LinkTarget {self._id} at {self._address} {state}>"

    @property
    def id(self) -> str:
        return self._id

    @property
    def address(self) -> str:
        return self._address

    @property
    def connected(self) -> bool:
        """Whether the target takes requests on its link now."""
        return self._asker is not None and self._asker.open

    async def __aenter__(self) -> LinkTarget:
        self._task = asyncio.create_task(self._keep_up(), name=f"link to {self._id}")
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def infer(
        self,
        request: InferRequest,
        *,
        variant: str,
        budget_s: float,
        priority: int,
        traceparent: str,
        on_accepted: Callable[[Accepted], None],
    ) -> Reply:
        asker = self._asker
        if asker is None or not asker.open:
            raise Unreachable(f"{self._id} has no link: {self._down_reason or 'dialling'}")
        deadline = clock.now() + budget_s
        answered = await asker.ask(
            Question(request_bytes(request), deadline, priority, variant, traceparent, on_accepted)
        )
        return Reply(
            response=response_from_bytes(answered.message, request),
            stages={"queue": answered.queue_s, "compute": answered.compute_s},
            batch_size=answered.batch_size,
            variant=answered.variant,
            load=answered.load,
        )

    # Listener

    def greeted(self, greeting: Greeting) -> None:
        self._up, self._down_reason = True, None
        self._on_event(LinkUp(self._id, greeting.name, greeting.epoch, greeting.offers))

    def loaded(self, load: LoadReport, offers: tuple[ModelOffer, ...] | None) -> None:
        self._on_event(LinkLoad(self._id, load, offers))

    def measured(self, rtt_s: float) -> None:
        self._on_event(LinkRtt(self._id, rtt_s))

    def leaving(self, reason: str) -> None:
        self._down(f"leaving: {reason}")

    # the link

    async def _keep_up(self) -> None:
        while True:
            dialled_at = clock.now()
            self._down(await self._exchange())
            if clock.now() - dialled_at > BACKOFF_CAP_S:
                self._backoff.reset()
            await clock.sleep(self._backoff.next_delay_s())

    async def _exchange(self) -> str:
        """Dial once and run the stream to its end; why it ended."""
        channel = grpc.aio.insecure_channel(self._address, options=DIAL_OPTIONS)
        stream = DialledStream(channel)
        self._asker = Asker(
            stream, self._greeting, self, heartbeat=self._heartbeat, max_message_bytes=self._max_message_bytes
        )
        try:
            return await self._asker.run()
        except Exception as exc:  # a defect of ours must not cost the target for good
            log.exception("link failed", target=self._id)
            return f"internal error: {type(exc).__name__}"
        finally:
            self._asker = None
            stream.close()
            await channel.close(None)

    def _down(self, reason: str) -> None:
        """Told once per change: when an open link ends, and when the first dial fails."""
        if self._up or self._down_reason is None:
            self._on_event(LinkDown(self._id, reason))
        self._up, self._down_reason = False, reason
