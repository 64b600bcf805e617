"""A gateway whose targets are the pods of a Service: lists, watches, and what an API server does to them (kmock)."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import kmock
import pytest
import yaml

from gateway.app import Gateway
from gateway.config.discovery import SourceConfig
from tests.support.discovery.cluster_api import SLICES, ClusterApi, endpoint, slice_of
from tests.support.gateway.app import Far, ask, configured, gateway_for, running, until
from tidegate import clock
from tidegate.config import ConfigError
from tidegate.runtime.process import StartError
from tidegate.servers.cluster_access import api_address

pytestmark = pytest.mark.slow
NAME = "kubernetes:prod/pools"


@pytest.fixture
async def api() -> AsyncIterator[ClusterApi]:
    async with ClusterApi() as api:
        yield api


def source(url: str, **more: object) -> SourceConfig:
    return SourceConfig(source="kubernetes", service="pools", namespace="prod", server=url, **more)  # type: ignore[arg-type]


def port_of(far: Far) -> int:
    return int(far.address.rpartition(":")[2])


def list_pod(api: ClusterApi, far: Far, *, in_slice: str = "", **conditions: bool) -> None:
    pod = far.name.split("/")[1]
    api.put(slice_of(in_slice or pod, port_of(far), endpoint(pod, "127.0.0.1", **conditions)))


async def evidence(gateway: Gateway, session: aiohttp.ClientSession) -> str:
    async with session.get(gateway.addresses["admin"] + "/v1/state") as response:
        return " ".join(one["evidence"] for one in (await response.json())["ailing"])


async def test_pods_come_drain_and_go(tmp_path: Path, api: ClusterApi) -> None:
    one, two = Far("pool/pool-0"), Far("pool/pool-1")
    async with running(one, two):
        list_pod(api, one)
        config = configured(tmp_path, discovery=(source(api.url, zones={"shop": "site"}),))
        async with gateway_for(config) as (gateway, session):
            assert (await ask(gateway, session))[2]["tidegate-served-by"] == "pool/pool-0"
            list_pod(api, two, ready=False)
            api.put(slice_of("pool-1", port_of(two), endpoint("pool-1", "127.0.0.1", zone="shop")))
            await until(lambda: len(gateway.fleet.offered("echo", "3")) == 2, within_s=2.0)
            assert gateway.fleet.targets["pool/pool-1"].spec.zone == "site"
            list_pod(api, one, ready=False, terminating=True)
            await until(lambda: gateway.fleet.targets["pool/pool-0"].leaving != "", within_s=1.0)
            for _ in range(5):
                assert (await ask(gateway, session))[2]["tidegate-served-by"] == "pool/pool-1"
            api.remove("pool-0")
            await until(lambda: "does not list" in gateway.fleet.targets["pool/pool-0"].leaving)
            assert (api.asked["list"], gateway.found.sources[NAME].why) == (1, "")


async def test_a_pod_that_moves_keeps_its_id(tmp_path: Path, api: ClusterApi) -> None:
    before, after = Far("pool/pool-0"), Far("pool/pool-0")
    async with running(before, after):
        list_pod(api, before)
        async with gateway_for(configured(tmp_path, discovery=(source(api.url),))) as (gateway, session):
            view = gateway.fleet.targets["pool/pool-0"]
            list_pod(api, after)
            await until(lambda: view.spec.address == after.address and view.up)
            assert gateway.fleet.targets["pool/pool-0"] is view
            assert (await ask(gateway, session))[0] == 200


async def test_a_cut_watch_is_resumed_from_where_it_was_and_nothing_is_listed_again(
    tmp_path: Path, api: ClusterApi
) -> None:
    one, two = Far("pool/pool-0"), Far("pool/pool-1")
    async with running(one, two):
        list_pod(api, one)
        async with gateway_for(configured(tmp_path, discovery=(source(api.url),))) as (gateway, _):
            await until(lambda: api.asked["watch"] == 1)
            api.bookmark()
            await clock.sleep(0.2)
            api.cut_watches()
            list_pod(api, two)  # while there is no watch
            await until(lambda: "pool/pool-1" in gateway.found.targets)
            assert api.asked["list"] == 1
            assert int(api.from_versions[1]) > int(api.from_versions[0])  # the bookmark's
            assert gateway.found.sources[NAME].why == ""


async def test_after_410_everything_is_listed_again_and_nothing_is_lost(tmp_path: Path, api: ClusterApi) -> None:
    one, two = Far("pool/pool-0"), Far("pool/pool-1")
    async with running(one, two):
        list_pod(api, one)
        async with gateway_for(configured(tmp_path, discovery=(source(api.url),))) as (gateway, session):
            await until(lambda: api.asked["watch"] == 1)
            list_pod(api, two)
            api.forget_log()
            api.cut_watches()
            await until(lambda: api.asked["list"] == 2)
            await until(lambda: "pool/pool-1" in gateway.found.targets)
            assert gateway.found.targets["pool/pool-0"].leaving == ""
            assert (await ask(gateway, session))[0] == 200
            assert gateway.found.sources[NAME].why == ""


async def test_an_api_server_that_goes_away_takes_no_target(tmp_path: Path, api: ClusterApi) -> None:
    one, two = Far("pool/pool-0"), Far("pool/pool-1")
    async with running(one, two):
        list_pod(api, one)
        async with gateway_for(configured(tmp_path, discovery=(source(api.url),))) as (gateway, session):
            await api.stop()
            await until(lambda: "cannot be asked" in gateway.found.sources[NAME].why)
            assert (await ask(gateway, session))[0] == 200
            list_pod(api, two)
            await api.start()
            await until(lambda: "pool/pool-1" in gateway.found.targets)
            assert gateway.found.sources[NAME].why == "" and gateway.found.targets["pool/pool-0"].leaving == ""


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (403, "apiGroups [discovery.k8s.io], resources [endpointslices], verbs [get, list, watch]"),
        (401, "does not accept the token"),
        (404, "has no EndpointSlices"),
        (409, "said 409"),
        (429, "said 429"),
        (500, "said 500"),
        (410, "the list was left behind"),
    ],
)
async def test_a_refusal_is_a_condition_that_names_the_way_out(
    tmp_path: Path, api: ClusterApi, status: int, words: str
) -> None:
    far = Far("pool/pool-0")
    api.fault = status
    async with running(far):
        list_pod(api, far)
        async with gateway_for(configured(tmp_path, discovery=(source(api.url),))) as (gateway, session):
            assert words in await evidence(gateway, session)
            api.fault = 0
            await until(lambda: gateway.host.model_ready("echo"))
            assert gateway.found.sources[NAME].why == ""
            api.fault = status
            api.cut_watches()
            await clock.sleep(1.0)
            assert (await ask(gateway, session))[0] == 200  # what was said last holds
            assert api.asked["watch"] + api.asked["list"] < 20  # nor is the server asked in a loop


async def test_an_error_within_a_watch_has_everything_listed_again(tmp_path: Path, api: ClusterApi) -> None:
    far = Far("pool/pool-0")
    api.watch_fault = 500
    async with running(far):
        list_pod(api, far)
        async with gateway_for(configured(tmp_path, discovery=(source(api.url),))) as (gateway, _):
            await until(lambda: "the watch has failed: 500" in gateway.found.sources[NAME].why)
            await until(lambda: api.asked["list"] >= 2)
            api.watch_fault = 0
            await until(lambda: gateway.found.sources[NAME].why == "" and api.from_versions != [])
            assert list(gateway.found.targets) == ["pool/pool-0"]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"not json\n", "cannot be read"),
        (b'{"type": "ADDED", "object": {"metadata": {"name": 1}}}\n', "cannot be read"),
        (b'{"type": "ADDED", "object": ' + b"[" * 3000 + b"}\n", "cannot be read"),
        (b"x" * (5 * 2**20), "more than 4194304 bytes"),
    ],
)
async def test_hostile_events_change_nothing(tmp_path: Path, api: ClusterApi, raw: bytes, words: str) -> None:
    far = Far("pool/pool-0")
    api.raw_events = [raw]
    async with running(far):
        list_pod(api, far)
        async with gateway_for(configured(tmp_path, discovery=(source(api.url),))) as (gateway, session):
            seen: set[str] = set()

            def said() -> bool:
                seen.add(gateway.found.sources[NAME].why)
                return any(words in why for why in seen)

            await until(said)
            assert (await ask(gateway, session))[0] == 200
            assert api.asked["list"] < 10


async def test_many_slices_come_in_pages(tmp_path: Path, api: ClusterApi) -> None:
    for number in range(600):
        api.put(slice_of(f"s{number:03}", 1, endpoint(f"p{number}", "127.0.0.1")))
    async with gateway_for(configured(tmp_path, discovery=(source(api.url),))) as (gateway, _):
        assert api.asked["list"] == 3
        assert len(gateway.found.targets) == 600


async def test_pods_whose_names_cannot_be_targets_are_left_out_by_name(tmp_path: Path, api: ClusterApi) -> None:
    api.put(
        slice_of("a", 1, endpoint("p" * 80, "127.0.0.1"), endpoint("p/../q", "127.0.0.1"), endpoint("ok", "127.0.0.1"))
    )
    async with gateway_for(configured(tmp_path, discovery=(source(api.url),))) as (gateway, session):
        assert list(gateway.found.targets) == ["pool/ok"]
        assert "p/../q" in await evidence(gateway, session)


async def test_the_token_is_read_again_for_each_request(tmp_path: Path, api: ClusterApi) -> None:
    (token := tmp_path / "token").write_text("first\n")
    with_token = source(api.url, token_file=token)
    async with gateway_for(configured(tmp_path, discovery=(with_token,))) as (gateway, _):
        await until(lambda: len(api.tokens) == 2)
        token.write_text("second\n")
        api.cut_watches()
        await until(lambda: len(api.tokens) == 3)
        assert api.tokens == ["Bearer first", "Bearer first", "Bearer second"]
        token.write_text("two words\n")
        api.cut_watches()
        await until(lambda: "should hold one word" in gateway.found.sources[NAME].why)
        token.write_text("third\n")
        await until(lambda: gateway.found.sources[NAME].why == "" and api.tokens[-1] == "Bearer third")


async def test_objects_made_by_the_emulators_own_api_are_found(tmp_path: Path) -> None:
    """kmock's emulator: another implementation of lists and watches than the one of these tests."""
    far = Far("pool/pool-0")
    async with running(far), kmock.KubernetesEmulator() as emulator, kmock.Server(emulator) as server:
        emulator.resources[SLICES] = {}  # type: ignore[typeddict-item]
        config = configured(tmp_path, discovery=(source(str(server.url).rstrip("/")),))
        async with gateway_for(config) as (gateway, session):
            assert "is its name right" in await evidence(gateway, session)
            path = "/apis/discovery.k8s.io/v1/namespaces/prod/endpointslices"
            one = slice_of("a", port_of(far), endpoint("pool-0", "127.0.0.1"))
            async with server.client.post(path, json=one):
                pass
            await until(lambda: gateway.host.model_ready("echo"))
            assert (await ask(gateway, session))[0] == 200
            drains = {"endpoints": [endpoint("pool-0", "127.0.0.1", ready=False, terminating=True)]}
            async with server.client.patch(f"{path}/a", json=drains):
                pass
            await until(lambda: "says that it ends" in gateway.fleet.targets["pool/pool-0"].leaving)
            async with server.client.delete(f"{path}/a"):
                pass
            await until(lambda: "does not list" in gateway.fleet.targets["pool/pool-0"].leaving)


