"""A whole edge agent: real sockets, real ONNX Runtime workers, unmodified clients, and a gateway's link."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc.aio as triton_grpc
import tritonclient.http.aio as triton_http

from edge_agent.app import EdgeApp
from edge_agent.config import EdgeConfig
from gateway.core.fleet.link_events import LinkEvent, LinkLoad, LinkUp
from gateway.targets.link import LinkTarget
from tests.support.models.tiny_models import FOREVER, tiny_repository
from tests.support.processes import has_ended
from tidegate import clock
from tidegate.arrays import array_to_tensor, tensor_to_array
from tidegate.config import load
from tidegate.outcome import NotSupported, Overloaded, Unreachable
from tidegate.runtime.process import StartError
from tidegate.types import Accepted, Datatype, InferRequest, Reply
from tidegate.workers import sandbox_check

pytestmark = pytest.mark.slow
BUDGET_S = 60.0


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tiny_repository(tmp_path / "models")


def config(repository: Path, **keys: Any) -> EdgeConfig:
    where = {"grpc_port": 0, "http_port": 0, "model_repository": repository, "state_dir": repository.parent / "state"}
    return load(EdgeConfig, name="kiosk-1", **(where | {"warmup_budget_s": 0.5} | keys))


@asynccontextmanager
async def edge(repository: Path, **keys: Any) -> AsyncIterator[EdgeApp]:
    async with EdgeApp(config(repository, **keys), draw=lambda: 0.1) as app:
        yield app


@asynccontextmanager
async def link_to(app: EdgeApp, told: list[LinkEvent]) -> AsyncIterator[LinkTarget]:
    target = LinkTarget(
        "edge/kiosk-1", app.addresses["grpc"], gateway_name="test", on_event=told.append, draw=lambda: 0.1
    )
    async with target:
        await eventually(lambda: target.connected)
        yield target


async def eventually(what: Callable[[], bool]) -> None:
    """Wait for something that another process or socket is about to do."""
    async with asyncio.timeout(30.0):
        while not what():
            await clock.sleep(0.002)


async def overdue(app: EdgeApp) -> None:
    """Wait until its one call takes longer than was thought: what comes then waits in the queue, and not behind it."""
    await eventually(lambda: app.host.load_report().in_flight == 1)
    await clock.sleep(0.1)


def rounds(number: int) -> InferRequest:
    tensor = array_to_tensor("rounds", np.array([number]), Datatype.INT64)
    return InferRequest("rounds", (tensor,))


def double(*shape: int) -> InferRequest:
    return InferRequest("double", (array_to_tensor("x", np.ones(shape, dtype=np.float32), Datatype.FP32),))


async def over(target: LinkTarget, request: InferRequest, *, budget_s: float = BUDGET_S) -> Reply:
    return await target.infer(
        request, variant="", budget_s=budget_s, priority=0, traceparent="", on_accepted=lambda _: None
    )


def worker_of(app: EdgeApp) -> psutil.Process:
    """The one worker process of an app with one model."""
    (worker,) = [child for child in psutil.Process().children() if "tidegate.workers.child" in child.cmdline()]
    return worker


# --- answers -------------------------------------------------------------------------------------------------------


async def test_unmodified_clients_are_answered_over_grpc_and_http(models: Path) -> None:
    x = np.array([[1.0, -2.0, 3.5]], dtype=np.float32)
    async with edge(models) as app:
        async with triton_grpc.InferenceServerClient(app.addresses["grpc"]) as client:
            assert await client.is_server_ready()
            wanted = triton_grpc.InferInput("x", x.shape, "FP32").set_data_from_numpy(x)
            by_grpc = await client.infer("double", [wanted])
        async with triton_http.InferenceServerClient(app.addresses["http"].removeprefix("http://")) as client:
            assert await client.is_model_ready("double")
            tensor = triton_http.InferInput("x", list(x.shape), "FP32").set_data_from_numpy(x)
            by_http = await client.infer("double", [tensor])

        for answer in (by_grpc, by_http):
            np.testing.assert_array_equal(answer.as_numpy("y"), 2 * x)
        served_by = by_grpc.get_response().parameters["tidegate-served-by"].string_param
        assert served_by == "edge/kiosk-1"
        assert app.ready_event() == {
            "role": "edge",
            "name": "kiosk-1",
            "addresses": app.addresses,
            "models": [
                {"name": "double", "version": "1", "variants": ["int8"]},
                {"name": "rounds", "version": "1", "variants": ["int8"]},
            ],
        }


async def test_a_gateway_learns_offers_with_measured_costs_and_the_load_with_every_answer(models: Path) -> None:
    told: list[LinkEvent] = []
    async with edge(models, models=["double"]) as app, link_to(app, told) as target:
        heard: list[Accepted] = []

        reply = await target.infer(
            double(1, 3), variant="int8", budget_s=5.0, priority=1, traceparent="", on_accepted=heard.append
        )

        up = next(event for event in told if isinstance(event, LinkUp))
        (offer,) = up.offers
        (variant,) = offer.variants
        assert (up.name, up.epoch) == ("edge/kiosk-1", app.host.load_report().epoch)
        assert (offer.name, offer.state, variant.name) == ("double", "ready", "int8")
        assert len(variant.cost) >= 3
        assert all(0 < seconds < 30 for _, seconds in variant.cost)
        np.testing.assert_array_equal(tensor_to_array(reply.response.outputs[0]), np.full((1, 3), 2.0))
        assert heard[0].queue_ahead == 0
        assert reply.load is not None
        assert set(reply.stages) >= {"queue", "compute"}


async def test_the_fleet_is_told_what_the_agent_and_its_workers_hold(models: Path) -> None:
    async with edge(models, models=["double"]) as app:
        await eventually(lambda: app.state().conditions.memory_bytes is not None)
        told = app.state().conditions
        assert told.memory_bytes is not None
        assert told.memory_limit_bytes is not None
        assert 5 * 2**20 < told.memory_bytes < told.memory_limit_bytes


# --- bounds --------------------------------------------------------------------------------------------------------


async def test_a_cancelled_call_frees_its_place_in_the_queue(models: Path) -> None:
    async with edge(models, models=["rounds"], max_queue_size=1) as app, link_to(app, []) as target:
        computing = asyncio.create_task(over(target, rounds(FOREVER)))
        await overdue(app)
        waiting = asyncio.create_task(over(target, rounds(0)))
        await eventually(lambda: app.host.load_report().queued == 1)
        with pytest.raises(Overloaded) as refused:
            await over(target, rounds(0))
        assert refused.value.retry_after_s is not None

        waiting.cancel()

        await eventually(lambda: app.host.load_report().queued == 0)
        computing.cancel()


async def test_a_full_queue_is_resource_exhausted_for_a_plain_client_with_a_time_to_come_back(models: Path) -> None:
    async with edge(models, models=["rounds"], max_queue_size=1) as app, link_to(app, []) as target:
        calls = [asyncio.create_task(over(target, rounds(FOREVER)))]
        await overdue(app)
        calls.append(asyncio.create_task(over(target, rounds(0))))
        await eventually(lambda: app.host.load_report().queued == 1)

        async with triton_grpc.InferenceServerClient(app.addresses["grpc"]) as client:
            tensor = triton_grpc.InferInput("rounds", [1], "INT64").set_data_from_numpy(np.array([0]))
            with pytest.raises(triton_grpc.InferenceServerException) as refused:  # type: ignore[attr-defined]
                await client.infer("rounds", [tensor])

        assert refused.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
        for call in calls:
            call.cancel()


async def test_what_waits_beyond_its_budget_is_refused_in_time_while_the_worker_is_busy(models: Path) -> None:
    async with edge(models, models=["rounds"]) as app, link_to(app, []) as target:
        computing = asyncio.create_task(over(target, rounds(FOREVER)))
        await overdue(app)
        began_at = clock.now()

        async with triton_grpc.InferenceServerClient(app.addresses["grpc"]) as client:
            tensor = triton_grpc.InferInput("rounds", [1], "INT64").set_data_from_numpy(np.array([0]))
            with pytest.raises(triton_grpc.InferenceServerException) as refused:  # type: ignore[attr-defined]
                await client.infer("rounds", [tensor], headers={"tidegate-budget-ms": "100"})

        assert refused.value.status() == "StatusCode.DEADLINE_EXCEEDED"
        assert 0.05 < clock.now() - began_at < 30.0  # the computation takes minutes
        computing.cancel()


async def test_work_beyond_the_variants_limit_is_not_supported(models: Path) -> None:
    async with edge(models, models=["double"]) as app, link_to(app, []) as target:
        with pytest.raises(NotSupported, match=r"5 rows, but int8 takes at most 4 \(max_batch\)"):
            await over(target, double(5, 3))


# --- trouble -------------------------------------------------------------------------------------------------------


async def test_a_worker_killed_in_the_middle_of_a_call_fails_it_at_once_and_the_next_is_answered(models: Path) -> None:
    told: list[LinkEvent] = []
    async with edge(models, models=["rounds"]) as app, link_to(app, told) as target:
        calls = [asyncio.create_task(over(target, rounds(FOREVER)))]
        await overdue(app)
        calls.append(asyncio.create_task(over(target, rounds(FOREVER))))
        await eventually(lambda: app.host.load_report().queued == 1)
        worker = worker_of(app)

        worker.send_signal(signal.SIGKILL)
        killed_at = clock.now()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)

        assert [type(outcome) for outcome in outcomes] == [Unreachable, Unreachable]
        assert clock.now() - killed_at < 25.0  # well before it would be taken for a worker that hangs
        await eventually(lambda: app.host.model_ready("rounds"))
        assert worker_of(app).pid != worker.pid
        reply = await over(target, rounds(1000))
        np.testing.assert_array_equal(tensor_to_array(reply.response.outputs[0]), [1000])
        states = [event.offers[0].state for event in told if isinstance(event, LinkLoad) and event.offers]
        assert states == ["loading", "ready"]


async def test_short_calls_that_come_together_are_all_answered_and_a_killed_worker_fails_all_of_them(
    models: Path,
) -> None:
    async with edge(models, models=["rounds"]) as app, link_to(app, []) as target:
        await over(target, rounds(0))
        replies = await asyncio.gather(*[over(target, rounds(number)) for number in range(40)])
        answered = [tensor_to_array(reply.response.outputs[0]).tolist() for reply in replies]
        assert answered == [[number] for number in range(40)]
        assert all(reply.stages["compute"] > 0.0 <= reply.stages["queue"] for reply in replies)

        calls = [asyncio.create_task(over(target, rounds(FOREVER))) for _ in range(8)]
        await eventually(lambda: app.host.load_report().queued + app.host.load_report().in_flight == 8)
        worker_of(app).send_signal(signal.SIGKILL)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [Unreachable] * 8
        await eventually(lambda: app.host.model_ready("rounds"))
        assert (await over(target, rounds(1))).response.outputs


async def test_a_hung_worker_is_replaced(models: Path) -> None:
    async with edge(models, models=["rounds"], hang_timeout_s=0.3) as app, link_to(app, []) as target:
        worker = worker_of(app)
        worker.send_signal(signal.SIGSTOP)

        with pytest.raises(Unreachable, match=r"hung for 0\.3 s"):
            await over(target, rounds(0))

        await eventually(lambda: has_ended(worker))
        await eventually(lambda: app.host.model_ready("rounds"))
        await over(target, rounds(0))


async def test_the_end_answers_what_is_under_way_and_leaves_no_worker(models: Path) -> None:
    told: list[LinkEvent] = []
    app = EdgeApp(config(models, models=["rounds"], drain_s=2.0))
    await app.__aenter__()
    worker = worker_of(app)
    async with link_to(app, told) as target:
        call = asyncio.create_task(over(target, rounds(200_000)))
        await eventually(lambda: app.host.load_report().in_flight == 1)

        await app.__aexit__(None, None, None)

        np.testing.assert_array_equal(tensor_to_array((await call).response.outputs[0]), [200_000])
        assert not target.connected
    assert not worker.is_running()


async def test_the_end_does_not_wait_for_ever(models: Path) -> None:
    app = EdgeApp(config(models, models=["rounds"], drain_s=0.2))
    await app.__aenter__()
    worker = worker_of(app)
    async with link_to(app, []) as target:
        call = asyncio.create_task(over(target, rounds(FOREVER)))
        await eventually(lambda: app.host.load_report().in_flight == 1)
        began_at = clock.now()

        await app.__aexit__(None, None, None)

        assert clock.now() - began_at < BUDGET_S - 5.0  # given up, not answered by its deadline
        with pytest.raises(Unreachable):
            await call
    assert not worker.is_running()


# --- starts that fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["grpc_port", "http_port"])
async def test_a_taken_port_ends_the_start_by_its_number_and_its_key(models: Path, key: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]

        with pytest.raises(StartError, match=rf"127\.0\.0\.1:{port} \(key '{key}'\): port {port} is taken"):
            async with edge(models, **{key: port}):
                pass


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"models": ["triple"]}, r"key 'models': there is no model 'triple'"),
        ({"mqtt": "broker.lan"}, r"key 'mqtt': 'broker\.lan' is not a broker's address"),
        ({"mqtt": "mqtt://broker.lan:1883", "host": "0.0.0.0"}, r"key 'advertise' is needed"),
        ({"state_dir": Path("/proc/nowhere")}, r"cannot write /proc/nowhere/epoch \(key 'state_dir'\)"),
        ({"host": "192.0.2.1"}, r"cannot listen on 192\.0\.2\.1:0 \(key 'grpc_port'\): Cannot assign"),
    ],
)
async def test_a_start_that_cannot_work_says_which_key_is_wrong(
    models: Path, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(StartError, match=message):
        async with edge(models, **keys):
            pass


async def test_a_repository_without_anything_for_an_edge_is_no_reason_to_wait(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()

    with pytest.raises(StartError, match="no model has a variant for edges"):
        async with edge(tmp_path / "empty"):
            pass


async def test_a_changed_artefact_is_refused_before_it_is_loaded(models: Path) -> None:
    artefact = models / "double" / "1" / "int8.onnx"
    artefact.write_bytes(artefact.read_bytes()[:-1] + b"!")

    with pytest.raises(StartError, match=r"int8\.onnx: has sha256"):
        async with edge(models, models=["double"]):
            pass


async def test_each_start_has_a_greater_epoch_than_the_one_before(models: Path) -> None:
    epochs = []
    for _ in range(2):
        async with edge(models, models=["double"], http_port=None) as app:
            epochs.append(app.host.load_report().epoch)
            assert set(app.addresses) == {"grpc"}

    assert epochs[1] > epochs[0]


async def test_an_edge_on_its_last_battery_finishes_what_it_has_and_takes_nothing_new(
    models: Path, tmp_path: Path
) -> None:
    battery = tmp_path / "class" / "power_supply" / "BAT0"
    battery.mkdir(parents=True)
    for name, text in {"type": "Battery", "status": "Discharging", "capacity": "12"}.items():
        (battery / name).write_text(text)
    async with edge(models, models=["double"], sensors=tmp_path / "class") as app, link_to(app, []) as target:
        with pytest.raises(Overloaded, match="its battery is at 12% and discharging, below min_battery 20%") as caught:
            await over(target, double(1, 3))
        assert caught.value.retry_after_s == 30.0
    spends_more = edge(models, models=["double"], sensors=tmp_path / "class", min_battery=0.1)
    async with spends_more as app, link_to(app, []) as target:
        assert (await over(target, double(1, 3))).variant == "int8"


async def test_gateways_are_told_what_the_workers_sandbox_lacks(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_check, "missing_here", lambda: ("files: Landlock ABI 3, here none",))
    told: list[LinkEvent] = []
    for mode, words in (("auto", "files: Landlock ABI 3, here none"), ("off", "the key `sandbox` is off")):
        async with edge(models, sandbox=mode) as app, link_to(app, told):
            assert {offer.sandbox for offer in app.host.offers()} == {words}
            up = next(event for event in reversed(told) if isinstance(event, LinkUp))
            assert {offer.sandbox for offer in up.offers} == {words}
