"""Rollouts to a whole agent in this process: real files, real workers, a real server of artefacts; no broker."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.edge.rollout_edge import AUTHOR, SCOPE, STRANGER, answer, ask, edge, report, settled
from tests.support.edge.rollouts import ArtefactServer, eventually, made
from tidegate.fleet.reported import RolloutState
from tidegate.rollout.plan import Net
from tidegate.runtime.process import StartError
from tidegate.types import Datatype

pytestmark = pytest.mark.slow


async def test_a_new_version_comes_is_tried_and_committed_and_survives_a_start_without_network(
    folder: Path, server: ArtefactServer
) -> None:
    one = made("2", factor=5.0)
    async with edge(folder) as app:
        assert await answer(app) == ("1", 6.0)
        ask(app, server, 1, one, probe=one.probe(atol=1e-3, p95_max_s=30.0))
        found = await settled(app, 1)
        assert (found.state, found.reason, found.running) == (RolloutState.COMMITTED, "", "2")
        assert await answer(app) == ("2", 15.0)
        assert found.fetched_bytes == server.sent_bytes == one.plan(probe=one.probe()).size_bytes
    async with edge(folder) as app:
        assert await answer(app) == ("2", 15.0)
        assert report(app) == replace(found, generation=1)


@pytest.mark.parametrize(
    ("changes", "bounds", "reason"),
    [
        ({"wrong": 0.5}, {"atol": 0.1}, "probe_accuracy: int8: case 1: output 'y' is off by"),
        ({"rounds": 60}, {"p95_ratio_max": 3.0}, "probe_slow: p95 is"),
        ({"rounds": 60}, {"p95_max_s": 1e-6}, "probe_slow: p95 is"),
    ],
)
async def test_a_model_that_is_worse_than_its_probe_allows_never_answers_anybody(
    folder: Path, server: ArtefactServer, changes: dict[str, Any], bounds: dict[str, Any], reason: str
) -> None:
    async with edge(folder) as app:
        one = made("2", **changes)
        ask(app, server, 1, one, probe=one.probe(**bounds))
        found = await settled(app, 1)
        assert found.state is RolloutState.ROLLED_BACK
        assert reason in found.reason
        assert (found.running, await answer(app)) == ("1", ("1", 6.0))


@pytest.mark.parametrize(
    ("bend", "reason"),
    [
        ({"model": b"\x00 this is no model"}, "onnx: int8.onnx: is not an ONNX model"),
        ({"manifest": lambda one: replace(one, name="triple")}, "manifest: it is triple:2"),
        (
            {"manifest": lambda one: replace(one, inputs=(replace(one.inputs[0], datatype=Datatype.FP64),))},
            "onnx: int8.onnx: its input 'x' is tensor(float)",
        ),
    ],
)
async def test_what_makes_no_sense_is_refused_before_anything_is_loaded(
    folder: Path, server: ArtefactServer, bend: dict[str, Any], reason: str
) -> None:
    async with edge(folder) as app:
        ask(app, server, 1, made("2", **bend))
        found = await settled(app, 1)
        assert found.state is RolloutState.FAILED
        assert reason in found.reason
        assert await answer(app) == ("1", 6.0)


async def test_a_tampered_chunk_is_refused_and_the_old_model_answers_all_the_while(
    folder: Path, server: ArtefactServer
) -> None:
    one = made("2", padding_bytes=50_000)
    server.tampered.add(one.files[1].sha256)
    async with edge(folder) as app:
        ask(app, server, 1, one)
        found = await settled(app, 1)
        assert found.state is RolloutState.FAILED
        assert "chunk_digest: chunk 6 came 3 times" in found.reason
        assert found.fetched_bytes <= one.plan().max_bytes
        assert await answer(app) == ("1", 6.0)


async def test_documents_that_are_not_signed_by_a_trusted_key_or_older_or_another_of_the_same_revision_are_refused(
    folder: Path, server: ArtefactServer
) -> None:
    async with edge(folder) as app:
        ask(app, server, 5, made("2", factor=5.0))
        await settled(app, 5)
        for author, revision, reason in (
            (STRANGER, 9, "signature: it is signed by"),
            (AUTHOR, 4, "revision: 4 is older than 5"),
            (AUTHOR, 5, "revision: 5 is in force with other content"),
        ):
            ask(app, server, revision, made("3", factor=7.0), author)

            def refused(reason: str = reason) -> bool:
                rollouts = app.deployment.rollouts
                return rollouts is not None and any(reason in one.reason for one in rollouts.refused)

            await eventually(refused)
        assert await answer(app) == ("2", 15.0)
        assert app.deployment.rollouts is not None
        assert app.deployment.rollouts.accepted == ((SCOPE, 5),)


async def test_a_download_that_is_cut_at_every_tenth_fetches_each_byte_about_once(
    folder: Path, server: ArtefactServer
) -> None:
    one = made("2", factor=5.0, padding_bytes=2_000_000)
    server.cut_after = [one.files[1].size_bytes // 10 + 1] * 9
    async with edge(folder) as app:
        ask(app, server, 1, one)
        found = await settled(app, 1)
        assert found.state is RolloutState.COMMITTED
        assert server.cut_after == []
        assert found.fetched_bytes <= 1.1 * one.plan().size_bytes
        assert server.sent_bytes <= 1.1 * one.plan().size_bytes


async def test_a_server_that_refuses_is_final_and_one_that_is_busy_is_not(folder: Path, server: ArtefactServer) -> None:
    one = made("2")
    server.status[one.files[1].sha256] = 404
    async with edge(folder) as app:
        ask(app, server, 1, one)
        assert (await settled(app, 1)).reason == "http_404: every server refused"
        server.status[one.files[1].sha256] = 503
        ask(app, server, 2, one, net=Net(max_attempts=2))
        assert (await settled(app, 2)).reason == "http_503: no progress in 2 attempts"
        server.status.clear()
        ask(app, server, 3, one)
        assert (await settled(app, 3)).state is RolloutState.COMMITTED


async def test_the_byte_budget_ends_a_download_that_a_server_without_ranges_makes_dear(
    folder: Path, server: ArtefactServer
) -> None:
    one = made("2", padding_bytes=1_000_000)
    server.ranges = False
    server.cut_after = [900_000] * 8
    async with edge(folder) as app:
        ask(app, server, 1, one, net=Net(max_bytes=2_500_000))
        found = await settled(app, 1)
        assert found.state is RolloutState.FAILED
        assert found.reason.startswith("byte_budget: ")
        assert server.sent_bytes < 4_000_000


async def test_a_failed_content_stays_failed_over_a_restart_and_is_tried_again_under_another_revision(
    folder: Path, server: ArtefactServer
) -> None:
    one = made("2", wrong=0.5)
    async with edge(folder) as app:
        ask(app, server, 1, one, probe=one.probe(atol=0.1))
        await settled(app, 1)
    async with edge(folder) as app:
        found = report(app)
        assert found is not None
        assert (found.state, found.running) == (RolloutState.ROLLED_BACK, "1")
        ask(app, server, 2, one, probe=one.probe(atol=10.0))
        assert (await settled(app, 2)).state is RolloutState.COMMITTED


async def test_static_models_that_are_all_wrong_keep_no_deployed_one_away(folder: Path, server: ArtefactServer) -> None:
    async with edge(folder, models=None) as app:
        ask(app, server, 1, made("2", factor=5.0))
        await settled(app, 1)
    for artefact in (folder / "models").rglob("int8.onnx"):
        artefact.write_bytes(artefact.read_bytes()[:-1])
    async with edge(folder, models=None) as app:
        assert await answer(app) == ("2", 15.0)
        assert [runner.manifest.name for runner in app.deployment.serving.runners] == ["double"]
    shutil.rmtree(folder / "state")
    with pytest.raises(StartError, match=r"(?s)no model of .* could be read"):
        async with edge(folder, models=None):
            pass


async def test_a_groups_document_is_gone_by_until_the_devices_own_says_otherwise(
    folder: Path, server: ArtefactServer
) -> None:
    common, own = made("2", factor=5.0), made("3", factor=7.0)
    server.add(common, own)
    async with edge(folder, groups=["kiosks"]) as app:
        for_all = AUTHOR.message(8, common.plan(), urls=[server.url], group="kiosks")
        app.deployment.take("group/kiosks", for_all)
        app.deployment.take("group/strangers", for_all)
        assert (await settled(app, 8)).scope == "group/kiosks"
        app.deployment.take(SCOPE, AUTHOR.message(1, own.plan(), urls=[server.url]))
        assert (await settled(app, 1)).scope == SCOPE
        assert await answer(app) == ("3", 21.0)
        assert app.deployment.rollouts is not None
        assert app.deployment.rollouts.accepted == ((SCOPE, 1), ("group/kiosks", 8))
