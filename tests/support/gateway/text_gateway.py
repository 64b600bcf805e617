"""A gateway that serves the paced model `talker` with a real text side from one edge, in the test's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from edge_agent.app import EdgeApp
from edge_agent.config import EdgeConfig
from gateway.app import Gateway
from gateway.config.targets import TargetConfig
from tests.support.gateway.app import config_over
from tests.support.models.talking import save_talker
from tests.support.models.text_side import text_side_folder
from tidegate.config import load


def text_repository(root: Path, *, name: str = "talker", step_ms: float = 2.0) -> Path:
    """A repository with the paced model `talker`, or one of this name, whose tokens are of a real vocabulary."""
    side = root / "side"
    side.mkdir(parents=True)
    manifest = replace(text_side_folder(side), name=name)
    assert manifest.generative is not None
    ids = (5, manifest.generative.vocabulary_size - 1)
    steps = ((1.0, step_ms), (4.0, 1.5 * step_ms))
    save_talker(root / "models", manifest, steps, slots=4, cache_bytes=1024, ids=ids)
    for file in side.iterdir():
        file.rename(root / "models" / name / "1" / file.name)
    return root / "models"


@asynccontextmanager
async def text_gateway(folder: Path, *, step_ms: float = 2.0) -> AsyncIterator[tuple[Gateway, EdgeApp]]:
    models = await asyncio.to_thread(text_repository, folder, step_ms=step_ms)
    async with AsyncExitStack() as stack:
        settings: dict[str, Any] = {
            "name": "till",
            "grpc_port": 0,
            "http_port": None,
            "model_repository": models,
            "state_dir": folder / "state",
            "warmup_budget_s": 0.5,
        }
        edge = await stack.enter_async_context(EdgeApp(load(EdgeConfig, **settings), draw=lambda: 0.1))
        target = TargetConfig(name="till", tier="edge", address=edge.addresses["grpc"])  # type: ignore[call-arg]
        gateway = await stack.enter_async_context(Gateway(config_over(models, target)))
        await gateway.static_targets_tried(30.0)
        yield gateway, edge
