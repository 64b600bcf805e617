"""The parts of a running agent that take settings while they work, and how the device does with them.

Settings that apply at once reach their parts here, and nowhere else; settings of workers are for `Deployment.renew`,
which makes new ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from edge_agent.config import EdgeConfig
from edge_agent.configuration.service import NotNow
from edge_agent.core.configuration_trial import DeviceStanding
from edge_agent.core.device_conditions import Endurance
from edge_agent.core.edge_queue import EdgeQueue
from edge_agent.delivery.deployment import Deployment
from edge_agent.device.sensors import Sensors
from edge_agent.offline.service import OfflineService
from edge_agent.serving.host import EdgeHost
from tidegate.oip.body_budget import BodyMemory
from tidegate.rollout.device_settings import Settings
from tidegate.runtime.logs import LEVELS


class AnswerCounts:
    """Mutable: requests that were computed, and those that failed by a model's fault, since the agent's start."""

    def __init__(self) -> None:
        self.answered = self.failed = 0

    def record(self, compute_s: float | None) -> None:
        """Args: compute_s: None of a request that failed."""
        if compute_s is None:
            self.failed += 1
        else:
            self.answered += 1

    def __repr__(self) -> str:
        return f"<AnswerCounts {self.answered} computed, {self.failed} failed>"


OF_WORKERS: Final = ("threads", "nice")  # keys that need another worker


@dataclass(frozen=True, slots=True)
class RunningParts:
    """All of them live as long as the agent serves."""

    queue: EdgeQueue
    endurance: Endurance
    sensors: Sensors
    held: BodyMemory
    offline: OfflineService
    deployment: Deployment
    host: EdgeHost
    counts: AnswerCounts

    def bound(self, config: EdgeConfig) -> None:
        """Put the settings that apply at once into the parts."""
        LEVELS.set(config.log_level)
        self.queue.resize(config.max_queue_size)
        self.endurance.limit(config.min_battery, config.max_temperature_c)
        self.sensors.count_as_metered(config.metered)
        self.held.max_bytes = config.limits.max_held_bytes
        if config.store is not None:
            self.offline.bound(config.store)
        for runner in self.deployment.serving.runners:
            runner.bound(hang_timeout_s=config.hang_timeout_s, max_waiting=config.max_queue_size)

    async def renewed(self, before: EdgeConfig, config: EdgeConfig, use: Callable[[EdgeConfig], None]) -> None:
        """Give each model another worker where the settings ask for one.

        Args:
            use: has runners be made by a configuration from now on.

        Raises:
            StartError: a worker does not come up; its model's present one stays.
            NotNow: models are being changed.
        """
        if all(getattr(before, key) == getattr(config, key) for key in OF_WORKERS):
            use(config)
            return
        use(config)
        try:
            done = await self.deployment.renew()
        except BaseException:
            use(before)
            raise
        if not done:
            use(before)
            raise NotNow(self.deployment.busy or "models are being changed")

    def standing(self) -> DeviceStanding:
        """How the device does."""
        runners = [one for one in self.deployment.serving.runners if self.host.routed(one.manifest.name) is one]
        return DeviceStanding(
            closed=self.endurance.why_not(self.sensors.now),
            ready=tuple(sorted(one.manifest.name for one in runners if one.ready)),
            served=tuple(sorted(one.manifest.name for one in runners)),
            answered=self.counts.answered,
            failed=self.counts.failed,
        )


def changed_by_others() -> Settings:
    """Settings of the running agent that something else may have changed: a signal turns `debug` on."""
    return {"log_level": LEVELS.level}
