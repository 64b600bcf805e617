"""A part of a crowd in a process of its own: `python -m simulator.crowd.child SETTINGS`, in JSON.

Every second it writes to stdout, in one line of JSON, how many of its devices are connected and what they have sent so
far. It ends by a signal, with goodbyes, or with the process that started it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from time import process_time

from simulator.crowd.device import SimulatedDevice
from simulator.crowd.habits import Habits
from tidegate import clock
from tidegate.runtime import events
from tidegate.runtime.lifeline import die_with_parent
from tidegate.runtime.logs import configure_logging
from tidegate.runtime.owned_task import cancel_and_wait
from tidegate.servers.limits import raise_file_limit

REPORT_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class ChildSettings:
    """The devices of one process."""

    first: int
    count: int
    url: str
    fleet: str
    models: int
    interval_s: float
    seed: int
    ramp_s: float
    churn_per_minute: float
    crash_ratio: float
    parent: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))


async def live(share: ChildSettings) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    counts, chance = Counter[str](), random.Random(f"{share.seed}/{share.first}")
    habits = Habits(share.ramp_s, share.churn_per_minute, share.crash_ratio)
    devices = [
        SimulatedDevice(
            number, url=share.url, fleet=share.fleet, models=share.models, interval_s=share.interval_s,
            habits=habits, draw=chance.random, counts=counts,
        )
        for number in range(share.first, share.first + share.count)
    ]  # fmt: skip
    lives = [asyncio.create_task(device.run(), name=device.name) for device in devices]
    try:
        while not stop.is_set():
            _report(devices, counts)
            with suppress(TimeoutError):
                async with asyncio.timeout(REPORT_EVERY_S):
                    await stop.wait()
    finally:
        await cancel_and_wait(*lives)
        _report(devices, counts)


def _report(devices: list[SimulatedDevice], counts: Counter[str]) -> None:
    connected = sum(device.is_connected for device in devices)
    events.emit("crowd", connected=connected, counts=dict(counts), cpu_s=process_time(), at=clock.now())


def main() -> None:
    share = ChildSettings(**json.loads(sys.argv[1]))
    die_with_parent(share.parent)
    configure_logging("crowd", level="error")  # ten thousand devices would log "connected" ten thousand times
    raise_file_limit()
    with suppress(BrokenPipeError):
        asyncio.run(live(share))
    os._exit(0)  # no time for a garbage collector that looks at ten thousand sessions


if __name__ == "__main__":
    main()
