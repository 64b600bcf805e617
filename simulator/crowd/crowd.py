"""A crowd of simulated devices, over as many processes as they need, inside `async with`.

One process holds up to a thousand: the agent's code is made for one device, and a core beats some two thousand times a
second. `seen` is the sum of what the processes reported last, at most a second old.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final, Self

from simulator.crowd.child import ChildSettings
from simulator.crowd.habits import Habits
from tidegate.fleet.topics import DEFAULT_FLEET

PER_PROCESS: Final = 1000
_GOODBYES_WITHIN_S: Final = 30.0
_LINE_LIMIT: Final = 1 << 20


class CrowdFailed(Exception):
    """A process of the crowd ended by itself."""


@dataclass(slots=True)
class CrowdCounts:
    """What the crowd has sent so far."""

    connected: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    cpu_s: float = 0.0


class Crowd:
    """Args:
    agents: how many devices.
    url: of the broker.
    models: how many models each of them offers.
    interval_s: between two heartbeats of one device.
    """

    def __init__(
        self,
        agents: int,
        url: str,
        *,
        fleet: str = DEFAULT_FLEET,
        models: int = 2,
        interval_s: float = 1.0,
        habits: Habits | None = None,
        seed: int = 1,
    ) -> None:
        self.agents = agents
        habits = habits or Habits()
        self._shares = [
            ChildSettings(
                first=first,
                count=min(PER_PROCESS, agents - first),
                url=url,
                fleet=fleet,
                models=models,
                interval_s=interval_s,
                seed=seed,
                ramp_s=habits.ramp_s,
                churn_per_minute=habits.churn_per_minute,
                crash_ratio=habits.crash_ratio,
                parent=os.getpid(),
            )
            for first in range(0, agents, PER_PROCESS)
        ]
        self._processes: list[asyncio.subprocess.Process] = []
        self._readers: list[asyncio.Task[None]] = []
        self._last: dict[int, dict[str, Any]] = {}

    async def __aenter__(self) -> Self:
        for share in self._shares:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "simulator.crowd.child", share.to_json(),
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, limit=_LINE_LIMIT,
                start_new_session=True,  # Ctrl-C is for the parent, which ends its children
            )  # fmt: skip
            self._processes.append(process)
            reader = asyncio.create_task(self._read(share.first, process), name=f"crowd from {share.first}")
            self._readers.append(reader)
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.terminate()
        try:
            async with asyncio.timeout(_GOODBYES_WITHIN_S):
                await asyncio.gather(*(process.wait() for process in self._processes))
        except TimeoutError:
            for process in self._processes:
                if process.returncode is None:
                    process.kill()
        await asyncio.gather(*self._readers)

    @property
    def seen(self) -> CrowdCounts:
        """Raises CrowdFailed."""
        for process in self._processes:
            if process.returncode not in (None, 0):
                raise CrowdFailed(f"a process of the crowd ended with {process.returncode}; its output is above")
        whole = CrowdCounts()
        for report in self._last.values():
            whole.connected += report["connected"]
            whole.counts.update(report["counts"])
            whole.cpu_s += report["cpu_s"]
        return whole

    async def _read(self, first: int, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            self._last[first] = json.loads(line)

    def __repr__(self) -> str:
        return f"<Crowd of {self.agents} in {len(self._shares)} processes>"
