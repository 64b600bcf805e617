"""A device of which some models are damaged: real files, real workers; the others answer, and the rest comes later."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from edge_agent.app import EdgeApp
from edge_agent.commands.doctor import run_checks
from edge_agent.config import EdgeConfig
from tests.support.models.tiny_models import tiny_repository
from tidegate import clock
from tidegate.arrays import array_to_tensor
from tidegate.config import load
from tidegate.models.digest import sha256_of
from tidegate.models.repository import load_manifest, save_manifest
from tidegate.outcome import ModelNotFound
from tidegate.runtime.process import StartError
from tidegate.serving import absent_models, repository_control
from tidegate.types import Call, Datatype, InferRequest


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(absent_models, "LOOK_S", 0.02)
    return tiny_repository(tmp_path / "models")


def config(root: Path, **keys: Any) -> EdgeConfig:
    where = {"grpc_port": 0, "http_port": 0, "model_repository": root, "state_dir": root.parent / "state"}
    return load(EdgeConfig, name="kiosk-1", **(where | {"warmup_budget_s": 0.2, "sensors": None} | keys))


def edge(root: Path, **keys: Any) -> EdgeApp:
    return EdgeApp(config(root, **keys), draw=lambda: 0.1)


async def ask(app: EdgeApp, model: str) -> str:
    """The version that answered."""
    inputs = {
        "double": array_to_tensor("x", np.ones((1, 2), np.float32), Datatype.FP32),
        "rounds": array_to_tensor("rounds", np.array([1]), Datatype.INT64),
    }
    request = InferRequest(model, (inputs[model],))
    call = Call(request, "test", arrived_at=clock.now(), deadline=clock.now() + 30.0)
    return (await app.host.infer(call)).response.model_version


def cut(root: Path) -> bytes:
    """Damage the file of `double`; its bytes before."""
    artefact = root / "double" / "1" / "int8.onnx"
    before = artefact.read_bytes()
    artefact.write_bytes(before[:-1])
    return before


def make_unloadable(root: Path) -> bytes:
    """Give `double` a file that no engine loads, under its right digest; the bytes of its manifest before."""
    folder = root / "double" / "1"
    before = (folder / "model.yaml").read_bytes()
    manifest = load_manifest(folder)
    artefact = folder / "int8.onnx"
    artefact.write_bytes(b"this is no model")
    (variant,) = manifest.variants
    wrong = msgspec.structs.replace(variant, sha256=sha256_of(artefact), size_bytes=artefact.stat().st_size)
    save_manifest(folder, msgspec.structs.replace(manifest, variants=(wrong,)))
    return before


async def served(app: EdgeApp, model: str) -> None:
    async with asyncio.timeout(60.0):
        while app.host.routed(model) is None:
            await clock.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("models", [None, ("double", "rounds"), ("rounds", "double:1")])
async def test_a_damaged_model_keeps_no_other_away_and_comes_when_its_file_is_mended(
    root: Path, models: tuple[str, ...] | None
) -> None:
    right = cut(root)
    async with edge(root, models=models) as app:
        assert await ask(app, "rounds") == "1"
        with pytest.raises(ModelNotFound, match="'double' is not served by edge/kiosk-1 for now: it could not be"):
            await ask(app, "double")
        assert app.host.ready()
        assert not app.host.model_ready("double")
        (told,) = app.state().conditions.absent
        assert told.startswith("double: ") and "double: " in app.state().conditions.in_words()
        (root / "double" / "1" / "int8.onnx").write_bytes(right)
        await served(app, "double")
        assert await ask(app, "double") == "1"
        assert app.state().conditions.absent == ()
        assert [offer.name for offer in app.host.offers()] == ["rounds", "double"]


@pytest.mark.slow
async def test_a_model_that_no_worker_loads_keeps_no_other_away_and_is_tried_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absent_models, "FIRST_AGAIN_S", 0.05)
    right = (root / "double" / "1" / "int8.onnx").read_bytes()
    manifest = make_unloadable(root)
    with capture_logs() as logs:
        async with edge(root, models=("double", "rounds")) as app:
            assert await ask(app, "rounds") == "1"
            with pytest.raises(ModelNotFound, match="not served by edge/kiosk-1 for now"):
                await ask(app, "double")
            async with asyncio.timeout(60.0):
                while len([one for one in logs if one["event"] == "a model is not served"]) < 2:
                    await clock.sleep(0.02)
            (root / "double" / "1" / "int8.onnx").write_bytes(right)
            (root / "double" / "1" / "model.yaml").write_bytes(manifest)
            await served(app, "double")
            assert await ask(app, "double") == "1"


@pytest.mark.slow
async def test_where_models_are_loaded_by_request_a_damaged_one_is_its_repository_controls(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repository_control, "FIRST_AGAIN_S", 0.05)
    right = cut(root)
    keys = {"model_control": "explicit", "operator_token_file": root.parent / "token"}
    async with edge(root, models=("double", "rounds"), **keys) as app:
        assert [one.partition(":")[0] for one in app.state().conditions.absent] == ["double"]
        (root / "double" / "1" / "int8.onnx").write_bytes(right)
        await served(app, "double")
        assert app.state().conditions.absent == ()


@pytest.mark.slow
async def test_where_all_are_damaged_the_start_ends_with_each_reason(root: Path) -> None:
    cut(root)
    with pytest.raises(StartError, match=r"(?s)no model of .*double: .*int8\.onnx: has .*triple: key 'models'"):
        async with edge(root, models=("double", "triple")):
            raise AssertionError("it started")
    make_unloadable(root)
    with pytest.raises(StartError, match=r"(?s)no model of .*double: "):
        async with edge(root, models=("double",)):
            raise AssertionError("it started")


@pytest.mark.slow
async def test_the_doctor_names_what_is_wrong_on_the_disk_and_what_the_agent_does_without(root: Path) -> None:
    cut(root)
    async with edge(root, models=("double", "rounds")) as app:
        port = int(app.addresses["http"].rpartition(":")[2])
        found = await run_checks(config(root, models=("double", "rounds"), http_port=port))
    on_disk = {one.verdict: one.words for one in found if one.check == "models"}
    assert set(on_disk) == {"ok", "failure"} and "rounds" in on_disk["ok"] and "int8.onnx" in on_disk["failure"]
    (without,) = [one for one in found if one.check == "worker" and one.verdict == "failure"]
    assert without.words.startswith("double is not served: ")


@pytest.mark.slow
async def test_a_version_whose_manifest_is_damaged_leaves_its_model_in_the_lower_one(tmp_path: Path) -> None:
    root = tiny_repository(tmp_path / "models", ("1", "2"))
    (root / "double" / "2" / "model.yaml").write_text("name: [")
    with capture_logs() as logs:
        async with edge(root) as app:
            assert await ask(app, "double") == "1"
            assert app.absent == {}
            found = await run_checks(config(root, http_port=int(app.addresses["http"].rpartition(":")[2])))
    (said,) = [one["reason"] for one in logs if one["event"] == "another generation of a model stands in for it"]
    assert "double/2/model.yaml: is not valid YAML" in said
    (warned,) = [one.words for one in found if one.check == "models" and one.verdict == "warning"]
    assert said in warned and warned.endswith("it is served in version 1")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "explicit"])
async def test_a_device_starts_in_a_lower_version_where_the_highest_is_cut_or_only_for_pools(
    tmp_path: Path, mode: str
) -> None:
    root = tiny_repository(tmp_path / "models", ("1", "2", "3"))
    (root / "double" / "2" / "int8.onnx").write_bytes(b"cut off")
    manifest = load_manifest(root / "double" / "3")
    variants = tuple(msgspec.structs.replace(one, where=("pool",)) for one in manifest.variants)
    save_manifest(root / "double" / "3", msgspec.structs.replace(manifest, variants=variants))
    keys = {"model_control": mode, "operator_token_file": tmp_path / "token"} if mode != "none" else {}
    with capture_logs() as logs:
        async with edge(root, **keys) as app:
            assert await ask(app, "double") == "1"
            assert app.absent == {}
    (cut_off,) = [one["reason"] for one in logs if one["event"] == "another generation of a model stands in for it"]
    assert "double/2/int8.onnx: has 7 bytes" in cut_off
    told = [one for one in logs if one["event"] == "a version is passed over, and a lower one serves"]
    assert {(one["model"], one["version"]) for one in told} == {("double", "3")}
