"""Models that a gateway takes requests for, changed while it runs: whole gateways, unmodified clients."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import tritonclient.grpc.aio as triton_grpc
import tritonclient.http.aio as triton_http
import yaml
from structlog.testing import capture_logs
from tritonclient.utils import InferenceServerException

from gateway.app import Gateway
from gateway.catalog import Catalog
from gateway.model_control import CatalogLoader
from tests.support.gateway.app import TWO_VARIANTS, Far, ask, configured, gateway_for, running, target, until
from tests.support.gateway.guarded import guarded
from tidegate.models.manifest import Manifest
from tidegate.models.repository import Repository, RepositoryError
from tidegate.runtime.process import StartError

pytestmark = pytest.mark.slow


def shown(gateway: Gateway) -> dict[str, str]:
    return {"authorization": f"Bearer {gateway.operator_token.value}"}


def put(root: Path, name: str, version: str = "1") -> None:
    folder = root / name / version
    folder.mkdir(parents=True)
    manifest = msgspec.structs.replace(TWO_VARIANTS, name=name, version=version)
    (folder / "model.yaml").write_text(yaml.safe_dump(msgspec.to_builtins(manifest)))


async def test_an_unload_refuses_new_requests_and_a_load_takes_it_back(tmp_path: Path) -> None:
    far = Far("pool/one")
    async with running(far):
        config = configured(tmp_path, target(far), model_control="explicit")
        async with gateway_for(config) as (gateway, session):
            http = triton_http.InferenceServerClient(gateway.addresses["http"].removeprefix("http://"))
            grpc = triton_grpc.InferenceServerClient(gateway.addresses["grpc"])
            async with http, grpc:
                assert (await ask(gateway, session))[0] == 200
                for client in (http, grpc):
                    with pytest.raises(InferenceServerException, match="needs the operator's token"):
                        await client.unload_model("echo")
                await grpc.unload_model("echo", headers=shown(gateway))
                status, body, headers = await ask(gateway, session)
                assert (status, body["code"]) == (503, "nothing_alive")
                assert "is unloaded at" in body["error"] and "ask another gateway" in body["error"]
                assert int(headers["retry-after"]) > 0
                assert not await http.is_model_ready("echo")
                (entry,) = await http.get_model_repository_index()
                assert (entry["state"], entry["reason"]) == ("UNAVAILABLE", "unloaded")
                await http.load_model("echo", headers=shown(gateway))
                assert (await ask(gateway, session))[0] == 200

                put(tmp_path / "models", "late")
                with pytest.raises(InferenceServerException, match="late"):
                    await http.get_model_metadata("late")
                await http.load_model("late", headers=shown(gateway))
                assert (await http.get_model_metadata("late"))["name"] == "late"
                with pytest.raises(InferenceServerException, match="no model 'nobody'"):
                    await grpc.load_model("nobody", headers=shown(gateway))


async def test_with_auth_the_right_admin_is_needed_and_changes_are_audited(tmp_path: Path) -> None:
    async with (
        guarded(tmp_path, model_control="explicit") as (gateway, _, keys, _far),
        triton_grpc.InferenceServerClient(gateway.addresses["grpc"]) as client,
    ):
        with capture_logs() as logs:
            with pytest.raises(InferenceServerException, match="has no right 'admin'"):
                await client.unload_model("echo", headers=keys.headers("good"))
            with pytest.raises(InferenceServerException, match="wants a credential"):
                await client.unload_model("echo")
            await client.unload_model("echo", headers=keys.headers("operator"))
        audited = [(one["what"], one["status"]) for one in logs if one.get("audit") == "admin"]
        assert audited == [("oip-grpc unload echo", 200)]


async def test_operators_change_it_over_the_admin_port(tmp_path: Path) -> None:
    config = configured(tmp_path, model_control="explicit")
    async with gateway_for(config) as (gateway, session):
        unload = gateway.addresses["admin"] + "/v2/repository/models/echo/unload"
        async with session.post(unload) as refused:
            assert refused.status == 401
        async with session.post(unload, headers=shown(gateway)) as done:
            assert (done.status, await done.json()) == (200, {"name": "echo", "state": "UNAVAILABLE"})
        async with session.get(gateway.addresses["admin"] + "/v2/repository/index") as index:
            assert [one["reason"] for one in await index.json()] == ["unloaded"]


async def test_without_model_control_the_admin_port_lists_models_and_names_the_key(tmp_path: Path) -> None:
    async with gateway_for(configured(tmp_path)) as (gateway, session):
        admin = gateway.addresses["admin"] + "/v2/repository"
        async with session.get(f"{admin}/index") as index:
            assert [one["name"] for one in await index.json()] == ["echo"]
        async with session.post(f"{admin}/models/echo/load", headers=shown(gateway)) as done:
            assert done.status == 200, "it is served already"
        async with session.post(f"{admin}/models/echo/unload", headers=shown(gateway)) as refused:
            assert refused.status >= 400 and "key 'model_control' is none" in (await refused.json())["error"]
        async with session.post(f"{admin}/models/nosuch/load", headers=shown(gateway)) as refused:
            assert refused.status == 404 and "nosuch" in (await refused.json())["error"]


async def test_a_followed_repository_brings_models_and_takes_them_away(tmp_path: Path) -> None:
    config = configured(tmp_path, model_control="poll", repository_poll_s=0.05)
    async with gateway_for(config) as (gateway, _):
        put(tmp_path / "models", "late")
        await until(lambda: "late" in [one.name for one in gateway.host.manifests()])


async def test_there_is_nothing_to_control_without_a_repository(tmp_path: Path) -> None:
    config = configured(tmp_path, model_control="explicit").model_copy(update={"model_repository": None})
    with pytest.raises(StartError, match="needs a model_repository"):
        Gateway(config)


async def test_a_load_that_fails_changes_nothing(tmp_path: Path) -> None:
    put(tmp_path, "m")
    catalog = Catalog(Repository(tmp_path).manifests())

    async def refuses(manifest: Manifest) -> None:
        raise StartError("its tokenizer has another vocabulary")

    loader = CatalogLoader(tmp_path, catalog, refuses)
    before = catalog.manifest("m", "1")
    put(tmp_path, "n")
    manifest = msgspec.structs.replace(before, version="2")
    (tmp_path / "m" / "2").mkdir()
    (tmp_path / "m" / "2" / "model.yaml").write_text(yaml.safe_dump(msgspec.to_builtins(manifest)))
    for name in ("m", "n"):
        with pytest.raises(StartError):
            await loader.load(name)
    assert catalog.manifest("m") is before and set(loader.served()) == {"m"}


def versions_of(catalog: Catalog, name: str) -> list[str]:
    return [one.version for one in catalog.manifests if one.name == name]


async def test_a_version_that_cannot_be_read_keeps_the_gateway_and_its_other_versions(tmp_path: Path) -> None:
    config = configured(tmp_path)
    root = tmp_path / "models"
    for version in ("1", "2", "3"):
        put(root, "m", version)
    for version in ("1", "3"):
        (root / "m" / version / "model.yaml").write_text("name: [")
    with capture_logs() as logs:
        gateway = Gateway(config)
    assert versions_of(gateway.catalog, "m") == ["2"]
    said = [one for one in logs if one["event"] == "a version cannot be read, and others stand in"]
    assert [(one["model"], one["version"]) for one in said] == [("m", "1"), ("m", "3")]
    (root / "m" / "2" / "model.yaml").unlink()
    with pytest.raises(RepositoryError, match="is not valid YAML"):
        Gateway(config)


async def test_a_load_leaves_the_versions_that_were_read_before_they_were_damaged(tmp_path: Path) -> None:
    async def takes(manifest: Manifest) -> None:
        pass

    put(tmp_path, "m")
    catalog = Catalog(Repository(tmp_path).manifests())
    (tmp_path / "m" / "1" / "model.yaml").write_text("name: [")
    put(tmp_path, "m", "2")
    put(tmp_path, "m", "3")
    (tmp_path / "m" / "3" / "model.yaml").write_text("name: [")
    await CatalogLoader(tmp_path, catalog, takes).load("m")
    assert versions_of(catalog, "m") == ["1", "2"]
