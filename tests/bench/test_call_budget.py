"""No serving process calls more Python functions for a request than its budget allows, or leaves garbage behind it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import pytest

from tests.bench.calls import Counted, budgets, of_agent, of_gateway, of_pool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
_SOME: Final = 0.5  # objects a request: a few of a whole run are none of a request's
Part = Callable[[AsyncExitStack, Path], Awaitable[dict[str, Counted]]]


@pytest.mark.parametrize("part", [of_gateway, of_pool, of_agent])
async def test_a_request_calls_no_more_functions_than_it_may(part: Part, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        found = await part(stack, tmp_path)
    budget = budgets()
    for name, one in found.items():
        most = "\n".join(f"  {calls:7.2f}  {function}" for function, calls in one.by_function.most_common(40))
        assert one.calls <= budget[name], (
            f"{name}: {one.calls:.0f} calls of Python functions a request, and {budget[name]:.0f} may be. What is "
            f"worth it raises the budget in the same commit (python -m tests.bench.calls --set). Most called:\n{most}"
        )
        assert one.garbage < _SOME, f"{name}: only a garbage collection frees {one.garbage:.1f} objects of a request"
        assert 1.25 * one.calls > budget[name], f"{name}: {one.calls:.0f} is far below its budget: lower it (--set)"
