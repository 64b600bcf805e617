"""Refuse a call the moment there is no room for it."""

from __future__ import annotations

from collections.abc import Callable

from gateway.layers.stack import Layer, Service
from tidegate.limit import Limit
from tidegate.outcome import Overloaded
from tidegate.types import Call, Reply


def admit(limit: Limit, now: Callable[[], float]) -> Layer:
    def layer(inner: Service) -> Service:
        async def service(call: Call) -> Reply:
            if not limit.try_acquire():
                raise Overloaded(
                    f"the gateway is full: {limit.max_in_flight} requests are in flight",
                    retry_after_s=limit.retry_after_s,
                )
            entered_at = now()
            try:
                return await inner(call)
            finally:
                limit.release(now() - entered_at)

        return service

    return layer