def test_in_a_pod_the_service_account_is_used(tmp_path: Path) -> None:
    (tmp_path / "namespace").write_text("prod\n")
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    found = api_address(None, None, None, None, environ, tmp_path)
    assert (found.server, found.namespace) == ("https://[fd00::1]:6443", "prod")
    assert (found.token_file, found.ca_file) == (tmp_path / "token", tmp_path / "ca.crt")
    assert api_address(None, "other", None, None, environ, tmp_path).namespace == "other"
    with pytest.raises(ConfigError, match="kubectl proxy"):
        api_address(None, None, None, None, {}, tmp_path)
    with pytest.raises(ConfigError, match=r"cannot read .*namespace"):
        api_address(None, None, None, None, environ, tmp_path / "elsewhere")


def test_the_manifest_gives_the_rights_that_the_condition_names() -> None:
    manifest = Path(__file__).parents[3] / "deploy/kubernetes/gateway-rbac.yaml"
    account, role, binding, service = yaml.safe_load_all(manifest.read_text())
    assert role["rules"] == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
    ]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert [one["name"] for one in binding["subjects"]] == [account["metadata"]["name"]]
    assert service["spec"]["clusterIP"] == "None" and len(service["spec"]["ports"]) == 1


async def test_outside_of_a_cluster_the_start_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    section = SourceConfig(source="kubernetes", service="pools")
    with pytest.raises(StartError, match=r"kubernetes:pools: this process runs in no pod"):
        async with Gateway(configured(tmp_path, discovery=(section,))):
            pass


async def test_over_tls_the_ca_file_decides_and_is_followed(tmp_path: Path) -> None:
    """A real TLS server in front of nothing: what counts is whether the handshake is believed."""

    def make(name: str) -> tuple[Path, Path]:
        cert, key = tmp_path / f"{name}.crt", tmp_path / f"{name}.key"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
             "-keyout", str(key), "-out", str(cert), "-subj", "/CN=api",
             "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"],
            check=True, capture_output=True,
        )  # fmt: skip
        return cert, key

    right, wrong = make("right"), make("wrong")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = b'{"metadata": {"resourceVersion": "1"}, "items": []}'
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*right)
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    async with server:
        (ca := tmp_path / "ca.crt").write_bytes(wrong[0].read_bytes())
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with gateway_for(configured(tmp_path, discovery=(source(url, ca_file=ca),))) as (gateway, _):
            state = gateway.found.sources[NAME]
            await until(lambda: "CERTIFICATE_VERIFY_FAILED" in state.why or "certificate" in state.why.lower())
            assert state.heard_at is None
            ca.write_bytes(right[0].read_bytes())
            await until(lambda: state.heard_at is not None)
