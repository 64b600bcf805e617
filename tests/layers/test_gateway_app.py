"""A whole gateway in this process, with targets on real loopback connections: what a caller and an operator see."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import msgspec
import pytest
import yaml
from structlog.testing import capture_logs

from gateway.app import Gateway
from gateway.config import GatewayConfig
from gateway.config_sections import TargetConfig
from tests.support.hosts import ECHO, EchoHost, echo_request
from tidegate import clock
from tidegate.fleet.freshness import DeviceView, Freshness
from tidegate.fleet.offers import ModelOffer, VariantOffer
from tidegate.link.service import LinkService, add_link_service
from tidegate.link.session import Heartbeat
from tidegate.models.manifest import Manifest, Variant
from tidegate.oip.grpc import message_from_request
from tidegate.oip.grpc_server import add_oip_service, server_options
from tidegate.outcome import Overloaded
from tidegate.process import StartError
from tidegate.rpc import oip_pb2
from tidegate.types import LoadReport

pytestmark = pytest.mark.slow
MAX_BYTES = 2**22
INFER = "/v2/models/echo/infer"
BODY = {"inputs": [{"name": "x", "datatype": "UINT8", "shape": [3], "data": [1, 2, 3]}]}


_ARTEFACT = {"artefact": "echo.onnx", "engine": "onnx", "where": ("edge", "pool"), "sha256": "0" * 64, "size_bytes": 1}
TWO_VARIANTS = msgspec.structs.replace(
    ECHO, variants=tuple(Variant(name=name, precision=name, **_ARTEFACT) for name in ("fp32", "int8"))
)


class TwoVariantHost(EchoHost):
    def manifest(self, name: str, version: str = "") -> Manifest:
        super().manifest(name, version)
        return TWO_VARIANTS


class Far:
    """A target process in miniature: OIP and the link stream on one port."""

    def __init__(
        self, name: str, *, variant: str = "fp32", max_batch: int | None = None, says_s: float = 0.002
    ) -> None:
        """Args: says_s: what it says that a call takes; it answers at once all the same."""
        self.name = name
        self.host = TwoVariantHost()
        self.port = 0
        self.offers = (
            ModelOffer("echo", "3", (VariantOffer(variant, variant, ((1.0, says_s), (100.0, 2 * says_s)), max_batch),)),
        )
        self.link: LinkService | None = None
        self._server: grpc.aio.Server | None = None
        self._sequence = 0

    async def start(self) -> None:
        self._server = grpc.aio.server(options=server_options(MAX_BYTES))
        add_oip_service(self._server, self.host, max_message_bytes=MAX_BYTES)
        self.link = add_link_service(
            self._server,
            self.host,
            name=self.name,
            epoch=lambda: 1,
            offers=lambda: self.offers,
            load=self._load,
            heartbeat=Heartbeat(0.1, 10),
        )
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def kill(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def _load(self) -> LoadReport:
        self._sequence += 1
        return LoadReport(1, self._sequence, 0, 0, 0.0)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


def repository(folder: Path) -> Path:
    home = folder / "models" / "echo" / "3"
    home.mkdir(parents=True)
    (home / "model.yaml").write_text(yaml.safe_dump(msgspec.to_builtins(TWO_VARIANTS)))
    return folder / "models"


@asynccontextmanager
async def running(*fars: Far) -> AsyncIterator[None]:
    for far in fars:
        await far.start()
    try:
        yield
    finally:
        for far in fars:
            await far.kill()


def configured(folder: Path, *targets: TargetConfig, **more: object) -> GatewayConfig:
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "admin_port": 0}
    more.setdefault("advertised_networks", ("127.0.0.0/8",))
    return GatewayConfig(model_repository=repository(folder), targets=targets, **ports, **more)  # type: ignore[arg-type]


def target(far: Far, **more: object) -> TargetConfig:
    tier, name = far.name.split("/")
    return TargetConfig(name=name, tier=tier, address=far.address, **more)  # type: ignore[arg-type]


async def until(true: Callable[[], bool], within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not true():
            await clock.sleep(0.01)


@asynccontextmanager
async def gateway_for(config: GatewayConfig) -> AsyncIterator[tuple[Gateway, aiohttp.ClientSession]]:
    async with Gateway(config) as gateway, aiohttp.ClientSession() as session:
        await gateway.static_targets_tried(5.0)
        yield gateway, session


async def ask(gateway: Gateway, session: aiohttp.ClientSession, **headers: str) -> tuple[int, dict, dict[str, str]]:
    async with session.post(gateway.addresses["http"] + INFER, json=BODY, headers=headers) as response:
        return response.status, await response.json(), {name.lower(): text for name, text in response.headers.items()}


async def test_an_edge_answers_because_it_is_the_cheapest_and_the_headers_say_so(tmp_path: Path) -> None:
    edge, pool = Far("edge/attic", variant="int8"), Far("pool/main")
    async with running(edge, pool), AsyncExitStack() as stack:
        config = configured(tmp_path, target(edge), target(pool))
        gateway, session = await stack.enter_async_context(gateway_for(config))

        status, body, headers = await ask(gateway, session)

        assert status == 200
        assert body["outputs"][0]["data"] == [1, 2, 3]
        assert headers["tidegate-served-by"] == "edge/attic"
        assert headers["tidegate-route"].startswith("cheapest; variant=")
        assert 1500 < float(headers["tidegate-budget-left-ms"]) < 2000
        assert "compute" in headers["server-timing"]


async def test_a_demanded_variant_is_honoured(tmp_path: Path) -> None:
    edge, pool = Far("edge/attic", variant="int8"), Far("pool/main", variant="fp32")
    async with running(edge, pool), AsyncExitStack() as stack:
        gateway, session = await stack.enter_async_context(
            gateway_for(configured(tmp_path, target(edge), target(pool)))
        )

        status, _, headers = await ask(gateway, session, **{"tidegate-variant": "fp32"})

        assert (status, headers["tidegate-served-by"]) == (200, "pool/main")
        assert headers["tidegate-route"].startswith("demanded; variant=fp32")


async def test_grpc_callers_are_answered_with_the_same_words(tmp_path: Path) -> None:
    pool = Far("pool/main")
    async with running(pool), AsyncExitStack() as stack:
        gateway, _ = await stack.enter_async_context(gateway_for(configured(tmp_path, target(pool))))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(gateway.addresses["grpc"]))

        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(
            message_from_request(echo_request(b"abc")).SerializeToString(), timeout=2.0
        )
        answer = oip_pb2.ModelInferResponse.FromString(await call)
        trailers = dict(await call.trailing_metadata())

        assert answer.raw_output_contents[0] == b"abc"
        assert trailers["tidegate-served-by"] == "pool/main"
        assert trailers["tidegate-route"].startswith("only;")


async def test_tensors_that_are_just_allowed_pass_with_their_names_and_what_the_gateway_adds(tmp_path: Path) -> None:
    edge, limit = Far("edge/attic"), 4096
    async with running(edge), AsyncExitStack() as stack:
        config = configured(tmp_path, target(edge), max_body_bytes=limit)
        gateway, _ = await stack.enter_async_context(gateway_for(config))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(gateway.addresses["grpc"]))
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        message = message_from_request(echo_request(bytes(limit))).SerializeToString()
        assert len(message) > limit

        answer = oip_pb2.ModelInferResponse.FromString(await call(message, timeout=5.0))

        assert answer.raw_output_contents[0] == bytes(limit)


async def test_a_target_that_is_full_is_replaced_and_the_fallback_declared(tmp_path: Path) -> None:
    edge, pool = Far("edge/attic"), Far("pool/main")
    edge.host.error = Overloaded("the queue is full", retry_after_s=0.5)
    async with running(edge, pool), AsyncExitStack() as stack:
        gateway, session = await stack.enter_async_context(
            gateway_for(configured(tmp_path, target(edge), target(pool)))
        )

        status, _, headers = await ask(gateway, session)

        assert (status, headers["tidegate-served-by"]) == (200, "pool/main")
        assert (
            headers["tidegate-route"]
            == "fallback; variant=fp32; attempts=2; hedged=0; fallback=1; degraded=0; provisional=0"
        )


async def test_a_silent_target_is_hedged_in_time_and_its_attempt_is_cancelled(tmp_path: Path) -> None:
    # A pool that needs 0.3 s of 1.5 is asked early enough for a test machine that stutters.
    edge, pool = Far("edge/attic"), Far("pool/main", says_s=0.3)
    edge.host.gate.clear()
    async with running(edge, pool), AsyncExitStack() as stack:
        gateway, session = await stack.enter_async_context(
            gateway_for(configured(tmp_path, target(edge), target(pool)))
        )

        status, _, headers = await ask(gateway, session, **{"tidegate-budget-ms": "1500"})

        assert (status, headers["tidegate-served-by"]) == (200, "pool/main")
        assert headers["tidegate-route"].startswith("hedge; ") and "hedged=1; fallback=0" in headers["tidegate-route"]
        await until(lambda: edge.host.cancelled == 1)
        assert gateway.fleet.targets["edge/attic"].ledger.in_flight == 0


async def test_nothing_answers_before_the_deadline_is_504_at_the_deadline(tmp_path: Path) -> None:
    pool = Far("pool/main")
    pool.host.gate.clear()
    async with running(pool), AsyncExitStack() as stack:
        gateway, session = await stack.enter_async_context(gateway_for(configured(tmp_path, target(pool))))

        started = clock.now()
        status, _, _ = await ask(gateway, session, **{"tidegate-budget-ms": "200"})

        assert status == 504
        assert 0.19 <= clock.now() - started < 0.5
        await until(lambda: pool.host.cancelled == 1)


async def test_a_killed_target_is_left_alone_at_once_and_used_again_when_it_is_back(tmp_path: Path) -> None:
    edge, pool = Far("edge/attic"), Far("pool/main")
    async with running(edge, pool), AsyncExitStack() as stack:
        gateway, session = await stack.enter_async_context(
            gateway_for(configured(tmp_path, target(edge), target(pool)))
        )
        await edge.kill()
        status, _, headers = await ask(gateway, session)
        assert (status, headers["tidegate-served-by"]) == (200, "pool/main")

        await pool.kill()
        await until(lambda: not gateway.host.ready())
        status, body, _ = await ask(gateway, session)
        assert status == 503
        assert "pool/main is down since" in body["error"]
        assert not gateway.host.model_ready("echo")

        await edge.start()
        await until(gateway.host.ready, 15.0)
        status, _, headers = await ask(gateway, session)
        assert (status, headers["tidegate-served-by"]) == (200, "edge/attic")


async def test_only_a_target_that_leaves_without_a_word_is_a_warning(tmp_path: Path) -> None:
    orderly, broken = Far("edge/attic"), Far("pool/main")
    async with running(orderly, broken), AsyncExitStack() as stack:
        gateway, _ = await stack.enter_async_context(gateway_for(configured(tmp_path, target(orderly), target(broken))))
        assert orderly.link is not None
        with capture_logs() as logs:
            await orderly.link.drain("shutdown")
            await broken.kill()
            await until(lambda: not any(one.up for one in gateway.fleet.targets.values()))

    down = {line["target"]: line["log_level"] for line in logs if line["event"] == "target is down"}
    assert down == {"edge/attic": "info", "pool/main": "warning"}


async def test_a_caller_who_hangs_up_takes_the_work_with_him(tmp_path: Path) -> None:
    pool = Far("pool/main")
    pool.host.gate.clear()
    async with running(pool), AsyncExitStack() as stack:
        gateway, session = await stack.enter_async_context(gateway_for(configured(tmp_path, target(pool))))

        asking = asyncio.create_task(ask(gateway, session))
        await pool.host.begun.acquire()
        asking.cancel()

        await until(lambda: pool.host.cancelled == 1)
        assert gateway.admission.in_flight == 0


async def test_a_tenant_over_its_limit_gets_429_and_is_told_when_to_come_back_over_http_and_grpc(
    tmp_path: Path,
) -> None:
    pool = Far("pool/main")
    pool.host.gate.clear()
    async with running(pool), AsyncExitStack() as stack:
        config = configured(tmp_path, target(pool), tenants={"acme": {"max_in_flight": 1}})
        gateway, session = await stack.enter_async_context(gateway_for(config))
        acme = {"tidegate-tenant": "acme", "tidegate-budget-ms": "30000"}
        first = asyncio.create_task(ask(gateway, session, **acme))
        await pool.host.begun.acquire()

        status, body, headers = await ask(gateway, session, **acme)
        assert (status, headers["tidegate-refused"]) == (429, "overloaded")
        assert body["error"] == "over-budget: tenant 'acme' has 1 requests in flight, its limit"
        assert 50 <= int(headers["retry-after-ms"]) <= 30_000

        channel = await stack.enter_async_context(grpc.aio.insecure_channel(gateway.addresses["grpc"]))
        method = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        message = message_from_request(echo_request(b"abc"))
        message.parameters["tidegate-tenant"].string_param = "acme"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await method(message.SerializeToString(), timeout=5.0)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailers = dict(refused.value.trailing_metadata())
        assert trailers["tidegate-code"] == "overloaded"
        assert 50 <= int(trailers["retry-after-ms"]) <= 30_000

        status, body, _ = await ask(gateway, session, **{"tidegate-tenant": "no such name!"})
        assert status == 400
        assert "header tidegate-tenant must be 1 to 64 letters" in body["error"]

        pool.host.gate.set()
        assert (await first)[0] == 200
        async with session.get(gateway.addresses["metrics"] + "/metrics") as answer:
            metrics = await answer.text()
        assert 'tidegate_shed_total{reason="over-budget"} 2.0' in metrics
        assert 'tidegate_tenant_in_flight{tenant="acme"} 0.0' in metrics
        assert "tidegate_overloaded 0.0" in metrics


async def test_a_foreign_server_is_described_and_then_served(tmp_path: Path) -> None:
    far = Far("pool/triton")
    async with running(far), AsyncExitStack() as stack:
        foreign = target(far, foreign=True, models=("echo",))
        ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "admin_port": 0}
        config = GatewayConfig(targets=(foreign,), **ports)  # type: ignore[arg-type]
        gateway, session = await stack.enter_async_context(gateway_for(config))

        status, body, headers = await ask(gateway, session)

        assert (status, headers["tidegate-served-by"]) == (200, "pool/triton")
        assert body["outputs"][0]["data"] == [1, 2, 3]


async def test_a_foreign_server_that_cannot_be_described_at_first_is_asked_again(tmp_path: Path) -> None:
    far = Far("pool/triton")
    told = far.host.manifest

    def busy(name: str, version: str = "") -> Manifest:
        raise Overloaded("still loading")

    far.host.manifest = busy  # type: ignore[method-assign]
    async with running(far), AsyncExitStack() as stack:
        ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "admin_port": 0}
        config = GatewayConfig(targets=(target(far, foreign=True, models=("echo",)),), **ports)  # type: ignore[arg-type]
        gateway, _ = await stack.enter_async_context(gateway_for(config))
        assert not gateway.catalog.manifests

        far.host.manifest = told  # type: ignore[method-assign]

        await until(lambda: bool(gateway.catalog.manifests))


async def test_a_unary_target_of_our_own_offers_what_the_repository_says(tmp_path: Path) -> None:
    far = Far("pool/main")
    async with running(far), AsyncExitStack() as stack:
        gateway, session = await stack.enter_async_context(
            gateway_for(configured(tmp_path, target(far, transport="unary")))
        )

        status, _, headers = await ask(gateway, session, **{"tidegate-variant": "fp32"})

        assert (status, headers["tidegate-served-by"]) == (200, "pool/main")
        assert "compute" in headers["server-timing"]


class FakeRegister:
    """What MQTT would have told."""

    def __init__(self) -> None:
        self.views: tuple[DeviceView, ...] = ()
        self.evidence: list[str] = []

    def devices(self, now: float) -> tuple[DeviceView, ...]:
        return self.views

    def data_plane(self, name: str, epoch: int, sequence: int, load: LoadReport | None, now: float) -> bool:
        self.evidence.append(f"{name} answered")
        return True

    def data_plane_alive(self, name: str, now: float) -> bool:
        self.evidence.append(f"{name} lives")
        return True

    def data_plane_lost(self, name: str, now: float) -> bool:
        self.evidence.append(f"{name} lost")
        return True


def device(far: Far, freshness: Freshness = Freshness.FRESH) -> DeviceView:
    name = far.name.partition("/")[2]
    reason = "" if freshness is Freshness.FRESH else "no heartbeat"
    return DeviceView(name, 1, (f"grpc://{far.address}",), far.offers, None, freshness, 0.1, reason)


@pytest.mark.parametrize("transport", ["link", "unary"])
async def test_devices_come_and_go_with_what_mqtt_and_the_link_say(tmp_path: Path, transport: str) -> None:
    edge = Far("edge/attic")
    async with running(edge), AsyncExitStack() as stack:
        config = configured(tmp_path, edge_transport=transport)
        gateway, session = await stack.enter_async_context(gateway_for(config))
        register = FakeRegister()
        gateway.directory.register = register
        assert (await ask(gateway, session))[0] == 503

        register.views = (device(edge),)
        gateway.directory.devices_changed()
        await until(lambda: gateway.host.model_ready("echo"))
        assert (await ask(gateway, session))[2]["tidegate-served-by"] == "edge/attic"
        assert "attic answered" in register.evidence

        # Its broker is gone, but its link works: it stays in use.
        register.views = (device(edge, Freshness.DEAD),)
        gateway.directory.devices_changed()
        await clock.sleep(0.05)
        assert (await ask(gateway, session))[0] == 200

        await edge.kill()
        await until(lambda: "attic lost" in register.evidence)
        gateway.directory.devices_changed()
        await until(lambda: not gateway.fleet.targets)
        assert (await ask(gateway, session))[0] == 503


async def test_whoever_answers_under_another_name_is_not_used(tmp_path: Path) -> None:
    impostor = Far("edge/cellar")
    async with running(impostor), AsyncExitStack() as stack:
        gateway, _ = await stack.enter_async_context(gateway_for(configured(tmp_path)))
        register = FakeRegister()
        gateway.directory.register = register
        register.views = (DeviceView("attic", 1, (impostor.address,), impostor.offers, None, Freshness.FRESH, 0.1, ""),)
        gateway.directory.devices_changed()

        await until(lambda: "edge/attic" in gateway.fleet.targets and gateway.fleet.targets["edge/attic"].tried)

        assert "is edge/cellar" in gateway.fleet.targets["edge/attic"].state(clock.now())[1]

        # What it goes on to say, such as its load with every heartbeat, is no sign of life of the device that is gone.
        register.evidence.clear()
        assert impostor.link is not None
        for _ in range(3):
            impostor.link.announce()
            await clock.sleep(0.1)
        assert register.evidence == []


async def test_a_device_that_advertises_an_address_elsewhere_is_not_dialled_and_operators_see_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    far = Far("edge/attic")
    async with running(far), AsyncExitStack() as stack:
        gateway, session = await stack.enter_async_context(
            gateway_for(configured(tmp_path, advertised_networks=("10.0.0.0/8",)))
        )
        register = FakeRegister()
        gateway.directory.register = register
        register.views = (DeviceView("attic", 1, (far.address,), far.offers, None, Freshness.FRESH, 0.1, ""),)
        for _ in range(2):
            gateway.directory.devices_changed()
            await until(lambda: "attic" in gateway.directory.refused)

        async with session.get(gateway.addresses["admin"] + "/v1/state") as response:
            state = await response.json()

        assert gateway.directory.targets == {}
        reason = "127.0.0.1 is in no network of advertised_networks"
        assert state["refused"] == [{"device": "attic", "reason": reason}]
        assert capsys.readouterr().out.count("advertises an address that is not allowed") <= 1


async def test_operators_see_state_decisions_and_metrics(tmp_path: Path) -> None:
    edge, pool = Far("edge/attic", max_batch=1), Far("pool/main")
    async with running(edge, pool), AsyncExitStack() as stack:
        gateway, session = await stack.enter_async_context(
            gateway_for(configured(tmp_path, target(edge), target(pool)))
        )
        await ask(gateway, session)
        admin = gateway.addresses["admin"]

        async with session.get(admin + "/v1/state") as response:
            state = await response.json()
        async with session.get(admin + "/debug/decisions?last=1") as response:
            decisions = (await response.json())["decisions"]
        async with session.get(admin + "/debug/decisions?last=x") as response:
            assert response.status == 400
        async with session.get(admin + "/healthz") as response:
            assert response.status == 200
        async with session.get(gateway.addresses["metrics"] + "/metrics") as response:
            metrics = await response.text()

        assert [(one["id"], one["state"]) for one in state["targets"]] == [
            ("edge/attic", "ready"),
            ("pool/main", "ready"),
        ]
        assert state["models"] == [
            {"name": "echo", "version": "3", "ready": True, "targets": ["edge/attic", "pool/main"]}
        ]
        assert decisions[0]["chosen"] == decisions[0]["end"]["served_by"] == "pool/main"  # three rows are too many
        assert [one["target"] for one in decisions[0]["candidates"]] == ["pool/main"]
        assert 'tidegate_requests_total{model="echo",outcome="ok",protocol="oip-http",tier="pool"} 1.0' in metrics
        assert 'nv_inference_request_success{model="echo",version="3"} 1.0' in metrics
        assert 'tidegate_breaker_state{target="edge/attic"} 0.0' in metrics


async def test_each_policy_explains_itself_with_the_numbers_that_it_has(tmp_path: Path) -> None:
    edge, pool = Far("edge/attic"), Far("pool/main")
    async with running(edge, pool):
        shown = {}
        for policy in ("cheapest", "value"):
            folder = tmp_path / policy
            folder.mkdir()
            async with AsyncExitStack() as stack:
                gateway, session = await stack.enter_async_context(
                    gateway_for(configured(folder, target(edge), target(pool), policy=policy))
                )
                await ask(gateway, session)
                async with session.get(gateway.addresses["admin"] + "/debug/decisions") as response:
                    (decision,) = (await response.json())["decisions"]
            assert decision["end"]["reason"] == "cheapest"
            shown[policy] = {one["target"]: one for one in decision["candidates"]}

    assert shown["cheapest"]["edge/attic"]["chance"] > 0.99
    assert "value" not in shown["cheapest"]["edge/attic"]
    assert shown["value"]["edge/attic"]["calibrated"] > 0.99
    assert shown["value"]["edge/attic"]["harm"] == 0.0
    assert 0.9 < shown["value"]["edge/attic"]["value"] <= 1.0
    assert shown["value"]["pool/main"]["chance"] > 0.99, "not judged: it could not have won"


async def test_a_taken_port_names_the_key(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for key in ("http_port", "grpc_port"):
            ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "admin_port": 0, key: port}
            with pytest.raises(StartError, match=f"127.0.0.1:{port} \\(key '{key}'\\): port {port} is taken"):
                async with Gateway(GatewayConfig(**ports)):  # type: ignore[arg-type]
                    pass
