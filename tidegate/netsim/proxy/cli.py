"""`tidegate link` puts a simulated link in front of a server, from the shell.

One link in one process: what connects to `--listen` reaches `--upstream` through the scenario. On a terminal a status
line shows the state; otherwise each event is a line, with `--json` as JSON, and one of them is `ready`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final

import click

from tidegate.netsim.proxy.events import EventLog, LinkEvent
from tidegate.netsim.proxy.link import LinkError, LinkProxy
from tidegate.netsim.proxy.scenario import LoadedLinkScenario, load, names
from tidegate.netsim.proxy.status import status_line
from tidegate.netsim.proxy.timeline import LinkTimeline
from tidegate.runtime import events
from tidegate.runtime.lifeline import die_with_parent
from tidegate.runtime.process import until_signal

if TYPE_CHECKING:
    from rich.console import Console

LOOPBACK: Final = "127.0.0.1"


class Address(click.ParamType[tuple[str, int]]):
    """HOST:PORT, or a port on loopback."""

    name = "HOST:PORT"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        if isinstance(value, tuple):
            return value
        host, _, port = str(value).rpartition(":")
        if "/" in host:
            self.fail(f"{value!r} is a URL; a link passes bytes on: give HOST:PORT, like {LOOPBACK}:7001", param, ctx)
        if not port.isdecimal() or int(port) > 65535:
            self.fail(f"{value!r} is not HOST:PORT, like {LOOPBACK}:7001", param, ctx)
        return host.strip("[]") or LOOPBACK, int(port)


@click.command(
    epilog="""\b
Examples:
  tidegate link --listen 127.0.0.1:7001 --upstream 127.0.0.1:8001 --scenario lte_driving
  tidegate link --listen 7001 --upstream 8001 --control 7090      and, in another shell:
    curl -X PUT 127.0.0.1:7090/partition -d '{"kind": "blackhole", "for_s": 5}'
  tidegate link --list
"""
)
@click.option("--listen", type=Address(), default=f"{LOOPBACK}:0", show_default=True, help="Where clients connect.")
@click.option("--upstream", type=Address(), help="Where the link leads.")
@click.option(
    "--scenario", metavar="NAME|FILE", help="What the link is like, and what happens to it. Default: nothing."
)
@click.option("--seed", type=int, default=1, show_default=True, help="Of all chance; the same seed, the same link.")
@click.option("--control", type=Address(), help="Serve the HTTP control here.")
@click.option("--name", default="link", show_default=True, help="In events and in the seed's streams.")
@click.option("--json", "as_json", is_flag=True, help="Events as JSON lines on stdout.")
@click.option("--list", "listing", is_flag=True, help="Name the scenarios there are, and end.")
@click.option("--die-with-parent", "parent_pid", type=int, hidden=True, help="End when the process of this id ends.")
def link(
    listen: tuple[str, int],
    upstream: tuple[str, int] | None,
    scenario: str | None,
    seed: int,
    control: tuple[str, int] | None,
    name: str,
    as_json: bool,
    listing: bool,
    parent_pid: int | None,
) -> None:
    """Put a simulated network between a client and a server: delay, capacity, loss, outages, partitions.

    gRPC, MQTT, HTTP and TLS pass untouched. Ctrl-C ends it.
    """
    if listing:
        for one in names():
            click.echo(f"{one:16} {load(one).scenario.summary}")
        return
    if upstream is None:
        raise click.UsageError("--upstream HOST:PORT is needed: where should the link lead?")
    if control is not None and importlib.util.find_spec("aiohttp") is None:
        raise click.ClickException("--control needs aiohttp: pip install 'tidegate[gateway]'")
    if parent_pid is not None:
        die_with_parent(parent_pid)
    shown = _Shown(as_json)
    try:
        shaken = LinkProxy(upstream, name=name, host=listen[0], port=listen[1], seed=seed, log=EventLog(shown.event))
        asyncio.run(until_signal(_serve(shaken, load(scenario) if scenario else None, control, shown)))
    except (LinkError, OSError) as error:
        if as_json:
            events.emit("failed", role="link", reason=str(error))
        raise click.ClickException(str(error)) from error
    if shaken.violations:
        raise click.ClickException(
            f"{shaken.violations} connections lost or invented bytes: a defect of the link's own"
        )


async def _serve(
    link: LinkProxy, scenario: LoadedLinkScenario | None, control: tuple[str, int] | None, shown: _Shown
) -> None:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(_listening(link))
        timeline = await stack.enter_async_context(LinkTimeline(link))
        if scenario is not None:
            timeline.play(scenario)
        url = await stack.enter_async_context(_controlled(timeline, *control)) if control else None
        shown.ready(link, url)
        if shown.live is not None:
            await status_line(timeline, shown.live)
        await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def _listening(link: LinkProxy) -> AsyncIterator[LinkProxy]:
    with _named("--listen"):
        await link.__aenter__()
    try:
        yield link
    finally:
        await link.__aexit__()


@contextlib.asynccontextmanager
async def _controlled(timeline: LinkTimeline, host: str, port: int) -> AsyncIterator[str]:
    """Serve the control; its URL."""
    from aiohttp import web

    from tidegate.netsim.proxy.control import control_app

    runner = web.AppRunner(control_app(timeline), access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        with _named("--control"):
            await web.TCPSite(runner, host, port).start()
        yield "http://{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


@contextlib.contextmanager
def _named(option: str) -> Iterator[None]:
    """An address that cannot be had is the option's fault; the message says which."""
    try:
        yield
    except OSError as error:
        raise LinkError(f"{option}: {error.strerror or error}") from error


class _Shown:
    """Where events go: a line each, as JSON or as words, and above the status line where there is one."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self.live: Console | None = None
        if sys.stdout.isatty() and not as_json:
            from rich.console import Console

            self.live = Console(highlight=False)

    def event(self, event: LinkEvent) -> None:
        if self._as_json:
            sys.stdout.write(event.as_json() + "\n")
            sys.stdout.flush()
        elif self.live is not None:
            self.live.print(str(event), markup=False)
        else:
            click.echo(str(event))

    def ready(self, link: LinkProxy, control: str | None) -> None:
        upstream = "{}:{}".format(*link.upstream)
        if self._as_json:
            events.emit(
                "ready", role="link", name=link.name, listen=link.address, upstream=upstream, control=control,
                seed=link.seed,
            )  # fmt: skip
        else:
            click.echo(f"{link.address} → {upstream}, seed {link.seed}" + (f", control {control}" if control else ""))


if __name__ == "__main__":
    link()
