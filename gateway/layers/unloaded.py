"""Refuse calls for models that an operator has unloaded at this gateway (`gateway/model_control.py`)."""

from __future__ import annotations

from collections.abc import Awaitable, Container

from gateway.layers.stack import Layer, Service
from tidegate.outcome import NothingAlive
from tidegate.types import Call, Reply

RETRY_AFTER_S = 5.0


def unloaded(names: Container[str], server_name: str) -> Layer:
    """Args: names: read for every call."""

    def layer(inner: Service) -> Service:
        def service(call: Call) -> Awaitable[Reply]:
            if call.request.model_name in names:
                raise NothingAlive(
                    f"model {call.request.model_name!r} is unloaded at {server_name}: ask another gateway",
                    retry_after_s=RETRY_AFTER_S,
                )
            return inner(call)

        return service

    return layer
