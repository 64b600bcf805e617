"""Report the outcome of every call to observers, whichever layer it came from: the outermost layer but tracing.

An observer is called after each call's end, with the reply or the error, and one that has `began` as it begins, too.
Every request pays for what an observer costs, so an observer counts and returns; rendering is done when a report is
read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import structlog

from gateway.layers.stack import Layer, Service
from tidegate.outcome import ServeError
from tidegate.types import Call, Reply

log = structlog.get_logger(__name__)


class Observer(Protocol):
    def answered(self, call: Call, reply: Reply, now: float) -> None: ...

    def ended(self, call: Call, error: BaseException, now: float) -> None:
        """The call ended without an answer: a ServeError, a cancellation, or a defect."""
        ...


@runtime_checkable
class ArrivalObserver(Protocol):
    """An observer that wants to know of calls before their end."""

    def began(self, call: Call) -> None: ...


def observe(now: Callable[[], float], *observers: Observer) -> Layer:
    began = [one.began for one in observers if isinstance(one, ArrivalObserver)]
    answered, ended = [one.answered for one in observers], [one.ended for one in observers]

    def layer(inner: Service) -> Service:
        async def service(call: Call) -> Reply:
            try:
                for begin in began:  # within: one that refuses the call ends it for those that know of it already
                    begin(call)
                reply = await inner(call)
            except (Exception, asyncio.CancelledError) as error:
                at = now()
                for end in ended:
                    try:
                        end(call, error, at)
                    except Exception:
                        log.exception("a request's end was not observed")
                if isinstance(error, ServeError):
                    error.without_frames()
                raise
            at = now()
            for answer in answered:
                try:
                    answer(call, reply, at)
                except Exception:  # the caller has its answer, whoever fails to take note of it
                    log.exception("an answer was not observed")
            return reply

        return service

    return layer
