"""One request over a link stream, whichever side dialled: OIP bytes out, a checked reply back."""

from __future__ import annotations

from collections.abc import Callable

from tidegate import clock
from tidegate.link.client import LinkClient, Question
from tidegate.link.origin import Origin
from tidegate.oip.grpc.oip_messages import request_bytes, response_from_bytes
from tidegate.token_sink import TokenObjectives, TokenSink
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
    objectives: TokenObjectives | None = None,
    origin: Origin | None = None,
) -> Reply:
    """The answer with its stage times. Raises what `LinkClient.ask` does, and BadAnswer."""
    now = clock.now()
    first_s, next_s = objectives or (None, None)
    answered = await client.ask(
        Question(
            message=request_bytes(request),
            deadline=now + budget_s,
            priority=priority,
            variant=variant,
            traceparent=traceparent,
            on_accepted=on_accepted,
            tracestate=tracestate,
            tokens=tokens,
            first_by=None if first_s is None else now + first_s,
            next_s=next_s,
            origin=origin,
        )
    )
    return Reply(
        response=response_from_bytes(answered.message, request),
        route=answered.route,
        stages={"queue": answered.queue_s, "compute": answered.compute_s},
        batch_size=answered.batch_size,
        variant=answered.variant,
        load=answered.load,
        batch_wait_s=answered.batch_wait_s,
        request_id=answered.request_id,
        attested=answered.attested,
    )
