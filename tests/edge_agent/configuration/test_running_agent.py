"""Settings of a whole agent that serves: real workers, real requests all the while, and signed documents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from edge_agent.app import EdgeApp
from edge_agent.config import EdgeConfig
from edge_agent.configuration.boot import boot_configuration
from tests.support.edge.rollouts import Author, eventually
from tests.support.models.tiny_models import tiny_repository
from tidegate import clock
from tidegate.arrays import array_to_tensor
from tidegate.config import load
from tidegate.fleet.reported import RolloutState
from tidegate.outcome import ServeError
from tidegate.rollout.desired import DesiredConfiguration, DesiredDocument
from tidegate.rollout.signing import sign_document
from tidegate.runtime.logs import LEVELS
from tidegate.types import Call, Datatype, InferRequest

pytestmark = pytest.mark.slow
AUTHOR = Author(1)
SCOPE = "device/kiosk-1"


@asynccontextmanager
async def agent(folder: Path) -> AsyncIterator[EdgeApp]:
    config = load(
        EdgeConfig,
        name="kiosk-1",
        grpc_port=0,
        http_port=0,
        model_repository=folder / "models",
        models=("double",),
        state_dir=folder / "state",
        warmup_budget_s=0.2,
        rollout={"keys": [folder / "trusted"]},
    )
    async with EdgeApp(config, draw=lambda: 0.1, boot=boot_configuration(config)) as app:
        yield app


def ask(app: EdgeApp, revision: int, *, watch_s: float = 1.0, **settings: bool | int | float | str | None) -> None:
    configuration = DesiredConfiguration(settings, watch_s)
    document = DesiredDocument(revision, 1_763_775_000, device="kiosk-1", configuration=configuration)
    app.deployment.take(SCOPE, sign_document(document, [AUTHOR.key]))


async def until(app: EdgeApp, revision: int, state: RolloutState) -> None:
    def is_there() -> bool:
        report = app.state().configuration
        return report is not None and (report.revision, report.state) == (revision, state)

    await eventually(is_there, say=lambda: app.state().configuration)


async def infer(app: EdgeApp) -> None:
    x = array_to_tensor("x", np.ones((1, 2), dtype=np.float32), Datatype.FP32)
    now = clock.now()
    await app.host.infer(Call(InferRequest("double", (x,)), "test", arrived_at=now, deadline=now + 60.0))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_repository(tmp_path / "models")
    AUTHOR.trust_file(tmp_path / "trusted")
    return tmp_path


async def test_workers_are_replaced_beside_and_no_request_is_lost(folder: Path) -> None:
    level = LEVELS.level
    async with agent(folder) as app:
        (before,) = app.deployment.serving.runners
        first_pid, answered, failed = before.pid, 0, list[ServeError]()

        async def call_for_ever() -> None:
            nonlocal answered
            while True:
                try:
                    await infer(app)
                    answered += 1
                except ServeError as error:
                    failed.append(error)
                await clock.sleep(0.002)

        calling = [asyncio.create_task(call_for_ever()) for _ in range(3)]
        try:
            ask(app, 1, threads=2, nice=3, max_queue_size=5, log_level="warning", hang_timeout_s=20)
            await until(app, 1, RolloutState.COMMITTED)
        finally:
            for task in calling:
                task.cancel()
            await asyncio.gather(*calling, return_exceptions=True)
        (after,) = app.deployment.serving.runners

        assert failed == [] and answered > 10
        assert after is not before and after.pid != first_pid and after.name == before.name
        assert (app.config.threads, app.config.nice, app.config.hang_timeout_s) == (2, 3, 20.0)
        assert "/5 waiting" in repr(app)
        assert LEVELS.level == "warning"
        told = app.state().configuration
        assert told is not None and told.differs == ()

        ask(app, 2)
        await until(app, 2, RolloutState.COMMITTED)
        assert (app.config.threads, LEVELS.level) == (1, "info")
    LEVELS.set(level)


async def test_a_document_with_a_key_that_is_not_on_the_list_is_refused_and_reported(folder: Path) -> None:
    async with agent(folder) as app:
        ask(app, 1, max_queue_size=5, mqtt="mqtt://elsewhere:1883")

        def is_refused() -> bool:
            rollouts = app.deployment.rollouts
            return rollouts is not None and any("key 'mqtt'" in one.reason for one in rollouts.refused)

        await eventually(is_refused)
        assert app.config.max_queue_size == 64
        await infer(app)
