"""Models that come and go in a whole pool: real sockets, real worker processes, an unmodified client."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import tritonclient.grpc.aio as triton
from click.testing import CliRunner
from structlog.testing import capture_logs
from tritonclient.utils import InferenceServerException

from cloud_pool.app import PoolApp
from cloud_pool.config import PoolConfig
from gateway.config.targets import TargetConfig
from tests.cloud_pool.models import TEXT
from tests.cloud_pool.workers_support import make_larger, make_unloadable, put, text
from tests.support.gateway.app import config_over, gateway_for, until
from tidegate import clock
from tidegate.config import load
from tidegate.models.repository import RepositoryError, load_manifest, save_manifest
from tidegate.runtime.process import StartError
from tidegate.servers.operator_token import token_for
from tidegate.serving import absent_models
from tidegate.tools.build.cli import model
from tidegate.workers.process import EngineSpec, LoadResult, WorkerProcess

pytestmark = pytest.mark.slow


@pytest.fixture
def root(tmp_path: Path) -> Path:
    put(tmp_path / "models", "one")
    put(tmp_path / "models", "two")
    return tmp_path / "models"


@asynccontextmanager
async def pool(root: Path, tmp_path: Path, **keys: Any) -> AsyncIterator[PoolApp]:
    defaults = {
        "grpc_port": 0,
        "model_repository": root,
        "warmup_budget_s": 0.2,
        "model_control": "explicit",
        "operator_token_file": tmp_path / "token",
    }
    async with PoolApp(load(PoolConfig, **(defaults | keys)), draw=lambda: 0.1) as app:
        yield app


def shown(tmp_path: Path, name: str = "token") -> dict[str, str]:
    return {"authorization": f"Bearer {(tmp_path / name).read_text().strip()}"}


def tensors(length: int, fill: int = 1) -> list[triton.InferInput]:
    arrays = text(length, fill=fill)
    return [triton.InferInput(name, one.shape, "INT64").set_data_from_numpy(one) for name, one in arrays.items()]


async def index(client: triton.InferenceServerClient) -> dict[str, tuple[str, str]]:
    entries = await client.get_model_repository_index()
    return {f"{one.name}:{one.version}": (one.state, one.reason) for one in entries.models}


def workers() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if "tidegate.workers.child" in one.cmdline()]


async def test_an_unmodified_client_loads_unloads_and_lists_models(root: Path, tmp_path: Path) -> None:
    async with (
        pool(root, tmp_path, models=("one",)) as app,
        triton.InferenceServerClient(app.address) as client,
    ):
        assert await index(client) == {"one:1": ("READY", ""), "two:1": ("UNAVAILABLE", "unloaded")}
        with pytest.raises(InferenceServerException, match="no model 'two'"):
            await client.infer("two", tensors(5))
        await client.load_model("two", headers=shown(tmp_path))
        assert (await client.infer("two", tensors(5, fill=3))).as_numpy("sum").tolist() == [[15.0]]
        assert len(workers()) == 2
        assert [offer.name for offer in app.host.offers()] == ["one", "two"]

        await client.unload_model("one", headers=shown(tmp_path))
        assert len(workers()) == 1
        with pytest.raises(InferenceServerException, match="unloaded from pool/pool: another may serve it") as refused:
            await client.infer("one", tensors(5))
        assert refused.value.status() == "StatusCode.NOT_FOUND"
        assert await index(client) == {"one:1": ("UNAVAILABLE", "unloaded"), "two:1": ("READY", "")}
        assert not await client.is_model_ready("one")
        await client.load_model("one", headers=shown(tmp_path))
        assert (await client.infer("one", tensors(4))).as_numpy("sum").tolist() == [[4.0]]


async def test_only_who_shows_the_operators_token_changes_anything(root: Path, tmp_path: Path) -> None:
    async with pool(root, tmp_path, models=("one",)) as app, triton.InferenceServerClient(app.address) as client:
        for headers in (None, {"authorization": "Bearer tgop_" + "A" * 43}, {"authorization": "Basic x"}):
            for change in (client.load_model, client.unload_model):
                with pytest.raises(InferenceServerException, match="needs the operator's token") as refused:
                    await change("two", headers=headers)
                assert refused.value.status() == "StatusCode.UNAUTHENTICATED"
        assert [offer.name for offer in app.host.offers()] == ["one"]
        assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "token").exists()


async def test_what_cannot_be_loaded_is_refused_in_words_and_the_rest_serves_on(root: Path, tmp_path: Path) -> None:
    broken = put(root, "broken")
    (broken / TEXT.variants[0].artefact).write_bytes(b"cut off")
    unread = put(root, "unread")
    (unread / "model.yaml").write_text("name: [")
    async with pool(root, tmp_path, models=("one",)) as app, triton.InferenceServerClient(app.address) as client:
        token = shown(tmp_path)
        with pytest.raises(InferenceServerException, match="has 7 bytes, but variant 'fp32' names"):
            await client.load_model("broken", headers=token)
        with pytest.raises(InferenceServerException, match="is not valid YAML"):
            await client.load_model("unread", headers=token)
        with pytest.raises(InferenceServerException, match="no model 'nobody' that it could serve"):
            await client.load_model("nobody", headers=token)
        with pytest.raises(InferenceServerException, match="no model 'nobody' on pool/pool to unload"):
            await client.unload_model("nobody", headers=token)
        await client.unload_model("two", headers=token)  # which is what it is
        with pytest.raises(InferenceServerException, match="not supported"):
            await client.load_model("two", headers=token, config="{}")
        states = await index(client)
        assert states["one:1"] == ("READY", "")
        assert "has 7 bytes" in states["broken:1"][1] and "is not valid YAML" in states["unread:"][1]
        assert (await client.infer("one", tensors(4))).as_numpy("sum").tolist() == [[4.0]]


async def test_a_model_comes_and_goes_under_load_without_a_lost_request(root: Path, tmp_path: Path) -> None:
    async with pool(root, tmp_path) as app, triton.InferenceServerClient(app.address) as client:
        stop = asyncio.Event()
        lost: list[str] = []
        answered = {"one": 0, "two": 0, "gone": 0}

        async def call(name: str) -> None:
            while not stop.is_set():
                try:
                    await client.infer(name, tensors(8))
                    answered[name] += 1
                except InferenceServerException as error:
                    if name == "two" and error.status() == "StatusCode.NOT_FOUND":
                        answered["gone"] += 1
                        await clock.sleep(0.01)
                    else:
                        lost.append(f"{name}: {error}")

        callers = [asyncio.create_task(call(name)) for name in ("one", "two", "one", "two")]
        for _ in range(2):
            await client.unload_model("two", headers=shown(tmp_path))
            await client.load_model("two", headers=shown(tmp_path))
            before = answered["two"]
            async with asyncio.timeout(60.0):
                while answered["two"] == before:
                    await clock.sleep(0.01)
        stop.set()
        await asyncio.gather(*callers)
        assert lost == []
        assert min(answered.values()) > 0
        assert app.host.load_report().in_flight == 0


async def test_a_new_version_takes_over_when_it_is_warm_and_one_of_the_same_files_is_left_alone(
    root: Path, tmp_path: Path
) -> None:
    async with pool(root, tmp_path, models=("one",)) as app, triton.InferenceServerClient(app.address) as client:
        before = {one.pid for one in workers()}
        await client.load_model("one", headers=shown(tmp_path))
        assert {one.pid for one in workers()} == before
        put(root, "one", "2")
        await client.load_model("one", headers=shown(tmp_path))
        assert [offer.version for offer in app.host.offers()] == ["2"]
        assert len(workers()) == 1
        path = root / "one" / "2" / "model.yaml"
        path.write_text(path.read_text() + "default_budget_s: 3.0\n")
        await client.load_model("one", headers=shown(tmp_path))
        assert app.host.manifest("one").default_budget_s == 3.0
        assert (await client.infer("one", tensors(4))).as_numpy("sum").tolist() == [[4.0]]


async def test_a_followed_folder_decides_what_is_served(root: Path, tmp_path: Path) -> None:
    async def until(holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60.0):
            while not holds():
                await clock.sleep(0.02)

    async def eventually(*names: str) -> None:
        await until(lambda: [offer.name for offer in app.host.offers()] == list(names))

    keys = {"model_control": "poll", "repository_poll_s": 0.05}
    async with pool(root, tmp_path, **keys) as app, triton.InferenceServerClient(app.address) as client:
        await eventually("one", "two")
        put(root, "three")
        await eventually("one", "two", "three")
        shutil.rmtree(root / "one")
        await eventually("two", "three")
        with pytest.raises(InferenceServerException, match="the folder decides"):
            await client.unload_model("two", headers=shown(tmp_path))
        with capture_logs() as logs:
            os.rename(root, tmp_path / "not mounted")
            await until(lambda: any("everything stays as it is" in entry["event"] for entry in logs))
        await eventually("two", "three")
        os.rename(tmp_path / "not mounted", root)
        (root / "two" / "1" / "model.yaml").write_text("name: [")
        put(root, "four")
        await until(lambda: "four" in [offer.name for offer in app.host.offers()])  # it has looked by then
        assert (await client.infer("two", tensors(4))).as_numpy("sum").tolist() == [[4.0]]


async def test_a_start_is_refused_with_what_cannot_be(root: Path, tmp_path: Path) -> None:
    for keys, words in (
        ({"models": ("one:1",)}, "names a version"),
        ({"standby_workers": 1}, "no reserve"),
        ({"models": ("nobody",)}, "there is no model 'nobody'"),
    ):
        with pytest.raises(StartError, match=words):
            async with pool(root, tmp_path, **keys):
                raise AssertionError("it started")


@pytest.mark.parametrize(("mode", "version"), [("explicit", ""), ("none", "1")])
async def test_a_pool_starts_without_its_wrong_models_and_says_why(
    root: Path, tmp_path: Path, mode: str, version: str
) -> None:
    (put(root, "broken") / TEXT.variants[0].artefact).write_bytes(b"cut off")
    (root / "two" / "1" / "model.yaml").write_text("name: [")
    with capture_logs() as logs:
        async with (
            pool(root, tmp_path, model_control=mode) as app,
            triton.InferenceServerClient(app.address) as client,
        ):
            states = await index(client)
            await client.infer("one", tensors(3))
            with pytest.raises(InferenceServerException, match="'broken' is not served by pool/pool for now: it could"):
                await client.infer("broken", tensors(3))
    assert states["one:1"] == ("READY", "")
    assert "has 7 bytes" in states["broken:1"][1] and "is not valid YAML" in states[f"two:{version}"][1]
    missed = {one["model"]: one["reason"] for one in logs if one["event"] == "a model is not served"}
    assert missed == {"broken": states["broken:1"][1], "two": states[f"two:{version}"][1]}
    shutil.rmtree(root / "one")
    words = r"no model of .* could be loaded:\nbroken: [^\n]*has 7 bytes.*\ntwo: "
    with pytest.raises(StartError, match=words):
        async with pool(root, tmp_path, model_control=mode):
            raise AssertionError("it started")


async def test_a_pool_with_fixed_models_starts_without_one_that_no_worker_loads(root: Path, tmp_path: Path) -> None:
    keys = {"model_control": "none", "workers": 2}
    make_unloadable(root / "two" / "1")
    async with pool(root, tmp_path, **keys) as app, triton.InferenceServerClient(app.address) as client:
        state, reason = (await index(client))["two:1"]
        assert state == "UNAVAILABLE" and "is not an ONNX model" in reason
        await client.infer("one", tensors(3))
        with pytest.raises(InferenceServerException, match="'two' is not served by pool/pool for now"):
            await client.infer("two", tensors(3))
        assert [one.name for one in app.host.offers()] == ["one"]
    for models, words in (
        (("one", "two"), "the pool cannot start: .*is not an ONNX model"),
        (None, "could be loaded:\none: .*\ntwo: "),
    ):
        if models is None:
            make_unloadable(root / "one" / "1")
        with pytest.raises(StartError, match=words):
            async with pool(root, tmp_path, models=models, **keys):
                raise AssertionError("it started")


async def test_a_pool_with_fixed_models_starts_without_one_that_ends_its_worker_or_has_no_memory(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_engine = WorkerProcess.load

    async def load(self: WorkerProcess, spec: EngineSpec) -> LoadResult:
        if spec.key.startswith("two:"):
            os.kill(self.pid or 0, signal.SIGKILL)
        return await load_engine(self, spec)

    monkeypatch.setattr(WorkerProcess, "load", load)
    make_larger(put(root, "huge"), 250 << 20)
    keys = {"model_control": "none", "device": "cpu", "memory_limit_bytes": 300 << 20}
    async with pool(root, tmp_path, **keys) as app, triton.InferenceServerClient(app.address) as client:
        states = await index(client)
        assert states["one:1"] == ("READY", "")
        assert states["two:1"][0] == states["huge:1"][0] == "UNAVAILABLE"
        assert "killed by SIGKILL" in states["two:1"][1] and "needs 330 MiB" in states["huge:1"][1]
        await client.infer("one", tensors(3))
        for name in ("two", "huge"):
            with pytest.raises(InferenceServerException, match=f"'{name}' is not served by pool/pool for now"):
                await client.infer(name, tensors(3))
    words = "needs 3.. MiB of memory on cpu"
    with pytest.raises(StartError, match=words):
        async with pool(root, tmp_path, models=("one", "huge"), **keys):
            raise AssertionError("it started")
    for name in ("one", "two"):
        shutil.rmtree(root / name)
    with pytest.raises(StartError, match=rf"no model of .* could be loaded:\nhuge: .*{words}"):
        async with pool(root, tmp_path, **keys):
            raise AssertionError("it started")


async def test_a_fixed_model_that_was_missing_comes_later_beside_the_others(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absent_models, "LOOK_S", 0.02)
    monkeypatch.setattr(absent_models, "FIRST_AGAIN_S", 0.05)
    load_engine, deadly = WorkerProcess.load, ["two"]

    async def load(self: WorkerProcess, spec: EngineSpec) -> LoadResult:
        if spec.key.partition(":")[0] in deadly:
            os.kill(self.pid or 0, signal.SIGKILL)
        return await load_engine(self, spec)

    monkeypatch.setattr(WorkerProcess, "load", load)
    right = (put(root, "three") / TEXT.variants[0].artefact).read_bytes()
    (root / "three" / "1" / TEXT.variants[0].artefact).write_bytes(b"cut off")
    keys = {"model_control": "none", "workers": 2, "metrics_port": 0}
    with capture_logs() as logs:
        async with pool(root, tmp_path, **keys) as app, triton.InferenceServerClient(app.address) as client:
            shared = {one.pid for one in workers()}
            assert len(shared) == 2 and [one.name for one in app.host.offers()] == ["one"]

            async def comes(name: str, length: int) -> None:
                async with asyncio.timeout(60.0):
                    while name not in [one.name for one in app.host.offers()]:
                        await client.infer("one", tensors(3))
                        await clock.sleep(0.01)
                assert (await client.infer(name, tensors(length))).as_numpy("sum").tolist() == [[float(length)]]

            await until(lambda: len([one for one in logs if one.get("model") == "two"]) >= 3)
            assert "killed by SIGKILL" in (await index(client))["two:1"][1]
            deadly.clear()
            await comes("two", 4)
            (root / "three" / "1" / TEXT.variants[0].artefact).write_bytes(right)
            await comes("three", 5)
            assert await index(client) == {f"{name}:1": ("READY", "") for name in ("one", "two", "three")}
            assert {one.pid for one in workers()} > shared and len(workers()) == 6
            answers = await asyncio.gather(*[client.infer(name, tensors(6)) for name in ("one", "two", "three") * 9])
            assert {one.as_numpy("sum").item() for one in answers} == {6.0}
            for one in workers():
                one.kill()
            await until(lambda: [one["event"] for one in logs].count("worker back") == 6)
            for name in ("one", "two", "three"):
                assert (await client.infer(name, tensors(7))).as_numpy("sum").tolist() == [[7.0]]
    assert workers() == []


async def test_a_fixed_model_that_is_damaged_meanwhile_does_not_keep_the_others_away(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absent_models, "LOOK_S", 0.02)
    artefact = root / "two" / "1" / TEXT.variants[0].artefact
    right = artefact.read_bytes()
    async with pool(root, tmp_path, model_control="none") as app, triton.InferenceServerClient(app.address) as client:
        artefact.write_bytes(b"cut off")
        await client.infer("two", tensors(3))  # from memory
        (worker,) = workers()
        worker.kill()
        await until(lambda: [one.name for one in app.host.offers()] == ["one"] and app.host.ready())
        assert (await client.infer("one", tensors(3))).as_numpy("sum").tolist() == [[3.0]]
        assert "two:1" in (states := await index(client)) and "but the manifest names" in states["two:1"][1]
        with pytest.raises(InferenceServerException, match="'two' is not served by pool/pool for now"):
            await client.infer("two", tensors(3))
        artefact.write_bytes(right)
        await until(lambda: len(app.host.offers()) == 2)
        assert (await client.infer("two", tensors(4))).as_numpy("sum").tolist() == [[4.0]]


async def test_a_pool_with_fixed_models_does_not_start_without_one_that_is_named(root: Path, tmp_path: Path) -> None:
    (root / "two" / "1" / "model.yaml").write_text("name: [")
    with pytest.raises(RepositoryError, match="is not valid YAML"):
        async with pool(root, tmp_path, model_control="none", models=("one", "two")):
            raise AssertionError("it started")


async def test_the_token_is_found_by_the_port(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    async with pool(root, tmp_path, operator_token_file=None, models=()) as app:
        assert token_for(f"http://{app.address}") is not None
        assert app.host.offers() == ()


async def test_behind_a_gateway_a_model_moves_from_pool_to_pool_without_a_lost_request(
    root: Path, tmp_path: Path
) -> None:
    keys = {"models": ("one",)}
    async with (
        pool(root, tmp_path, name="a", operator_token_file=tmp_path / "token", **keys) as first,
        pool(root, tmp_path, name="b", operator_token_file=tmp_path / "other", **keys) as second,
    ):
        targets = [TargetConfig(name=app.config.name, tier="pool", address=app.address) for app in (first, second)]
        async with gateway_for(config_over(root, *targets)) as (gateway, _):
            client = triton.InferenceServerClient(gateway.addresses["grpc"])
            stop = asyncio.Event()
            served: list[str] = []

            async def call() -> None:
                while not stop.is_set():
                    answer = await client.infer("one", tensors(8), client_timeout=30.0)
                    served.append(answer.get_response().parameters["tidegate-served-by"].string_param)

            async with (
                client,
                triton.InferenceServerClient(first.address) as operator,
                triton.InferenceServerClient(second.address) as other,
            ):
                callers = [asyncio.create_task(call()) for _ in range(3)]
                await until(lambda: len(served) >= 20)
                await operator.unload_model("one", headers=shown(tmp_path))
                served.clear()
                await until(lambda: len(served) >= 20)
                assert set(served[3:]) == {"pool/b"}  # those under way at that instant may still come from a
                # Of two pools that are as good the cheaper one serves all; so back it moves by the other's unloading.
                await operator.load_model("one", headers=shown(tmp_path))
                await other.unload_model("one", headers=shown(tmp_path, "other"))
                await until(lambda: served[-20:] == ["pool/a"] * 20)
                stop.set()
                await asyncio.gather(*callers)  # raises what a caller was refused


async def test_the_commands_do_the_same(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(*words: str) -> tuple[int, str]:
        result = await asyncio.to_thread(CliRunner().invoke, model, [*words, "--at", app.address])
        return result.exit_code, result.output

    monkeypatch.setenv("TIDEGATE_ADMIN_TOKEN_FILE", str(tmp_path / "token"))
    with capture_logs():  # lines of the pool's log would be taken for the commands' words
        async with pool(root, tmp_path, models=("one",)) as app:
            assert await run("load", "two") == (0, "two is loaded\n")
            assert await run("unload", "one") == (0, "one is unloaded\n")
            code, table = await run("index")
            assert code == 0
            assert [line.split() for line in table.splitlines()] == [
                ["MODEL", "VERSION", "STATE", "REASON"],
                ["two", "1", "READY"],
                ["one", "1", "UNAVAILABLE", "unloaded"],
            ]
            assert await run("load", "two") == (0, "two is loaded\n")
            assert await run("unload", "one") == (0, "one is unloaded\n")
            assert await run("unload", "nine") == (1, "Error: there is no model 'nine' on pool/pool to unload\n")
            monkeypatch.setenv("TIDEGATE_ADMIN_TOKEN_FILE", str(tmp_path / "nothing"))
            code, words = await run("load", "one")
            assert code == 1 and "the operator's token cannot be read" in words


@pytest.mark.parametrize("mode", ["none", "explicit"])
async def test_a_model_whose_newest_manifest_is_damaged_is_served_in_the_version_before(
    root: Path, tmp_path: Path, mode: str
) -> None:
    (put(root, "two", "2") / "model.yaml").write_text("name: [")
    with capture_logs() as logs:
        async with (
            pool(root, tmp_path, model_control=mode, models=("two",)) as app,
            triton.InferenceServerClient(app.address) as client,
        ):
            states = await index(client)
            await client.infer("two", tensors(3))
    assert states["two:1"] == ("READY", "")
    assert states["two:2"][0] == "UNAVAILABLE" and "is not valid YAML" in states["two:2"][1]
    said = [one for one in logs if one["event"] == "a version cannot be read, and others stand in"]
    assert [(one["model"], one["version"]) for one in said] == [("two", "2")]


@pytest.mark.parametrize("mode", ["none", "explicit", "poll"])
async def test_a_model_whose_newest_version_is_only_for_edges_is_served_in_the_version_before(
    root: Path, tmp_path: Path, mode: str
) -> None:
    newest = put(root, "two", "2")
    manifest = load_manifest(newest)
    variants = tuple(msgspec.structs.replace(one, where=("edge",)) for one in manifest.variants)
    save_manifest(newest, msgspec.structs.replace(manifest, variants=variants))
    with capture_logs() as logs:
        async with pool(root, tmp_path, model_control=mode, models=("two",)) as app:
            assert [one.version for one in app.host.offers()] == ["1"]
    (said,) = [one for one in logs if one["event"] == "a version is passed over, and a lower one serves"]
    assert (said["model"], said["version"]) == ("two", "2") and "no variant for pools" in said["reason"]


@pytest.mark.parametrize("models", [None, ("two",)])
@pytest.mark.parametrize("mode", ["none", "explicit", "poll"])
async def test_a_model_whose_newest_file_is_cut_starts_in_the_version_before_and_takes_the_newest_once_it_is_mended(
    root: Path, tmp_path: Path, mode: str, models: tuple[str, ...] | None
) -> None:
    artefact = put(root, "two", "2") / TEXT.variants[0].artefact
    right = artefact.read_bytes()
    artefact.write_bytes(b"cut off")
    with capture_logs() as logs:
        async with (
            pool(root, tmp_path, model_control=mode, models=models, repository_poll_s=0.05) as app,
            triton.InferenceServerClient(app.address) as client,
        ):
            states = await index(client)
            await client.infer("two", tensors(3))
            if mode == "explicit":
                with pytest.raises(InferenceServerException, match="has 7 bytes"):
                    await client.load_model("two", headers=shown(tmp_path))
                assert await index(client) == states
            artefact.write_bytes(right)
            if mode == "explicit":
                await client.load_model("two", headers=shown(tmp_path))
            if mode != "none":
                await until(lambda: ("two", "2") in [(one.name, one.version) for one in app.host.offers()])
                assert "two:1" not in await index(client)
    assert states["two:1"] == ("READY", "")
    assert states["two:2"][0] == "UNAVAILABLE" and "has 7 bytes" in states["two:2"][1]
    said = [one for one in logs if one["event"] == "a version cannot be read, and others stand in"]
    assert [(one["model"], one["version"]) for one in said] == [("two", "2")]
