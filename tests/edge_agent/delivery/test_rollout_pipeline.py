"""A model with a pipeline comes to a device by rollout, with the files of its steps; what cannot run is taken back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_agent.app import EdgeApp
from tests.support.edge.rollout_edge import AUTHOR, SCOPE, edge, settled
from tests.support.edge.rollouts import QUICK, ArtefactServer
from tests.support.models.pipelines import wat_of_the_docs, weather_repository
from tidegate import clock
from tidegate.arrays import array_to_tensor, tensor_to_array
from tidegate.fleet.reported import RolloutState
from tidegate.models.repository import Repository
from tidegate.outcome import ModelNotFound
from tidegate.rollout.desired import DesiredDocument
from tidegate.rollout.plan import ModelPlan
from tidegate.rollout.signing import sign_document
from tidegate.tools.delivery.files import files_of
from tidegate.types import Call, Datatype, InferRequest

pytestmark = pytest.mark.slow
wasmtime = pytest.importorskip("wasmtime")


def modules(**other: str) -> dict[str, bytes]:
    return {name: bytes(wasmtime.wat2wasm(text)) for name, text in (wat_of_the_docs() | other).items()}


def order(app: EdgeApp, server: ArtefactServer, revision: int, models: Path) -> None:
    repository = Repository(models)
    found = files_of(repository, repository.manifest("weather"))
    server.contents |= {one.artefact.sha256: one.path.read_bytes() for one in found}
    (manifest,) = (one.artefact.sha256 for one in found if one.artefact.path == "model.yaml")
    plan = ModelPlan("1", manifest, tuple(one.artefact for one in found), soak=QUICK)
    desired = DesiredDocument(revision, 1_763_775_000, models={"weather": plan}, urls=(server.url,), device="kiosk-1")
    app.deployment.take(SCOPE, sign_document(desired, [AUTHOR.key]))


async def label(app: EdgeApp, text: str) -> Any:
    tensor = array_to_tensor("text", np.array([text.encode()], object), Datatype.BYTES)
    now = clock.now()
    reply = await app.host.infer(Call(InferRequest("weather", (tensor,)), "link", now, now + 30.0))
    return tensor_to_array(reply.response.outputs[0])[0, 0]


async def test_steps_come_along_and_a_module_that_cannot_run_changes_nothing(
    folder: Path, server: ArtefactServer, tmp_path: Path
) -> None:
    weather_repository(tmp_path / "good", modules())
    looping = wat_of_the_docs()["clip"].replace("(br_if $done", "(br $next) (br_if $done")
    weather_repository(tmp_path / "looping", modules(clip=looping))
    async with edge(folder, wasm=True) as app:
        order(app, server, 1, tmp_path / "good")
        assert (await settled(app, 1)).state is RolloutState.COMMITTED
        assert await label(app, "calm tide") == b"smooth"

        order(app, server, 2, tmp_path / "looping")
        found = await settled(app, 2)
        assert found.state in (RolloutState.FAILED, RolloutState.ROLLED_BACK)
        assert "step wasm (clip.wasm)" in found.reason
        assert await label(app, "storm") == b"rough"


async def test_a_device_that_runs_no_modules_says_which_key(
    folder: Path, server: ArtefactServer, tmp_path: Path
) -> None:
    weather_repository(tmp_path / "good", modules())
    async with edge(folder) as app:
        order(app, server, 1, tmp_path / "good")
        found = await settled(app, 1)
        assert found.state in (RolloutState.FAILED, RolloutState.ROLLED_BACK)
        assert "key 'steps.wasm' is false" in found.reason
        with pytest.raises(ModelNotFound):
            await label(app, "calm")
