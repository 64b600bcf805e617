"""Answer what was answered already: the enforcement of `gateway/serving/known_answers.py`.

Outside of admission, so that a known answer takes no place and no target's time; inside of authentication, which
charges its tenant for the request and says whose answers it may have; inside of the deadline, which a known answer
keeps or misses like any other.

The layer is left out where no cache is configured. Two equal requests that come at once are both computed: a pool
computes them once where its model says `batching.coalesce`.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

from gateway.layers.stack import Layer, Service
from tidegate.types import Call, Reply


class AnswerMemory(Protocol):
    """Knows answers; none of its methods waits, and only `key` raises."""

    def key(self, call: Call) -> bytes | None:
        """The key of a call that may have a known answer. Raises InvalidRequest: a demand that cannot be read."""
        ...

    def answer(self, call: Call, key: bytes) -> Reply | None: ...

    def keep(self, call: Call, key: bytes, reply: Reply) -> None: ...


def cached(memory: AnswerMemory) -> Layer:
    def layer(inner: Service) -> Service:
        def service(call: Call) -> Awaitable[Reply]:
            key = memory.key(call)
            return inner(call) if key is None else known_or_computed(call, key)

        async def known_or_computed(call: Call, key: bytes) -> Reply:
            known = memory.answer(call, key)
            if known is not None:
                return known
            reply = await inner(call)
            memory.keep(call, key, reply)
            return reply

        return service

    return layer
