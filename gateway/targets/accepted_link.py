"""A link stream that a device dialled: the same session as on a link that the gateway dials, begun from the other end.

Nothing is redialled here: a device that dials out dials again. A stream names its device in its first frame, and it
belongs to no target until it was welcomed (`welcome`, which returns "" or the reason of a refusal). From then on its
events go to the target that it is attached to, and it ends once. A refusal ends it before it was ever used.

Its frames, deadlines, cancellation, chunks and heartbeats are those of `tidegate/link`, unchanged: the side that asks
is the gateway, whichever side dialled. One thing does not cross: evidence is bound to both ends' certificates, and gRPC
does not show a dialler's certificate to the dialler; so a device on this path is not attested, and reports that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.core.fleet.attestation import Attestation
from gateway.core.fleet.link_events import LinkAttested, LinkDown, LinkEvent, LinkLoad, LinkRtt, LinkUp
from tidegate.fleet.offers import ModelOffer
from tidegate.link.client import MAX_MESSAGE_BYTES, LinkClient
from tidegate.link.frames import Greeting
from tidegate.link.link_inference import infer_over_link
from tidegate.link.session import KeepaliveTiming, MessageStream
from tidegate.outcome import Disconnected
from tidegate.token_sink import TokenObjectives, TokenSink
from tidegate.types import Accepted, InferRequest, LoadReport, Reply

UNBOUND = Attestation("it dialled out: evidence is bound to both certificates, and a dialler is not told which it saw")


class AcceptedLink:
    """One stream from its acceptance to its end. Must be made on the loop.

    Args:
        peer: where it came from, for people.
        welcome: called once, with this link and its greeting; the reason of a refusal, or "".
        proven: the peer's identity by TLS or a key, as "edge/NAME"; "" where no proof is required.
    """

    def __init__(
        self,
        stream: MessageStream,
        greeting: Greeting,
        *,
        peer: str,
        welcome: Callable[[AcceptedLink, Greeting], str],
        proven: str = "",
        heartbeat: KeepaliveTiming = KeepaliveTiming(),  # noqa: B008 - frozen
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self.peer = peer
        self.proven = proven
        self.greeting: Greeting | None = None
        self.greeted_once = asyncio.Event()
        self.load: LoadReport | None = None  # the last that came without an answer
        self.rtt_s: float | None = None
        self._on_load: Callable[[], None] = _unlent
        self._on_leaving: Callable[[str], None] = _stays
        self._on_event: Callable[[LinkEvent], None] = _unheard
        self.refused = ""
        self._welcome = welcome
        self._leaving = ""  # why it is of no use any more
        self._client = LinkClient(stream, greeting, self, heartbeat=heartbeat, max_message_bytes=max_message_bytes)

    @property
    def id(self) -> str:
        """ "edge/NAME", as it calls itself; "" before its hello."""
        return self.greeting.name if self.greeting else ""

    @property
    def client(self) -> LinkClient:
        """The requests under way on the stream."""
        return self._client

    @property
    def open(self) -> bool:
        """Whether it takes requests."""
        return self._client.open and not self.refused

    @property
    def why_not(self) -> str:
        return self._leaving or "it has not said hello yet"

    async def run(self) -> str:
        """Exchange frames until the stream ends; the reason in words."""
        self._leaving = reason = await self._client.run()
        return reason

    def refuse(self, reason: str) -> None:
        """End it, and tell the device that it was refused, although it had been let in."""
        self.refused = reason
        self.finish(reason)

    def finish(self, reason: str) -> None:
        """End it once what waits to be written has left."""
        self._leaving = reason
        self._client.session.finish(reason)

    async def infer(
        self,
        request: InferRequest,
        *,
        variant: str,
        budget_s: float,
        priority: int,
        traceparent: str,
        on_accepted: Callable[[Accepted], None],
        tracestate: str = "",
        tokens: TokenSink | None = None,
        objectives: TokenObjectives | None = None,
    ) -> Reply:
        """As `Target.infer`."""
        if not self.open:
            raise Disconnected(f"{self.id} has no link: {self.why_not}")
        return await infer_over_link(
            self._client,
            request,
            variant=variant,
            budget_s=budget_s,
            priority=priority,
            traceparent=traceparent,
            on_accepted=on_accepted,
            tracestate=tracestate,
            tokens=tokens,
            objectives=objectives,
        )

    def up(self) -> LinkUp:
        """Its hello, as an event."""
        assert self.greeting is not None, "it was not greeted yet"
        return LinkUp(self.id, self.id, self.greeting.epoch, self.greeting.offers, path_kind="dialled out")

    def attach(self, on_event: Callable[[LinkEvent], None]) -> None:
        """Report what this stream learns to `on_event` from now on."""
        self._on_event = on_event

    def detach(self) -> None:
        """Report nothing any more: the stream belongs to no target now."""
        self._on_event = _unheard

    def lend(self, on_load: Callable[[], None], on_leaving: Callable[[str], None]) -> None:
        """For others that use this stream too: report each change of its load or offers, and its goodbye."""
        self._on_load, self._on_leaving = on_load, on_leaving

    # Listener

    def greeted(self, greeting: Greeting) -> None:
        self.greeting = greeting
        self.refused = self._welcome(self, greeting)
        self.greeted_once.set()
        if self.refused:  # in order: the status with the reason needs a stream on which nothing is being written
            self._client.session.finish(self.refused)

    def loaded(self, load: LoadReport, offers: tuple[ModelOffer, ...] | None) -> None:
        if offers is not None and self.greeting is not None:  # a target that attaches later gets the offers of now
            held = self.greeting
            self.greeting = Greeting(held.name, held.epoch, held.agent_version, offers)
        self.load = load
        self._on_event(LinkLoad(self.id, load, offers))
        self._on_load()

    def measured(self, rtt_s: float) -> None:
        self.rtt_s = rtt_s
        self._on_event(LinkRtt(self.id, rtt_s))

    def leaving(self, reason: str) -> None:
        self._leaving = f"leaving: {reason}"
        self._on_event(LinkDown(self.id, self._leaving, in_order=True))
        self._on_leaving(reason)

    def unattested(self) -> LinkAttested:
        return LinkAttested(self.id, UNBOUND)

    def __repr__(self) -> str:
        return f"<AcceptedLink {self.id or 'ungreeted'} from {self.peer} {self._client!r}>"


def _unlent() -> None:
    """For a stream that one process uses."""


def _stays(_reason: str) -> None:
    """As `_unlent`."""


def _unheard(_event: LinkEvent) -> None:
    """For a stream that belongs to no target."""
