"""A gateway before two edges with the same generating model, in the test's own loop; each edge may be ended alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_agent.app import EdgeApp
from edge_agent.config import EdgeConfig
from gateway.app import Gateway
from gateway.config.targets import TargetConfig
from tests.support.gateway.app import config_over
from tidegate.config import load


@dataclass
class EdgePair:
    """A gateway, and the edges by the names of their targets."""

    gateway: Gateway
    edges: dict[str, EdgeApp]
    lives: dict[str, AsyncExitStack]

    @property
    def busy(self) -> list[str]:
        """The targets that answer something."""
        return [id for id, edge in self.edges.items() if edge.host.load_report().in_flight]

    def worker(self, target: str) -> int:
        """The process id of its worker."""
        (runner,) = self.edges[target].deployment.serving.runners
        assert runner.pid is not None
        return runner.pid

    async def shut_down(self, target: str) -> None:
        await self.lives.pop(target).aclose()


@asynccontextmanager
async def edge_pair(folder: Path, models: Path, *, drain_s: float = 2.0, **more: Any) -> AsyncIterator[EdgePair]:
    """Args: more: of the gateway's configuration."""
    async with AsyncExitStack() as stack:
        edges, lives = dict[str, EdgeApp](), dict[str, AsyncExitStack]()
        for name in ("a", "b"):
            lives[f"edge/{name}"] = life = await stack.enter_async_context(AsyncExitStack())
            settings = {"name": name, "grpc_port": 0, "http_port": None, "model_repository": models}
            config = load(EdgeConfig, state_dir=folder / name, warmup_budget_s=0.5, drain_s=drain_s, **settings)
            edges[f"edge/{name}"] = await life.enter_async_context(EdgeApp(config, draw=lambda: 0.1))
        targets = tuple(
            TargetConfig(name=id.partition("/")[2], tier="edge", address=edge.addresses["grpc"])  # type: ignore[call-arg]
            for id, edge in edges.items()
        )
        gateway = await stack.enter_async_context(Gateway(config_over(models, *targets, **more)))
        await gateway.static_targets_tried(30.0)
        yield EdgePair(gateway, edges, lives)
