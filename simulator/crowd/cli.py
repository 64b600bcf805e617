"""`tidegate fleet`: whole fleets, real ones and, by `simulate`, one on one machine as a broker and a gateway see it."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from contextlib import suppress

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

from simulator.crowd.crowd import Crowd, CrowdCounts, CrowdFailed
from simulator.crowd.habits import Habits
from tidegate import clock
from tidegate.fleet.topics import DEFAULT_FLEET
from tidegate.mqtt.broker_url import BrokerUrl
from tidegate.runtime.duration import Duration
from tidegate.runtime.finite_range import FiniteRange
from tidegate.runtime.suggestion import SuggestingGroup
from tidegate.tools.delivery.cli import abort, pause, resume, rollback
from tidegate.tools.delivery.configure import configuration, configure

LOOK_EVERY_S = 1.0


@click.group(cls=SuggestingGroup)
def fleet() -> None:
    """Whole fleets: settings of their devices, and simulated ones for trying out brokers and gateways.

    \b
    Examples:
      tidegate fleet configure kiosks device.yaml --key operator.key
      tidegate fleet configuration
      tidegate fleet simulate --agents 1000 --broker mqtt://127.0.0.1:1883
    """


for command in (configure, configuration, pause, resume, abort, rollback):
    fleet.add_command(command)


@fleet.command(
    epilog="""\b
Examples:
  mosquitto -p 1883 &                                  # the demo's embedded broker is not made for a thousand
  tidegate fleet simulate --agents 1000 --broker mqtt://127.0.0.1:1883
  tidegate fleet simulate --agents 1000 --churn 5 --crashes 80 --for 5m --json
  tidegate fleet simulate --agents 10000 --interval 10s --ramp 1m
"""
)
@click.option("--agents", type=click.IntRange(1, 100_000), default=100, show_default=True, help="How many devices.")
@click.option("--broker", default="mqtt://127.0.0.1:1883", show_default=True, help="Where they report.")
@click.option("--fleet", "name", default=DEFAULT_FLEET, show_default=True, help="The fleet that they belong to.")
@click.option("--models", type=click.IntRange(0, 32), default=2, show_default=True, help="Models on each device.")
@click.option(
    "--interval",
    type=Duration(bare="s", min_s=0.1, max_s=60),
    default="1s",
    show_default=True,
    help="Time between heartbeats, 100ms to 60s.",
)
@click.option(
    "--ramp", type=Duration(bare="s"), default="10s", show_default=True, help="Time over which they first arrive."
)
@click.option(
    "--churn", type=FiniteRange(0, 600), default=0.0, show_default=True, help="Percent that leave in a minute."
)
@click.option(
    "--crashes", type=FiniteRange(0, 100), default=50.0, show_default=True, help="Percent of them by power cut."
)
@click.option("--for", "seconds", type=Duration(bare="s", min_s=0.1), default=None, help="How long; else until Ctrl-C.")
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of when which device comes and goes.")
@click.option("--json", "as_json", is_flag=True, help="A line of JSON a second on stdout, instead of a table.")
def simulate(
    agents: int,
    broker: str,
    name: str,
    models: int,
    interval: float,
    ramp: float,
    churn: float,
    crashes: float,
    seconds: float | None,
    seed: int,
    as_json: bool,
) -> None:
    """Let AGENTS devices report over MQTT as real agents do: births, heartbeats, goodbyes and wills.

    They answer no requests, so they advertise addresses that no gateway dials: `tidegate status`, `tidegate top` and
    the console list what is dialled, and show none of them. A gateway on the same broker tells what it hears of them
    on its admin port: `curl -s 'http://127.0.0.1:8003/v1/fleet?all=1'`.
    """
    try:
        BrokerUrl.parse(broker)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--broker") from error
    crowd = Crowd(
        agents,
        broker,
        fleet=name,
        models=models,
        interval_s=interval,
        habits=Habits(ramp, churn / 100.0, crashes / 100.0),
        seed=seed,
    )
    try:
        asyncio.run(_watch(crowd, seconds, as_json))
    except CrowdFailed as error:
        raise click.ClickException(str(error)) from error


async def _watch(crowd: Crowd, seconds: float | None, as_json: bool) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    console = Console(stderr=as_json)
    with Live(console=console, auto_refresh=False, transient=as_json) as live:
        async with crowd:
            began_at, before = clock.now(), CrowdCounts()
            while not stop.is_set() and (seconds is None or clock.now() < began_at + seconds):
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await stop.wait()
                seen = crowd.seen
                _show(crowd, seen, before, live, as_json)
                before = seen
            live.console.print("saying goodbye …")
        _show(crowd, crowd.seen, before, live, as_json)


def _show(crowd: Crowd, seen: CrowdCounts, before: CrowdCounts, live: Live, as_json: bool) -> None:
    beats = (seen.counts["heartbeat"] - before.counts["heartbeat"]) / LOOK_EVERY_S
    if as_json:
        sys.stdout.write(json.dumps({"connected": seen.connected, "heartbeats_per_s": beats, **seen.counts}) + "\n")
        sys.stdout.flush()
        return
    table = Table("devices", "connected", "beats/s", "births", "goodbyes", "power cuts", "asked to resync")
    table.add_row(
        str(crowd.agents),
        str(seen.connected),
        f"{beats:.0f}",
        str(seen.counts["birth"]),
        str(seen.counts["death"]),
        str(seen.counts["power cuts"]),
        str(seen.counts["told to resync"]),
    )
    live.update(table, refresh=True)
