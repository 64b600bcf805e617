"""One request over a link stream, whichever side dialled: OIP bytes out, a checked reply back."""

from __future__ import annotations

from collections.abc import Callable

from gateway.targets.oip_messages import request_bytes, response_from_bytes
from tidegate import clock
from tidegate.link.client import LinkClient, Question
from tidegate.token_sink import TokenSink
from tidegate.types import Accepted, InferRequest, Reply


async def infer_over_link(
    client: LinkClient,
    request: InferRequest,
    *,
    variant: str,
    budget_s: float,
    priority: int,
    traceparent: str,
    on_accepted: Callable[[Accepted], None],
    tracestate: str = "",
    tokens: TokenSink | None = None,
) -> Reply:
    """The answer with its stage times. Raises what `LinkClient.ask` does, and BadAnswer."""
    deadline = clock.now() + budget_s
    answered = await client.ask(
        Question(
            message=request_bytes(request),
            deadline=deadline,
            priority=priority,
            variant=variant,
            traceparent=traceparent,
            on_accepted=on_accepted,
            tracestate=tracestate,
            tokens=tokens,
        )
    )
    return Reply(
        response=response_from_bytes(answered.message, request),
        stages={"queue": answered.queue_s, "compute": answered.compute_s},
        batch_size=answered.batch_size,
        variant=answered.variant,
        load=answered.load,
        batch_wait_s=answered.batch_wait_s,
    )
