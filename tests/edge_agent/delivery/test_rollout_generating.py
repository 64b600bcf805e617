"""A generating model comes to a device by rollout; its next version leaves alone what the one before has begun."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from edge_agent.app import EdgeApp
from tests.edge_agent.delivery.test_verifying import talker_with_files
from tests.support.edge.rollout_edge import AUTHOR, SCOPE, edge, settled
from tests.support.edge.rollouts import QUICK, ArtefactServer
from tests.support.models.generative import talker
from tidegate import clock
from tidegate.fleet.reported import RolloutState
from tidegate.generate.request import GenerateRequest, ids_of, infer_request
from tidegate.generate.token_stream import TokenStream
from tidegate.models.repository import Repository
from tidegate.rollout.desired import DesiredDocument
from tidegate.rollout.plan import ModelPlan
from tidegate.rollout.signing import sign_document
from tidegate.tools.delivery.files import files_of
from tidegate.types import Call, Reply

pytestmark = pytest.mark.slow


def order(app: EdgeApp, server: ArtefactServer, revision: int, models: Path, version: str) -> None:
    repository = Repository(models)
    found = files_of(repository, repository.manifest("talker", version))
    server.contents |= {one.artefact.sha256: one.path.read_bytes() for one in found}
    (manifest,) = (one.artefact.sha256 for one in found if one.artefact.path == "model.yaml")
    plan = ModelPlan(version, manifest, tuple(one.artefact for one in found), soak=QUICK)
    desired = DesiredDocument(revision, 1_763_775_000, models={"talker": plan}, urls=(server.url,), device="kiosk-1")
    app.deployment.take(SCOPE, sign_document(desired, [AUTHOR.key]))


async def talk(app: EdgeApp, max_tokens: int, stream: TokenStream | None = None) -> Reply:
    now = clock.now()
    request = infer_request("talker", GenerateRequest((5, 6, 7), max_tokens))
    return await app.host.infer(Call(request, "link", now, now + 30.0, tokens=stream))


async def test_an_answer_that_is_on_its_way_is_ended_by_the_version_that_began_it(
    folder: Path, server: ArtefactServer, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    talker_with_files(made)
    talker_with_files(made, replace(talker(), version="2"))
    async with edge(folder) as app:
        order(app, server, 1, made, "1")
        assert (await settled(app, 1)).state is RolloutState.COMMITTED
        assert (await talk(app, 5)).response.model_version == "1"

        stream = TokenStream(window=512)
        going_on = asyncio.create_task(talk(app, 400, stream))
        await stream.take()
        order(app, server, 2, made, "2")
        while (await talk(app, 2)).response.model_version == "1":
            await clock.sleep(0.01)
        assert not going_on.done() and app.host.load_report().in_flight >= 1
        assert (await settled(app, 2)).state is RolloutState.COMMITTED
        reply = await going_on
        assert reply.response.model_version == "1" and len(ids_of(reply.response.outputs[0])) == 400
