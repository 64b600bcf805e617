"""An event loop on which an hour passes at once.

The loop never waits: when nothing is ready to run it sets its clock to the next timer and goes on. A test of a ten
minute outage takes milliseconds and gives the same order of events each time, because that order depends on instants
alone. `tidegate.clock.now()` reads the same virtual time while `run` is running.

Real sockets and threads work only where something real is ready at once; a wait that no timer will ever end is a
deadlock and raises `Deadlock` instead of hanging the test.

Prior art: trio's MockClock with `autojump_threshold=0`.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, ParamSpec, TypeVar

from tidegate import clock

T = TypeVar("T")
P = ParamSpec("P")
_REAL_WAIT_S = 1.0  # for a thread or a socket that the loop waits on with no timer set


class Deadlock(Exception):
    """Every task waits and no timer is set."""


class _JumpingSelector(selectors.BaseSelector):
    """Polls the real selector; where it would have waited, it moves virtual time instead."""

    def __init__(self, jump: Callable[[float], None]) -> None:
        self._real = selectors.DefaultSelector()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real.select(0)
        if ready:
            return ready
        if timeout is None:
            return self._wait_for_something_real()
        self._jump(max(0.0, timeout))
        return []

    def _wait_for_something_real(self) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real.select(_REAL_WAIT_S)
        if not ready:
            raise Deadlock("every task waits and no timer is set: nothing would ever happen")
        return ready

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Time starts at `start_s` and moves only when everything waits."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self._virtual_s = start_s
        super().__init__(_JumpingSelector(self._advance))

    def time(self) -> float:
        return self._virtual_s

    @property
    def timers(self) -> list[asyncio.TimerHandle]:
        """The timers that are set and not cancelled."""
        return [timer for timer in self._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Wait for the threads, which live in real time, however long: newer Pythons give them 300 s of this clock."""
        await super().shutdown_default_executor()

    def _advance(self, delay_s: float) -> None:
        self._virtual_s += delay_s

    def __repr__(self) -> str:
        return f"<VirtualTimeLoop t={self._virtual_s:.6f}>"


def run(main: Coroutine[Any, Any, T], *, start_s: float = 1000.0) -> T:
    """Run `main` to its end on virtual time and return what it returns."""
    loop = VirtualTimeLoop(start_s)
    with clock.reading(loop.time), asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main)


def on_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Decorator: makes an `async def test_…` a plain test that runs on virtual time."""

    @functools.wraps(test)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        run(test(*args, **kwargs))

    return wrapper


async def settle(turns: int = 5) -> None:
    """Let everything that is ready now run, without any time passing."""
    for _ in range(turns):
        await clock.sleep(0)


async def elapsed(work: Awaitable[T]) -> tuple[T, float]:
    """What `work` returns and how many virtual seconds it took."""
    started = clock.now()
    value = await work
    return value, clock.now() - started
