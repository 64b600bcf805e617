"""A layer is a function from a service to a service; a stack is layers around the innermost service, outermost first.

A layer that does nothing after the inner service has answered is a plain function that returns what the inner one
returns: a coroutine around it would cost each request as much as the layer's own work. It may raise at the call itself,
as a service does that is called and awaited in one expression.

Source: starlette's middleware stack (a reversed loop), tower's Layer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tidegate.types import Call, Reply

Service = Callable[[Call], Awaitable[Reply]]
Layer = Callable[[Service], Service]


def stack(*layers: Layer, inner: Service) -> Service:
    """`inner` with `layers` around it: the first sees a call first and its outcome last."""
    service = inner
    for layer in reversed(layers):
        service = layer(service)
    return service
