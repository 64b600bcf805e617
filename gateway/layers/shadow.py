"""Hand each answer to shadowing, which computes a few of them again (`gateway/serving/shadowing.py`).

Innermost: what is handed on is the answer of one execution with its version settled. The layer is left out where
shadowing is off.
"""

from __future__ import annotations

from typing import Protocol

from gateway.layers.stack import Layer, Service
from tidegate.types import Call, Reply


class AnswerListener(Protocol):
    """Told of each answer, on its way to the caller: it neither waits nor raises."""

    def answered(self, call: Call, reply: Reply) -> None: ...


def shadow(listener: AnswerListener) -> Layer:
    """Tell the listener of each answer."""

    def layer(inner: Service) -> Service:
        async def service(call: Call) -> Reply:
            reply = await inner(call)
            listener.answered(call, reply)
            return reply

        return service

    return layer
