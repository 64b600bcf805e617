"""A device works on its own and recovers: a real broker, real ONNX workers, a gateway in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import numpy as np
import pytest

from edge_agent.app import EdgeApp
from edge_agent.config import EdgeConfig
from gateway.app import Gateway
from gateway.config.gateway import GatewayConfig
from tests.support.models.unsure_model import SURE, UNSURE, better_repository, kinds_repository
from tests.support.mqtt.brokers import Embedded, Mosquitto
from tidegate import clock
from tidegate.arrays import array_to_tensor
from tidegate.config import load
from tidegate.oip.grpc.codec import message_from_request
from tidegate.types import Datatype, InferRequest

pytestmark = [pytest.mark.slow, pytest.mark.needs_mosquitto]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Mosquitto]:
    with Mosquitto(tmp_path) as one:
        yield one


@pytest.fixture(params=[Mosquitto, Embedded])
def any_broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Mosquitto | Embedded]:
    with request.param(tmp_path) as one:
        yield one


def edge(models: Path, mqtt: str | None, state: Path, **keys: Any) -> EdgeApp:
    where = {"grpc_port": 0, "http_port": 0, "model_repository": models, "state_dir": state, "mqtt": mqtt}
    keys = {"name": "kiosk", "warmup_budget_s": 0.5, "fleet": "f1", **keys}
    return EdgeApp(load(EdgeConfig, **(where | keys)), draw=lambda: 0.1)


@asynccontextmanager
async def gateway(models: Path, mqtt: str, folder: Path, **keys: Any) -> AsyncIterator[Gateway]:
    ports = dict.fromkeys(("http_port", "grpc_port", "metrics_port", "admin_port"), 0)
    where = {"model_repository": models, "mqtt": mqtt, "fleet": "f1", "ingest": {"path": folder / "ingest.db"}}
    async with Gateway(load(GatewayConfig, **(ports | where | keys)), draw=lambda: 0.1) as one:
        yield one


async def eventually(what: Callable[[], Any], within_s: float = 30.0) -> Any:
    async with asyncio.timeout(within_s):
        while True:
            found = what()
            found = await found if asyncio.iscoroutine(found) else found
            if found:
                return found
            await clock.sleep(0.02)


async def ask(
    session: aiohttp.ClientSession, address: str, x: list[list[float]], id: str = "r-1", **headers: str
) -> Any:
    body = {"id": id, "inputs": [{"name": "x", "datatype": "FP32", "shape": [len(x), 8], "data": x}]}
    async with session.post(f"{address}/v2/models/kinds/infer", json=body, headers=headers) as answer:
        return answer.status, answer.headers, await answer.json()


async def get(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.get(url) as answer:
        return answer.status, answer.headers, await answer.json()


async def test_a_deferred_request_is_computed_by_a_better_variant_when_there_is_a_way_and_comes_back_by_its_ticket(
    tmp_path: Path, any_broker: Mosquitto | Embedded
) -> None:
    models, better = kinds_repository(tmp_path / "m"), better_repository(tmp_path / "b")
    async with edge(models, any_broker.url, tmp_path / "state") as app, aiohttp.ClientSession() as session:
        device = app.addresses["http"]
        sure, unsure = await ask(session, device, SURE), await ask(session, device, UNSURE)
        assert sure[0] == 200
        assert (unsure[0], unsure[2]["code"], unsure[2]["state"]) == (202, "deferred", "waiting")
        assert unsure[1]["Location"] == f"/v2/tickets/{unsure[2]['ticket']}"
        where = device + unsure[1]["Location"]
        assert (await get(session, where))[2]["state"] == "waiting"

        async with (
            edge(better, any_broker.url, tmp_path / "other", name="server"),
            gateway(models, any_broker.url, tmp_path) as g,
        ):

            async def answered() -> Any:
                found = await get(session, where)
                return found if found[0] != 202 else None

            status, headers, answer = await eventually(answered)
            assert status == 200
            assert headers["tidegate-served-by"] == "edge/server"
            assert np.argmax(answer["outputs"][0]["data"]) == 3
            assert answer["id"] == "r-1"
            _, _, records = await get(session, f"{g.addresses['admin']}/v1/ingested")
            kept = [one for one in records["records"] if one["kind"] == "answer"]
            assert [(one["device"], one["id"], one["variant"]) for one in kept] == [
                ("kiosk", unsure[2]["ticket"], "fp32")
            ]
            async with session.delete(where) as forgotten:
                assert forgotten.status == 200
            assert (await get(session, where))[0] == 404


async def test_a_device_may_ask_later_for_the_models_only_that_its_entry_names(
    tmp_path: Path, broker: Mosquitto
) -> None:
    """What comes over MQTT bears no credential of a caller's: the gateway's operator says what devices may ask for."""
    models, better = kinds_repository(tmp_path / "m"), better_repository(tmp_path / "b")
    ingest = {"path": tmp_path / "ingest.db", "models": {"kiosk": ("kind-*", "other"), "*": ("*",)}}
    async with (
        edge(models, broker.url, tmp_path / "state") as app,
        edge(better, broker.url, tmp_path / "other", name="server"),
        gateway(models, broker.url, tmp_path, ingest=ingest),
        aiohttp.ClientSession() as session,
    ):
        device = app.addresses["http"]
        where = device + (await ask(session, device, UNSURE))[1]["Location"]

        async def ended() -> Any:
            found = await get(session, where)
            return found if found[0] != 202 else None

        status, _, answer = await eventually(ended)
        assert status == 403
        assert "device 'kiosk' may not ask for model 'kinds'" in answer["error"]


@pytest.mark.parametrize(
    ("policy", "headers", "status", "provisional"),
    [
        ("accept", {}, 200, "1"),
        ("reject", {}, 503, ""),
        ("defer", {}, 202, ""),
        ("accept", {"tidegate-defer": "1"}, 202, ""),
        ("reject", {"tidegate-pin": "edge"}, 200, "1"),  # it may not leave, so nothing of it is kept for a gateway
        ("defer", {"tidegate-pin": "edge"}, 200, "1"),
        ("reject", {"tidegate-variant": "int8"}, 200, "1"),  # of what was demanded there is no better
    ],
)
async def test_an_unsure_answer_becomes_what_its_model_and_its_caller_say(
    tmp_path: Path, policy: Any, headers: dict[str, str], status: int, provisional: str
) -> None:
    nowhere = "mqtt://broker.invalid:1883"  # its name resolves to nothing: a device that was never online
    models = kinds_repository(tmp_path / "m", unsure=policy)
    async with edge(models, nowhere, tmp_path / "state") as app, aiohttp.ClientSession() as session:
        sure = await ask(session, app.addresses["http"], SURE, **headers)
        got, said, answer = await ask(session, app.addresses["http"], UNSURE, **headers)

        assert sure[0] == 200
        assert "provisional=0" in sure[1]["tidegate-route"]
        assert got == status
        if provisional:
            assert "provisional=1" in said["tidegate-route"]
        elif status == 503:
            assert (answer["code"], said["retry-after"]) == ("nothing_alive", "30")
        else:
            assert said["tidegate-ticket"] == answer["ticket"]


async def test_over_grpc_a_ticket_is_in_the_trailing_metadata_of_a_refusal_that_no_client_repeats(
    tmp_path: Path,
) -> None:
    models = kinds_repository(tmp_path / "m")
    async with edge(models, "mqtt://broker.invalid", tmp_path / "state") as app, aiohttp.ClientSession() as session:
        x = np.array(UNSURE, np.float32)
        request = InferRequest("kinds", (array_to_tensor("x", x, Datatype.FP32),), id="g-1")
        async with grpc.aio.insecure_channel(app.addresses["grpc"]) as channel:
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", None, None)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await infer(message_from_request(request).SerializeToString())
        trailers = {str(key): str(value) for key, value in refused.value.trailing_metadata() or ()}

        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert trailers["tidegate-code"] == "deferred"
        status, _, told = await get(session, f"{app.addresses['http']}/v2/tickets/{trailers['tidegate-ticket']}")
        assert (status, told["state"]) == (202, "waiting")


async def test_a_device_that_has_no_network_at_all_starts_answers_and_says_that_it_is_isolated(tmp_path: Path) -> None:
    models = kinds_repository(tmp_path / "m", unsure="accept")
    unroutable = "mqtt://192.0.2.1:1883"
    async with edge(models, unroutable, tmp_path / "state") as app, aiohttp.ClientSession() as session:
        assert (await ask(session, app.addresses["http"], SURE))[0] == 200
        _, _, state = await get(session, f"{app.addresses['http']}/v1/state")

        assert (state["mode"], state["ready"]) == ("isolated", True)
        assert state["store"]["unavailable"] == ""
        assert [model["name"] for model in state["models"]] == ["kinds"]


async def test_a_device_whose_store_cannot_be_written_refuses_tickets_and_answers_all_else(tmp_path: Path) -> None:
    models = kinds_repository(tmp_path / "m")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "store.db").mkdir()  # no file can ever be there
    async with edge(models, "mqtt://broker.invalid", tmp_path / "state") as app, aiohttp.ClientSession() as session:
        sure, unsure = [await ask(session, app.addresses["http"], x) for x in (SURE, UNSURE)]

        assert sure[0] == 200
        assert (unsure[0], unsure[2]["code"]) == (429, "overloaded")
        assert "it cannot be deferred" in unsure[2]["error"]
        _, _, state = await get(session, f"{app.addresses['http']}/v1/state")
        assert state["store"]["refused"] == {"unavailable": 1}


async def test_without_a_broker_nothing_is_deferred_and_the_refusal_names_the_key(tmp_path: Path) -> None:
    models = kinds_repository(tmp_path / "m")
    async with edge(models, None, tmp_path / "state") as app, aiohttp.ClientSession() as session:
        status, _, answer = await ask(session, app.addresses["http"], UNSURE)

        assert (status, answer["code"]) == (501, "not_supported")
        assert "key 'mqtt'" in answer["error"]
        assert not (tmp_path / "state" / "store.db").exists()


async def test_a_gateway_gets_unsure_answers_as_they_are_over_any_transport(tmp_path: Path) -> None:
    models = kinds_repository(tmp_path / "m", unsure="reject")
    async with edge(models, None, tmp_path / "state") as app, aiohttp.ClientSession() as session:
        status, _, _ = await ask(session, app.addresses["http"], UNSURE, **{"tidegate-hop": "gateway"})

        assert status == 200
        _, _, state = await get(session, f"{app.addresses['http']}/v1/state")
        assert state["mode"] in ("cloud-lost", "online")  # by the next look, and only after it held for a while


async def test_results_of_hours_alone_reach_the_gateways_records_in_order_and_the_mode_follows(
    tmp_path: Path, broker: Mosquitto
) -> None:
    models = kinds_repository(tmp_path / "m", unsure="accept")
    store = {"forward_results": "all"}
    async with edge(models, broker.url, tmp_path / "s", store=store) as app, aiohttp.ClientSession() as session:
        for number in range(20):
            assert (await ask(session, app.addresses["http"], SURE, id=f"r-{number}"))[0] == 200
        async with gateway(models, broker.url, tmp_path) as g:

            async def records() -> Any:
                _, _, found = await get(session, f"{g.addresses['admin']}/v1/ingested?limit=1000")
                return found["records"] if sum(one["kind"] == "result" for one in found["records"]) == 20 else None

            kept = [one for one in await eventually(records) if one["kind"] == "result"]
            assert all(one["historical"] and one["device"] == "kiosk" for one in kept)
            assert [one["response"]["id"] for one in kept] == [f"r-{number}" for number in range(20)]
            assert kept[0]["response"]["outputs"][0]["name"] == "scores"
            await eventually(lambda: app.offline.mode == "online")

            assert await eventually(lambda: _nothing_waits(app))
            await eventually(lambda: _modes(session, g, ["online"]))

            broker.kill()
            await eventually(lambda: app.offline.mode == "control-lost")
            await eventually(lambda: _modes(session, g, ["control-lost"]))
            assert (await ask(session, g.addresses["http"], SURE))[0] == 200  # over the link, as if nothing were


async def _modes(session: aiohttp.ClientSession, g: Gateway, wanted: list[str]) -> bool:
    _, _, state = await get(session, f"{g.addresses['admin']}/v1/state")
    return [one["mode"] for one in state["targets"]] == wanted


async def _nothing_waits(app: EdgeApp) -> bool:
    assert app.offline.store is not None
    return not await app.offline.store.waiting(10)


async def test_what_a_device_keeps_is_told_with_its_heartbeat(tmp_path: Path, broker: Mosquitto) -> None:
    models = kinds_repository(tmp_path / "m")
    async with edge(models, broker.url, tmp_path / "s") as app, aiohttp.ClientSession() as session:
        assert (await ask(session, app.addresses["http"], UNSURE))[0] == 202
        async with gateway(models, broker.url, tmp_path, ingest=None) as g:  # which takes nothing

            async def shown() -> Any:
                _, _, state = await get(session, f"{g.addresses['admin']}/v1/state")
                return [one["kept"] for one in state["targets"] if one["kept"] >= 1]

            assert await eventually(shown)
