"""A fleet that only reports: what it costs a gateway, how old the view of it is, and what a broker's restart does.

Real Mosquitto, a real gateway, and the crowd of `tidegate fleet simulate`, whose devices run the agent's own MQTT code.

    1,000 devices, a heartbeat a second    CPU of the gateway, a core being 1; age of what it knows, p99 in heartbeats
    the same, a fifth leaving each minute  whether the gateway's count of usable devices follows the crowd's own
    10,000 devices, one in ten seconds     the broker is killed and started again with nothing retained: how long until
                                           the gateway has heard each of them anew, and how many it had to ask again

The crowd shares the machine with the gateway and the broker: where it has no CPU left to connect with, the time until
all are back is its own. Its CPU is printed beside. `--quick` has 300 devices in the place of 10,000.

    python -m tests.bench.fleet [--quick] [--seconds 60] [--agents 1000] [--many 10000]
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Final

from simulator.crowd.crowd import Crowd
from simulator.crowd.habits import Habits
from tests.bench.harness import Goal, Report, parser, table
from tests.support.faults.fleet_stack import FleetStack
from tests.support.mqtt.brokers import MOSQUITTO, Mosquitto
from tidegate import clock
from tidegate.tools.broker.mosquitto_config import QUEUE_LINES

CORE_AIM, STALENESS_AIM, BACK_AIM_S, ASKED_AIM = 0.15, 1.5, 30.0, 0.05
LOOK_EVERY_S: Final = 0.5
SETTLE_S: Final = 5.0
LOOK_PER_DEVICE_S: Final = 0.0003  # to look at all is work for the gateway, which is measured
ALL_THERE_WITHIN_S: Final = 300.0


class Crowded(Mosquitto):
    """With the limits that `tidegate broker config` sets; without a line for each of ten thousand connections."""

    def command(self) -> list[str]:
        command = super().command()
        with open(command[-1], "a", encoding="utf-8") as config:
            config.write("\n".join(("connection_messages false", "max_connections -1", *QUEUE_LINES, "")))
        return command


class Stage:
    """A broker and a gateway, in a folder of their own."""

    def __init__(self, folder: Path, agents: int) -> None:
        (folder / "models").mkdir(parents=True)
        self.agents = agents
        self.fleet = FleetStack(folder, folder / "models", edges={})
        self.fleet.broker = Crowded(folder)

    def summary(self) -> dict[str, Any]:
        url = self.fleet.gateway.addresses["admin"]
        with urllib.request.urlopen(f"{url}/v1/fleet", timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def cpu_s(self) -> float:
        return self.fleet.gateway.cpu_s()

    async def until(self, holds: Callable[[dict[str, Any]], bool], within_s: float = ALL_THERE_WITHIN_S) -> float:
        """How long until it holds."""
        began_at = clock.now()
        while not holds(await asyncio.to_thread(self.summary)):
            if clock.now() > began_at + within_s:
                raise TimeoutError(f"after {within_s:g} s: {self.summary()}")
            await clock.sleep(max(LOOK_EVERY_S / 2, LOOK_PER_DEVICE_S * self.agents))
        return clock.now() - began_at


def fresh(summary: dict[str, Any]) -> int:
    """Devices that were heard lately, by a session that is on."""
    counts = summary["freshness"]
    return int(counts.get("fresh", 0) + counts.get("stale", 0))


async def steady(stage: Stage, agents: int, seconds: float) -> dict[str, float]:
    """A crowd that stays: CPU and ages."""
    async with Crowd(agents, stage.fleet.broker.url, habits=Habits(ramp_s=agents / 100)) as crowd:
        await stage.until(lambda found: fresh(found) == agents)
        await clock.sleep(SETTLE_S)
        began_at, cpu_s, crowd_s = clock.now(), stage.cpu_s(), crowd.seen.cpu_s
        ages: list[dict[str, float]] = []
        while clock.now() < began_at + seconds:
            ages.append((await asyncio.to_thread(stage.summary))["age_s"])
            await clock.sleep(LOOK_EVERY_S)
        took_s = clock.now() - began_at
        return {
            "gateway_cores": (stage.cpu_s() - cpu_s) / took_s,
            "crowd_cores": (crowd.seen.cpu_s - crowd_s) / took_s,
            "age_p50": median(one["p50"] for one in ages),
            "age_p99": median(one["p99"] for one in ages),
            "age_p99_worst_look": max(one["p99"] for one in ages),
        }


async def churning(stage: Stage, agents: int, seconds: float) -> dict[str, float]:
    """A crowd that comes and goes: how far the gateway's count is from the crowd's."""
    habits = Habits(ramp_s=agents / 100, churn_per_minute=0.2, crash_ratio=0.5)
    async with Crowd(agents, stage.fleet.broker.url, habits=habits, seed=2) as crowd:
        await stage.until(lambda found: fresh(found) >= 0.8 * agents)
        await clock.sleep(SETTLE_S)
        began_at, off = clock.now(), []
        while clock.now() < began_at + seconds:
            await clock.sleep(2 * LOOK_EVERY_S)
            off.append(abs(fresh(await asyncio.to_thread(stage.summary)) - crowd.seen.connected) / agents)
        counts = crowd.seen.counts
        return {
            "count_off_ratio": median(off),
            "left": float(counts["death"] + counts["power cuts"]),
            "asked_to_resync": float(counts["told to resync"]),
        }


async def restarted(stage: Stage, agents: int, interval_s: float) -> dict[str, float]:
    """The broker is killed and comes back with nothing retained."""
    habits = Habits(ramp_s=agents / 150)
    async with Crowd(agents, stage.fleet.broker.url, interval_s=interval_s, habits=habits, seed=3) as crowd:
        await stage.until(lambda found: fresh(found) == agents)
        await clock.sleep(SETTLE_S)
        before, cpu_s, crowd_s = crowd.seen.counts, stage.cpu_s(), crowd.seen.cpu_s
        stage.fleet.broker.kill()
        await stage.until(lambda found: fresh(found) < 0.1 * agents)
        began_at = clock.now()
        stage.fleet.broker.start()
        back_s = await stage.until(lambda found: fresh(found) == agents)
        took_s = clock.now() - began_at
        await clock.sleep(SETTLE_S)
        after = crowd.seen
        return {
            "back_s": back_s,
            "gateway_cores_meanwhile": (stage.cpu_s() - cpu_s) / took_s,
            "crowd_cores_meanwhile": (after.cpu_s - crowd_s) / took_s,
            "births_per_device": (after.counts["birth"] - before["birth"]) / agents,
            "asked_to_resync_ratio": (after.counts["told to resync"] - before["told to resync"]) / agents,
        }


async def measured(agents: int, many: int, seconds: float) -> dict[str, dict[str, float]]:
    found = {}
    with tempfile.TemporaryDirectory(prefix="tidegate-fleet-") as folder:
        for name, there, run in (
            ("steady", agents, lambda stage: steady(stage, agents, seconds)),
            ("churning", agents, lambda stage: churning(stage, agents, seconds)),
            ("restarted", many, lambda stage: restarted(stage, many, 10.0 if many > 2000 else 1.0)),
        ):
            stage = Stage(Path(folder) / name, there)
            with stage.fleet:
                found[name] = await run(stage)
                print(f"{name}: " + ", ".join(f"{key} {value:.3f}" for key, value in found[name].items()), flush=True)
    return found


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--agents", type=int, default=1000)
    options.add_argument("--many", type=int)
    arguments = options.parse_args()
    seconds = arguments.seconds or (15.0 if arguments.quick else 60.0)
    many = arguments.many or (300 if arguments.quick else 10_000)
    if MOSQUITTO is None:
        raise SystemExit("this needs Mosquitto (Debian: apt install mosquitto)")
    found = asyncio.run(measured(arguments.agents, many, seconds))
    table(
        ("part", "figure", "value"),
        [(part, name, f"{value:.3f}") for part, figures in found.items() for name, value in figures.items()],
    )
    report = Report("fleet", {"agents": arguments.agents, "many": many, "seconds": seconds})
    report.figures |= found
    few = f"with {many} devices" if many < 10_000 else ""
    report.goal(Goal("gateway_cores_1000", found["steady"]["gateway_cores"], CORE_AIM, "<="))
    report.goal(Goal("staleness_p99_heartbeats", found["steady"]["age_p99"], STALENESS_AIM, "<="))
    report.goal(
        Goal(
            "back_after_restart_s",
            None if few else found["restarted"]["back_s"],
            BACK_AIM_S,
            "<=",
            "a full run" * bool(few),
        )
    )
    report.goal(Goal("asked_to_resync_ratio", found["restarted"]["asked_to_resync_ratio"], ASKED_AIM, "<=", few))
    report.write()


if __name__ == "__main__":
    main()
