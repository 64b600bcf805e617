"""Take calls that another gateway sends: refuse loops by name, and tell the time here as the other side reads it.

The path of a call has the names of the gateways that it has come through. One with this gateway's own name has come
round, or two gateways on its way have one name; it is refused before it takes a place. The refusal is no fault of the
caller, so the other gateway tries elsewhere.

The other gateway knows two stages of a target, its queue and its compute. What a site does, it does between the two:
everything from the launch on counts as compute, the way to its devices included, and the rest as the queue.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from gateway.layers.stack import Layer, Service
from tidegate.outcome import Unreachable
from tidegate.types import Call, Reply

_BEFORE_LAUNCH = ("admit", "classify", "queue")


def from_gateway(name: str, now: Callable[[], float]) -> Layer:
    """Args: name: of this gateway, as it stands in paths."""

    def layer(inner: Service) -> Service:
        async def service(call: Call) -> Reply:
            if name in call.path:
                way = " -> ".join((*call.path, name))
                raise Unreachable(f"gateway {name} is on this request's way already ({way}): a loop, or one name twice")
            reply = await inner(call)
            queue_s = sum([reply.stages.get(stage, 0.0) for stage in _BEFORE_LAUNCH])
            compute_s = max(0.0, now() - call.arrived_at - queue_s)
            return replace(reply, stages={"queue": queue_s, "compute": compute_s})

        return service

    return layer
