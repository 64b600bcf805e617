"""Fix the deadline, once, and refuse what is already late.

The protocols put the least of a caller's own budgets into the call; a call without one gets the model's default.
Everything further in may rely on a deadline.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from gateway.layers.stack import Layer, Service
from tidegate.outcome import DeadlineExceeded
from tidegate.types import Call, InferRequest, Reply


def expire(now: Callable[[], float], default_budget_s: Callable[[InferRequest], float]) -> Layer:
    """Args: default_budget_s: the budget of a request whose caller gave none."""

    def layer(inner: Service) -> Service:
        def service(call: Call) -> Awaitable[Reply]:
            if call.deadline is None:
                call = call.due(call.arrived_at + default_budget_s(call.request))
            if call.deadline is not None and now() >= call.deadline:
                raise DeadlineExceeded("the budget ran out before the request was read")
            return inner(call)

        return service

    return layer
