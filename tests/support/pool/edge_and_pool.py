"""A gateway with an edge and a pool over one repository of generating models, whose workers are processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from cloud_pool.app import PoolApp
from cloud_pool.config import PoolConfig
from edge_agent.app import EdgeApp
from edge_agent.config import EdgeConfig
from gateway.app import Gateway
from gateway.config.gateway import GatewayConfig
from gateway.config.targets import TargetConfig
from tidegate.config import load


class EdgeAndPool(NamedTuple):
    gateway: Gateway
    edge: EdgeApp
    pool: PoolApp
    pool_life: AsyncExitStack  # close it, and the pool is gone


@asynccontextmanager
async def edge_and_pool(models: Path, folder: Path) -> AsyncIterator[EdgeAndPool]:
    """Args: folder: for the edge's state."""
    async with AsyncExitStack() as stack:
        common: dict[str, Any] = {"grpc_port": 0, "model_repository": models, "warmup_budget_s": 2.0, "threads": 1}
        keys = {"http_port": None, "state_dir": folder / "state"}
        edge = await stack.enter_async_context(EdgeApp(load(EdgeConfig, name="till", **keys, **common)))
        keys = {"device": "cpu", "precision": "bf16"}
        life = await stack.enter_async_context(AsyncExitStack())
        pool = await life.enter_async_context(PoolApp(load(PoolConfig, name="main", **keys, **common)))
        targets = (
            TargetConfig(name="till", tier="edge", address=edge.addresses["grpc"]),  # type: ignore[call-arg]
            TargetConfig(name="main", tier="pool", address=pool.address),  # type: ignore[call-arg]
        )
        ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "admin_port": 0}
        words: dict[str, Any] = {"model_repository": models, "advertised_networks": ("127.0.0.0/8",), **ports}
        gateway = await stack.enter_async_context(Gateway(GatewayConfig(targets=targets, **words)))
        await gateway.static_targets_tried(60.0)
        yield EdgeAndPool(gateway, edge, pool, life)
