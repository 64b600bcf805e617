"""Answer what was answered already: the enforcement of `gateway/serving/known_answers.py`.

Outside of admission, so that a known answer takes no place and no target's time; inside of authentication, which
charges its tenant for the request and says whose answers it may have; inside of the deadline, which a known answer
keeps or misses like any other.

The same memory has the last rung of declared degradation: where no target answers, and no fallback model either
(`no_target.py` says by which errors that is known), an answer that is old is given, declared with its age. What it
knows is looked up first: only a request that has such an answer is given up a moment before its deadline, so that the
answer is in time where a target stays silent.

The layer is left out where no cache is configured. Two equal requests that come at once are both computed: a pool
computes them once where its model says `batching.coalesce`.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol, TypeVar

from msgspec.structs import replace

from gateway.layers.no_target import NO_TARGET
from gateway.layers.stack import Layer, Service
from tidegate.outcome import ServeError
from tidegate.types import Call, Reply

RESERVE_SHARE, LEAST_RESERVE_S, MOST_RESERVE_S = 0.02, 0.002, 0.02  # of the budget, to give an answer that is there
Keys = TypeVar("Keys")
Last = TypeVar("Last")


class AnswerMemory(Protocol[Keys, Last]):
    """Knows answers; none of its methods waits, and only `keys` raises."""

    def keys(self, call: Call) -> Keys | None:
        """The keys of a call that may have a known answer. Raises InvalidRequest: a demand that cannot be read."""
        ...

    def answer(self, call: Call, keys: Keys) -> Reply | None: ...

    def last_known(self, call: Call, keys: Keys) -> Last | None:
        """What may be given where nothing else answers."""
        ...

    def lend(self, call: Call, last: Last, error: ServeError) -> Reply: ...

    def keep(self, call: Call, keys: Keys, reply: Reply) -> None: ...


def cached(memory: AnswerMemory[Keys, Last]) -> Layer:
    def layer(inner: Service) -> Service:
        def service(call: Call) -> Awaitable[Reply]:
            keys = memory.keys(call)
            return inner(call) if keys is None else known_or_computed(call, keys)

        async def known_or_computed(call: Call, keys: Keys) -> Reply:
            known = memory.answer(call, keys)
            if known is not None:
                return known
            if memory.last_known(call, keys) is not None and call.deadline is not None:
                return await computed_or_last_known(call, call.deadline, keys)
            reply = await inner(call)
            memory.keep(call, keys, reply)
            return reply

        async def computed_or_last_known(call: Call, deadline: float, keys: Keys) -> Reply:
            reserve_s = min(MOST_RESERVE_S, max(LEAST_RESERVE_S, RESERVE_SHARE * (deadline - call.arrived_at)))
            try:
                reply = await inner(call.due(deadline - reserve_s))
            except NO_TARGET as error:
                last = memory.last_known(call, keys)  # anew: what made it may have come under suspicion since
                if last is None:
                    raise
                return memory.lend(call, last, error)
            memory.keep(call, keys, reply)
            left_s = reply.budget_left_s
            return reply if left_s is None else replace(reply, budget_left_s=left_s + reserve_s)

        return service

    return layer
