"""A whole agent in this process that takes rollouts, with its reports and answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from edge_agent.app import EdgeApp
from edge_agent.config import EdgeConfig
from tests.support.edge.rollouts import ArtefactServer, Author, Made, eventually
from tidegate import clock
from tidegate.arrays import array_to_tensor, tensor_to_array
from tidegate.config import load
from tidegate.fleet.reported import ModelReport
from tidegate.types import Call, Datatype, InferRequest

AUTHOR, STRANGER = Author(1), Author(2)
SCOPE = "device/kiosk-1"


@asynccontextmanager
async def edge(
    folder: Path, *, models: tuple[str, ...] | None = ("double",), wasm: bool = False, **rollout: Any
) -> AsyncIterator[EdgeApp]:
    keys: dict[str, Any] = {
        "name": "kiosk-1", "grpc_port": 0, "http_port": None, "model_repository": folder / "models",
        "models": models, "state_dir": folder / "state", "warmup_budget_s": 0.2, "store": None, "sensors": None,
        "steps": {"wasm": wasm},
        "rollout": {"keys": [folder / "trusted"], "recheck_s": 0.02, **rollout},
    }  # fmt: skip
    async with EdgeApp(load(EdgeConfig, **keys), draw=lambda: 0.01) as app:
        yield app


def report(app: EdgeApp) -> ModelReport | None:
    rollouts = app.deployment.rollouts
    assert rollouts is not None
    return rollouts.models[0] if rollouts.models else None


async def settled(app: EdgeApp, revision: int) -> ModelReport:
    """The report of the rollout that this revision asked for, once it is settled."""

    def is_settled() -> bool:
        found = report(app)
        return found is not None and found.revision == revision and found.state.is_settled

    await eventually(is_settled, say=lambda: report(app))
    found = report(app)
    assert found is not None
    return found


async def answer(app: EdgeApp, value: float = 3.0) -> tuple[str, float]:
    """(version, answer) of one request."""
    tensor = array_to_tensor("x", np.full((1, 1), value, np.float32), Datatype.FP32)
    call = Call(InferRequest("double", (tensor,)), "test", arrived_at=clock.now(), deadline=clock.now() + 30.0)
    reply = await app.host.infer(call)
    return reply.response.model_version, float(tensor_to_array(reply.response.outputs[0])[0, 0])


def ask(
    app: EdgeApp, server: ArtefactServer, revision: int, one: Made, author: Author = AUTHOR, **changes: Any
) -> None:
    server.add(one)
    app.deployment.take(SCOPE, author.message(revision, one.plan(**changes), urls=[server.url]))
