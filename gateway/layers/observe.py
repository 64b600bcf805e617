"""Report the outcome of every call to observers, whichever layer it came from: the outermost layer but tracing.

An observer is called twice for each call: as it begins, and after its end, with the reply or the error. Every request
pays for what an observer costs, so an observer counts and returns; rendering is done when a report is read.
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
