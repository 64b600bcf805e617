"""A generating model comes to a device by rollout; its next version leaves alone what the one before has begun."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from edge_agent.app import EdgeApp
from tests.edge_agent.delivery.test_verifying import talker_with_files
from tests.support.edge.rollout_edge import AUTHOR, SCOPE, edge, settled
from tests.support.edge.rollouts import QUICK, ArtefactServer
from tests.support.models.artefacts import artefact_of
from tests.support.models.generative import GENERATIVE, talker
from tests.support.stepping import run_one
from tidegate import clock
from tidegate.engines.engine import load_generative_engine
from tidegate.fleet.reported import RolloutState
from tidegate.generate.request import GenerateRequest, ids_of, infer_request
from tidegate.generate.teacher_forcing import KnownAnswer
from tidegate.generate.token_stream import TokenStream
from tidegate.models.repository import Repository
from tidegate.outcome import ModelNotFound, Unreachable
from tidegate.rollout.desired import DesiredDocument
from tidegate.rollout.golden_prompts import GoldenPrompts, encode_prompts
from tidegate.rollout.plan import ModelPlan, Probe, Soak
from tidegate.rollout.signing import sign_document
from tidegate.tools.delivery.files import files_of
from tidegate.types import Call, Reply

pytestmark = pytest.mark.slow


def order(
    app: EdgeApp,
    server: ArtefactServer,
    revision: int,
    models: Path,
    version: str,
    probe: Probe | None = None,
    soak: Soak = QUICK,
) -> None:
    repository = Repository(models)
    found = files_of(repository, repository.manifest("talker", version))
    server.contents |= {one.artefact.sha256: one.path.read_bytes() for one in found}
    (manifest,) = (one.artefact.sha256 for one in found if one.artefact.path == "model.yaml")
    plan = ModelPlan(version, manifest, tuple(one.artefact for one in found), soak=soak, probe=probe or Probe())
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


async def test_an_answer_of_a_version_that_is_taken_back_is_ended_by_it(
    folder: Path, server: ArtefactServer, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    for version in ("1", "2"):
        talker_with_files(made, replace(talker(), version=version))
    async with edge(folder) as app:
        order(app, server, 1, made, "1")
        assert (await settled(app, 1)).state is RolloutState.COMMITTED
        order(app, server, 2, made, "2", soak=Soak(duration_s=3600.0))
        while (await talk(app, 2)).response.model_version == "1":
            await clock.sleep(0.01)
        stream = TokenStream(window=512)
        going_on = asyncio.create_task(talk(app, 400, stream))
        await stream.take()

        order(app, server, 3, made, "1")
        while (await talk(app, 2)).response.model_version == "2":
            await clock.sleep(0.01)
        assert not going_on.done()
        reply = await going_on
        assert reply.response.model_version == "2" and len(ids_of(reply.response.outputs[0])) == 400
        assert (await settled(app, 3)).state is RolloutState.COMMITTED


async def test_an_answer_whose_new_version_dies_ends_declared_and_the_version_before_answers(
    folder: Path, server: ArtefactServer, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    for version in ("1", "2"):
        talker_with_files(made, replace(talker(), version=version))
    async with edge(folder) as app:
        order(app, server, 1, made, "1")
        assert (await settled(app, 1)).state is RolloutState.COMMITTED
        order(app, server, 2, made, "2", soak=Soak(duration_s=3600.0, max_exits=1))
        while (await talk(app, 2)).response.model_version == "1":
            await clock.sleep(0.01)
        stream = TokenStream(window=512)
        going_on = asyncio.create_task(talk(app, 400, stream))
        await stream.take()

        runner = app.deployment.serving.routed("talker")
        assert runner is not None and runner.pid is not None
        os.kill(runner.pid, signal.SIGKILL)
        with pytest.raises(Unreachable, match="talker:2"):
            await going_on
        found = await settled(app, 2)
        assert found.state is RolloutState.ROLLED_BACK and found.reason.startswith("crash_loop")
        assert (await talk(app, 5)).response.model_version == "1"


def golden_probe(server: ArtefactServer, models: Path, *, wrong: int = 0, **bounds: Any) -> Probe:
    """What the paced engine says to three prompts, but for `wrong` tokens of the second one."""
    engine = load_generative_engine("paced", models / "talker" / "1" / "generation.yaml")
    answers = []
    for prompt in ((5, 6, 7), (8, 9), (10,)):
        ids = run_one(engine, GenerateRequest(prompt, 20)).ids
        off = wrong if prompt == (8, 9) else 0
        answers.append(KnownAnswer(prompt, (*[(id + 1) % 1000 for id in ids[:off]], *ids[off:])))
    raw = encode_prompts(GoldenPrompts(GENERATIVE.vocabulary, "paced", tuple(answers)))
    golden = artefact_of("golden.msgpack", raw)
    server.contents[golden.sha256] = raw
    return Probe(golden=golden, **bounds)


async def test_golden_prompts_decide_while_the_version_before_goes_on_answering(
    folder: Path, server: ArtefactServer, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    for version in ("1", "2", "3"):
        talker_with_files(made, replace(talker(), version=version))
    async with edge(folder) as app:
        order(app, server, 1, made, "1", golden_probe(server, made, top1_min=1.0, p95_max_s=5.0))
        assert (await settled(app, 1)).state is RolloutState.COMMITTED

        stream = TokenStream(window=512)
        going_on = asyncio.create_task(talk(app, 400, stream))
        await stream.take()
        order(app, server, 2, made, "2", golden_probe(server, made, wrong=6, top1_min=0.95))
        found = await settled(app, 2)
        assert found.state is RolloutState.ROLLED_BACK
        # Behind a wrong token the engine says others than the file: each run judges one position.
        assert found.reason.startswith("probe_accuracy: paced: "), found.reason
        assert "golden tokens agree" in found.reason and "the worst is prompt 2" in found.reason
        assert (await talk(app, 5)).response.model_version == "1"
        reply = await going_on
        assert reply.response.model_version == "1" and len(ids_of(reply.response.outputs[0])) == 400

        order(app, server, 3, made, "3", golden_probe(server, made, top1_min=1.0, p95_max_s=1e-6))
        found = await settled(app, 3)
        assert found.state is RolloutState.ROLLED_BACK and found.reason.startswith("probe_slow: p95 is ")


async def test_a_probe_of_golden_prompts_is_bounded_in_time(
    folder: Path, server: ArtefactServer, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    talker_with_files(made)
    async with edge(folder) as app:
        order(app, server, 1, made, "1", golden_probe(server, made, timeout_s=0.05))
        found = await settled(app, 1)
        assert found.state is RolloutState.ROLLED_BACK and found.reason.startswith("timeout: warm")
        with pytest.raises(ModelNotFound):
            await talk(app, 5)
