"""See every outcome, whichever layer it came from: outermost of all.

Observers are told of each call twice: as it begins, and after its end, with the reply or the error. What an observer
costs is paid by every request, so it counts and leaves; rendering belongs to whoever looks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from gateway.layers.stack import Layer, Service
from tidegate.types import Call, Reply


class Observer(Protocol):
    def began(self, call: Call) -> None: ...

    def answered(self, call: Call, reply: Reply, now: float) -> None: ...

    def ended(self, call: Call, error: BaseException, now: float) -> None:
        """The call ended without an answer: a ServeError, a cancellation, or a defect."""
        ...


def observe(now: Callable[[], float], *observers: Observer) -> Layer:
    def layer(inner: Service) -> Service:
        async def service(call: Call) -> Reply:
            for observer in observers:
                observer.began(call)
            try:
                reply = await inner(call)
            except (Exception, asyncio.CancelledError) as error:
                at = now()
                for observer in observers:
                    observer.ended(call, error, at)
                raise
            at = now()
            for observer in observers:
                observer.answered(call, reply, at)
            return reply

        return service

    return layer
