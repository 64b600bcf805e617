"""Operators of a test, as tasks that end with a block, and waiting for what they do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tests.support.operator.cluster import OperatorCluster
from tidegate import clock
from tidegate.tools.operator.app import operate

LEASE_S = 1.5
WITHIN_S = 30.0


@asynccontextmanager
async def operating(
    cluster: OperatorCluster, identity: str = "a", **conductors: str
) -> AsyncIterator[asyncio.Task[None]]:
    working = operate(cluster.address, namespaces=("prod",), identity=identity, conductors=conductors, lease_s=LEASE_S)
    task = asyncio.create_task(working, name=f"operator {identity}")
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(holds: Callable[[], bool], what: str, within_s: float = WITHIN_S) -> float:
    """Return the seconds that it took. Raises AssertionError: it does not become so."""
    begun = clock.now()
    while not holds():
        assert clock.now() < begun + within_s, f"not within {within_s:g} s: {what}"
        await clock.sleep(0.02)
    return clock.now() - begun
