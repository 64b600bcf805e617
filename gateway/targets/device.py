"""One device, over either path: the one that the gateway dials, or the one that the device dialled.

    direct up                 direct           (a stream that was dialled out stays open until the device ends it)
    direct down, dialled out  dialled out
    neither                   down, and dialled by us for as long as there is an address

The gateway sees one target with one history, so a device that has both paths is never counted or asked twice. Direct
goes first because it is what the operator's network was built for, it can be attested, and a gateway that restarts
finds it by itself. A change of the path ends nothing: what was asked on the other path is answered there.

The events of a path reach the fleet only while that path is in use; a change is reported as one `LinkUp`, and as
`LinkDown` first where the path in use was lost. A server at the address that is not the device is neither used nor
believed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Self

from gateway.core.fleet.link_events import LinkDown, LinkEvent, LinkUp, RedialFailed
from gateway.core.fleet.target import TargetSpec
from gateway.targets.accepted_link import AcceptedLink
from gateway.targets.link import LinkTarget
from gateway.targets.unary import UnaryTarget
from tidegate.outcome import Disconnected
from tidegate.token_sink import TokenObjectives, TokenSink
from tidegate.types import Accepted, InferRequest, Reply

MakeDirect = Callable[[Callable[[LinkEvent], None]], LinkTarget | UnaryTarget]


class DeviceTarget:
    """A `Target`. `async with` keeps the direct path up.

    Args:
        make_direct: makes the direct path, which reports to its argument; None: no address may be dialled.
        asks_evidence: whether evidence is asked of targets, so that a path without it has to report that.
    """

    def __init__(
        self,
        spec: TargetSpec,
        make_direct: MakeDirect | None,
        on_event: Callable[[LinkEvent], None],
        *,
        asks_evidence: bool = False,
    ) -> None:
        self._spec = spec
        self._on_event = on_event
        self._asks_evidence = asks_evidence
        self._direct = make_direct(self._from_direct) if make_direct is not None else None
        self._direct_up = False
        self._stranger = False  # another server than the device answers at the address
        self._accepted: AcceptedLink | None = None
        self._why_not = "it has not dialled out, and has no address that may be dialled"
        self._stack = AsyncExitStack()

    def __repr__(self) -> str:
        state = "direct" if self._direct_up else "dialled out" if self._accepted else "down"
        return f"<DeviceTarget {self.id} {state}: {self._accepted if self._accepted else self._direct!r}>"

    @property
    def id(self) -> str:
        return self._spec.id

    @property
    def direct(self) -> LinkTarget | UnaryTarget | None:
        return self._direct

    @property
    def accepted(self) -> AcceptedLink | None:
        """The stream that the device has dialled; None while there is none."""
        return self._accepted

    async def __aenter__(self) -> Self:
        if self._direct is not None:
            await self._stack.enter_async_context(self._direct)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._accepted is not None:  # the stream outlives this target, and may serve the next one
            self._accepted.detach()
        await self._stack.aclose()

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
        path = self._direct if self._direct_up or self._accepted is None else self._accepted
        if path is None:
            raise Disconnected(f"{self.id} has no link: {self._why_not}")
        return await path.infer(
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

    # the path that the device dialled

    def accept(self, link: AcceptedLink) -> None:
        """A stream of this device, greeted and welcomed; it takes the place of any before it."""
        before, self._accepted = self._accepted, link
        if before is not None:
            before.detach()
        link.attach(self._from_accepted)
        if not self._direct_up:
            if before is not None:
                self._on_event(LinkDown(self.id, "a newer stream of this device took its place", in_order=True))
            self._use(link)

    def left(self, link: AcceptedLink, reason: str, *, in_order: bool) -> None:
        """That stream has ended, or takes nothing new."""
        if link is self._accepted:
            self._accepted = None
            link.detach()
            self._why_not = reason
            if not self._direct_up:
                self._on_event(LinkDown(self.id, reason, in_order))

    def _use(self, link: AcceptedLink) -> None:
        self._on_event(link.up())
        if self._asks_evidence:
            self._on_event(link.unattested())

    def _from_accepted(self, event: LinkEvent) -> None:
        if isinstance(event, LinkDown) and self._accepted is not None:
            self.left(self._accepted, event.reason, in_order=event.in_order)
        elif not self._direct_up:
            self._on_event(event)

    # the path that the gateway dials

    def _from_direct(self, event: LinkEvent) -> None:
        if isinstance(event, LinkUp):
            self._stranger = not self._spec.static and event.name != self.id
            if self._stranger:
                event = LinkDown(self.id, f"whoever answers at {self._spec.address} is {event.name}")
        elif isinstance(event, RedialFailed):
            if self._accepted is None:
                self._on_event(event)
            return
        elif self._stranger and not isinstance(event, LinkDown):
            return  # its load and its life are no evidence for the device that we wanted
        if isinstance(event, LinkDown):
            self._lost_direct(event)
        elif isinstance(event, LinkUp):
            self._direct_up = True
            self._on_event(event)
        elif self._direct_up:
            self._on_event(event)

    def _lost_direct(self, event: LinkDown) -> None:
        was_up, self._direct_up = self._direct_up, False
        if was_up or self._accepted is None:
            self._on_event(event)
        if was_up and self._accepted is not None:
            self._use(self._accepted)
