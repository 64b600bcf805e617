"""Work for an operator's request that goes on to its end when the operator leaves.

Half of an order, or two writers of one file, would be left behind where a closed connection cancelled it in the middle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

T = TypeVar("T")

log = structlog.get_logger(__name__)


async def uninterrupted(work: Coroutine[Any, Any, T]) -> T:
    """Return what the work returns. A cancellation waits for the work's end and goes on then."""
    task = asyncio.create_task(work)
    left: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            left = error
    if left is None:
        return task.result()
    if not task.cancelled() and (failure := task.exception()) is not None:
        log.warning("an operator has left before it was told of a failure", reason=str(failure))
    raise left
