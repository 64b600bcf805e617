"""A site is a target that is another gateway, with the devices and pools behind it, over the link stream.

The link is that of any target of our own (`link.py`): dialled, greeted, with acks, cancellations, tokens and load. What
differs is what is sent. A target computes what it is told; a site gateway places the request once more, and so it gets
what the caller demanded instead of the variant that was predicted here, with the rest of what the caller required
(`tidegate/link/origin.py`), and it answers with its own route beside the answer.

A request that has come through a gateway is never sent to that gateway again: neither does a site offer what it has
from other sites, nor is such a request placed on one (`gateway/serving/own_places.py`), nor would the other side take
it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog

from gateway.targets.link import LinkTarget
from tidegate import clock
from tidegate.link.frames import Greeting, ProtocolViolation
from tidegate.link.origin import Origin
from tidegate.token_sink import TokenSink
from tidegate.types import Accepted, Call, InferRequest, Reply

log = structlog.get_logger(__name__)


class SiteTarget(LinkTarget):
    """A `Target` that is another gateway; `relay` also tells it what the caller required."""

    def greeted(self, greeting: Greeting) -> None:
        """Take up the link; with no site at its other end it ends: an edge or a pool would keep no pin."""
        if not greeting.name.startswith("site/"):
            raise ProtocolViolation(f"{greeting.name!r} answers there, which is no site: tier: site is for a site_port")
        if greeting.name != self.id:
            log.warning("a site calls itself otherwise than it is listed", target=self.id, name=greeting.name)
        super().greeted(greeting)

    def relay(
        self,
        call: Call,
        request: InferRequest,
        *,
        budget_s: float,
        traceparent: str,
        on_accepted: Callable[[Accepted], None],
        tracestate: str,
        tokens: TokenSink | None,
    ) -> Awaitable[Reply]:
        """The answer of the site, with its own route. Raises as `infer`.

        Args:
            request: the call's, or one for the rest of an answer that has begun.
        """
        return self.infer(
            request,
            variant=call.variant,
            budget_s=budget_s,
            priority=call.priority,
            traceparent=traceparent,
            tracestate=tracestate,
            on_accepted=on_accepted,
            tokens=tokens,
            origin=Origin.of(call, self.gateway_name, clock.now()),
        )
