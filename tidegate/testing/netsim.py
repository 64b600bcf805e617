"""Links on a timeline, for tests: `netsim.at(5.0, link.partition)`, `netsim.every(2.0, link.flap, 0.4)`.

Time begins when the fixture is made, and again at `start()`. What is due is called on a thread of its own, one after
another; what a callable raises, `pytest.fail` too, is kept and fails the test at its end.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from typing import Any, Final

from tidegate import clock
from tidegate.netsim.proxy.link import Kind
from tidegate.testing.links import LinkThread, SimLink, Upstream

_ROUNDS_MAX: Final = 1_000_000

Act = Callable[[], Any]


class Netsim:
    """A timeline of acts on links. `close` ends the timeline; the links belong to their thread."""

    def __init__(self, thread: LinkThread) -> None:
        self.errors: list[BaseException] = []
        self._links = thread
        self._began_at = clock.now()
        self._due: list[tuple[float, int, Act]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def link(self, upstream: Upstream, *args: Any, **options: Any) -> SimLink:
        """Make a link, as the fixture `link` does."""
        return self._links.link(upstream, *args, **options)

    @property
    def now_s(self) -> float:
        """Seconds on this timeline."""
        return clock.now() - self._began_at

    def start(self) -> None:
        """Make now the second 0 of the timeline; acts that are still to come move with it."""
        with self._changed:
            self._began_at = clock.now()
            self._changed.notify()

    def at(self, at_s: float, act: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Call `act(*args, **options)` at this second of the timeline; at once if it has passed.

        Raises:
            ValueError: there is no such second.
        """
        if not at_s < threading.TIMEOUT_MAX:  # NaN and infinity, too: the thread could not wait, and nothing would come
            raise ValueError(f"at_s must be below {threading.TIMEOUT_MAX:g}, not {at_s}")
        with self._changed:
            heapq.heappush(self._due, (at_s, next(self._numbers), lambda: act(*args, **options)))
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="netsim timeline", daemon=True)
                self._thread.start()
            self._changed.notify()

    def every(
        self,
        every_s: float,
        act: Callable[..., Any],
        *args: Any,
        start_s: float | None = None,
        times: int | None = None,
    ) -> None:
        """Call it again and again, from `start_s` on (after one period by default), `times` times or to the end."""
        if not every_s > 0.0:
            raise ValueError(f"every_s must be above 0, not {every_s}")
        first_s = self.now_s + every_s if start_s is None else start_s
        left = itertools.repeat(None, times if times is not None else _ROUNDS_MAX)

        def again(at_s: float) -> None:
            if next(left, False) is None:
                self.at(at_s + every_s, again, at_s + every_s)
                act(*args)

        self.at(first_s, again, first_s)

    def partition(self, kind: Kind = "blackhole", *, for_s: float | None = None) -> None:
        """Break every link."""
        for link in self._links.links:
            link.partition(kind, for_s=for_s)

    def heal(self) -> None:
        """Heal every link."""
        for link in self._links.links:
            link.heal()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def __repr__(self) -> str:
        return f"<Netsim {self.now_s:.3f} s, {len(self._due)} acts to come>"

    def _run(self) -> None:
        while True:
            act = self._next()
            if act is None:
                return
            try:
                act()
            except BaseException as error:  # the test fails with it at its end
                self.errors.append(error)

    def _next(self) -> Act | None:
        """Wait for what is due next; None when closed."""
        with self._changed:
            while not self._closed:
                wait_s = self._due[0][0] - self.now_s if self._due else None
                if wait_s is not None and wait_s <= 0.0:
                    return heapq.heappop(self._due)[2]
                self._changed.wait(wait_s)
            return None
