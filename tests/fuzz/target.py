"""A fuzz target: a subject that runs, what is thrown at it, and what must hold for every throw.

    no crash      `throw` lets out nothing that it does not expect; a target's own check says what is expected
    no hang       an answer within a second. A busy machine is no hang: what was slow is tried again, twice
    no flood      Python's memory never grows above twice the limit that the target names, whatever a sender claims
    still there   a good request works afterwards (`still_good`)

`run` drives one target by Hypothesis, in one event loop that lives as long as the subject does.
"""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final

from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate import clock

WITHIN_S: Final = 1.0
HANG_S: Final = 10.0
TRIES: Final = 3


class TooSlow(AssertionError):
    """An answer took longer than a second, three times."""


class TooLarge(AssertionError):
    """Memory grew above twice the limit."""


@dataclass(frozen=True)
class Target:
    """`limit_bytes`: of one message; what is thrown is smaller, and nothing may take more than twice of it."""

    name: str
    subject: Callable[[], AbstractAsyncContextManager[Any]]
    thrown: st.SearchStrategy[Any]
    throw: Callable[[Any, Any], Awaitable[None]]
    still_good: Callable[[Any], Awaitable[None]]
    limit_bytes: int = 1024 * 1024
    weight: float = 1.0  # how many examples, relative to others: one that is dear gets fewer

    def __repr__(self) -> str:
        return f"<Target {self.name}>"


def run(target: Target, how: settings, *, seen: Callable[[Any], None] = lambda _: None) -> None:
    """Throw until Hypothesis has had enough. Raises what a throw raised, with the smallest one that does."""
    with asyncio.Runner() as runner:
        subject = target.subject()
        inside = runner.run(subject.__aenter__())
        try:
            runner.run(target.still_good(inside))

            @how
            @given(target.thrown)
            def attempt(thrown: Any) -> None:
                seen(thrown)
                _held(runner, target, inside, thrown)
                runner.run(target.still_good(inside))

            attempt()
        finally:
            runner.run(subject.__aexit__(None, None, None))


def _held(runner: asyncio.Runner, target: Target, inside: Any, thrown: Any) -> None:
    for left in reversed(range(TRIES)):
        tracemalloc.start()  # for this long only: it makes Python several times slower
        try:
            began_at = clock.now()
            runner.run(asyncio.wait_for(_thrown(target, inside, thrown), HANG_S))
            took_s, grew_bytes = clock.now() - began_at, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        if grew_bytes > 2 * target.limit_bytes:
            raise TooLarge(f"{target.name} took {grew_bytes} bytes; the limit is {target.limit_bytes}")
        if took_s <= WITHIN_S:
            return
        if not left:
            raise TooSlow(f"{target.name} took {took_s:.2f} s")


async def _thrown(target: Target, inside: Any, thrown: Any) -> None:
    await target.throw(inside, thrown)
