"""The model loader of an edge starts and ends runners by name, on devices whose models are not rolled out.

A runner of the new version is warm before it answers, and the one before it ends when its calls have ended: the same
steps as a rollout's (`edge_agent/delivery/steps.py`), without signatures, soak and fallback. So a device that has
rollouts has no model control: two masters of one model would undo each other's work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from edge_agent.serving.catalogue import read_entry
from edge_agent.serving.runner_set import RunnerSet
from tidegate.models.manifest import EngineName, Manifest, Where


class EdgeModelLoader:
    """A `ModelLoader` over the runners of one device.

    Args:
        serving: the runners, once there are any.
        served: the manifests of the models that are routed.
    """

    def __init__(
        self,
        root: Path,
        allowed: tuple[EngineName, ...],
        *,
        serving: Callable[[], RunnerSet],
        served: Callable[[], Mapping[str, Manifest]],
    ) -> None:
        self.where: Where | None = "edge"
        self._root = root
        self._allowed = allowed
        self._serving = serving
        self._served = served

    def served(self) -> Mapping[str, Manifest]:
        return self._served()

    async def load(self, name: str) -> Manifest:
        serving = self._serving()
        before = serving.routed(name)
        entry = await asyncio.to_thread(read_entry, self._root, name, self._allowed, or_lower=False)
        serving.route(await serving.start(entry))
        if before is not None:
            await serving.stop(before)
        return entry.manifest

    async def restore(self, name: str) -> bool:
        """Whatever is served here comes from the repository."""
        return False

    async def unload(self, name: str) -> None:
        serving = self._serving()
        before = serving.routed(name)
        serving.unroute(name)
        if before is not None:
            await serving.stop(before)

    def __repr__(self) -> str:
        return f"<EdgeModelLoader of {self._root}>"
