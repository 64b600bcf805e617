"""Links for tests: the proxy on a thread of its own, and a handle that any thread may call.

Every call returns when its effect has reached every live connection, so a test can change the link and check at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal, TypeVar

from tidegate.netsim.links.stream import Direction, StreamProfile
from tidegate.netsim.proxy.events import EventLog, LinkEvent
from tidegate.netsim.proxy.link import Kind, LinkError, LinkProxy, Traces
from tidegate.netsim.proxy.scenario import Toxic, convert, load, of, with_its_files
from tidegate.netsim.proxy.timeline import LinkTimeline

T = TypeVar("T")
Upstream = str | int | tuple[str, int]
_STARTS_WITHIN_S = 10.0


class LinkThread:
    """An event loop in a thread, with the links on it: the first `link` starts both, `close` ends both.

    Args:
        seed: of every link that names none of its own.
    """

    def __init__(self, seed: int = 1) -> None:
        self.seed = seed
        self.log = EventLog()
        self.links: list[SimLink] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stack = AsyncExitStack()

    def link(
        self,
        upstream: Upstream,
        scenario: str | dict[str, Any] | None = None,
        *,
        name: str | None = None,
        seed: int | None = None,
        port: int = 0,
        traces: Traces = None,
        **profile: Any,
    ) -> SimLink:
        """A link to `upstream` ("host:port", (host, port) or a port on loopback), listening on a port of its own.

        Args:
            scenario: a name (`tidegate link --list`), a YAML file, or the same as a dict.
            traces: recorded capacity, towards the upstream and back.
            profile: what the link is like, by the keys of a profile: `delay_ms=40, to_mbit=2`.

        Raises:
            LinkError: there is no such scenario, or a value makes no sense; the message says which.
        """
        where = _address(upstream)
        core = LinkProxy(
            where, name=name or f"link-{len(self.links) + 1}", port=port,
            seed=self.seed if seed is None else seed, log=self.log,
        )  # fmt: skip
        timeline = LinkTimeline(core)
        self._run(self._enter(core, timeline))
        made = SimLink(self, core, timeline)
        self.links.append(made)
        if scenario is not None:
            made.play(scenario)
        if profile or traces:
            made.apply(traces=traces, **profile)
        return made

    def call(self, function: Callable[[], T]) -> T:
        """The result of `function`, called on the links' loop."""
        if threading.current_thread() is self._thread:
            return function()

        async def on_loop() -> T:
            return function()

        return self._run(on_loop())

    def close(self) -> None:
        """End every link and the thread."""
        if self._loop is None or self._thread is None:
            return
        self._run(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = self._thread = None

    @property
    def violations(self) -> list[LinkEvent]:
        """Events in which the proxy lost or invented bytes by itself; always empty but for a defect of the proxy."""
        return self.log.events("violation")

    def __repr__(self) -> str:
        return f"<LinkThread {len(self.links)} links, {self.log!r}>"

    async def _enter(self, core: LinkProxy, timeline: LinkTimeline) -> None:
        await self._stack.enter_async_context(core)
        await self._stack.enter_async_context(timeline)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            self._begin()
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _begin(self) -> None:
        self._loop = loop = asyncio.new_event_loop()
        running = threading.Event()
        loop.call_soon(running.set)
        self._thread = threading.Thread(target=loop.run_forever, name="simulated links", daemon=True)
        self._thread.start()
        running.wait(_STARTS_WITHIN_S)


class SimLink:
    """One link. Every method may be called from any thread, and has happened when it returns."""

    def __init__(self, thread: LinkThread, core: LinkProxy, timeline: LinkTimeline) -> None:
        self._thread = thread
        self._core = core
        self._timeline = timeline
        self.name = core.name
        self.host, self.port = thread.call(lambda: (core.host, core.port))

    @property
    def address(self) -> str:
        """Where clients connect, as "host:port"."""
        return f"{self.host}:{self.port}"

    def play(self, scenario: str | dict[str, Any]) -> None:
        """Apply a scenario; its timeline begins now."""
        loaded = load(scenario) if isinstance(scenario, str) else of(scenario, self.name, Path.cwd())
        self._call(lambda: self._timeline.play(loaded))

    def apply(self, *, traces: Traces = None, **profile: Any) -> None:
        """Set what the link is like: `apply(delay_ms=40, jitter={"dist": "lognormal", "ms": 8})`. Toxics stay."""
        wanted = {"delay_ms": 0.0, **profile}
        if traces is not None:
            place = {"to_target": "", "from_target": "", "offset_s": 0.0}
            wanted["recording"] = {**place, **wanted.get("recording", {})}
        read = convert(wanted, StreamProfile, self.name)
        if traces is None:
            read, traces = with_its_files(read, self.name, Path.cwd())
        self._call(lambda: self._core.apply(read, traces=traces))

    def toxic(self, name: str, direction: Direction, **profile: Any) -> None:
        """Add a layer: `toxic("slow upload", "to", delay_ms=300)`."""
        toxic = convert({"direction": direction, **profile}, Toxic, name)
        self._call(lambda: self._core.put(name, toxic, direction))

    def remove(self, name: str) -> None:
        """Remove the toxic of this name."""
        self._call(lambda: self._core.remove(name))

    def clear(self) -> None:
        """Remove the scenario, every toxic and the partition."""

        def clear() -> None:
            self._timeline.stop()
            self._core.clear()

        self._call(clear)

    def partition(self, kind: Kind = "blackhole", direction: Direction = "both", *, for_s: float | None = None) -> None:
        """Break the link: blackhole, refuse, reset, close, silent or deaf; docs/testing-with-links.md has them all."""
        self._call(lambda: self._core.partition(kind, direction, for_s=for_s))

    def heal(self) -> None:
        def heal() -> None:
            self._core.heal()

        self._call(heal)

    def flap(self, for_s: float) -> None:
        """Partition the link for so many seconds."""
        self.partition(for_s=for_s)

    def hang_up(self, how: Literal["reset", "close"] = "reset") -> None:
        """End every live connection, and let new ones be made at once."""

        def once() -> None:
            self._core.partition(how)
            self._core.heal()

        self._call(once)

    def state(self) -> dict[str, Any]:
        """Layers, partition, connections, bytes in each direction, violations."""
        return self._call(self._core.state)

    def events(self, what: str | None = None) -> list[dict[str, Any]]:
        """The events of this link; of one kind, or all."""
        found = self._call(lambda: self._thread.log.events(what))
        return [event.plain() for event in found if event.link == self.name]

    def __repr__(self) -> str:
        return f"<SimLink {self._core!r}>"

    def _call(self, function: Callable[[], T]) -> T:
        return self._thread.call(function)


def _address(upstream: Upstream) -> tuple[str, int]:
    if isinstance(upstream, tuple):
        return upstream[0], upstream[1]
    host, _, port = str(upstream).rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise LinkError(f"{upstream!r} is no upstream: give it as 'host:port', (host, port) or a port")
    return host.strip("[]") or "127.0.0.1", int(port)
