"""A whole edge agent that asks a whole gateway for help: real ONNX workers, real links, unmodified HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import pytest

from edge_agent.app import EdgeApp
from edge_agent.config import EdgeConfig
from edge_agent.help.helping_host import joint_refusal
from gateway.app import Gateway
from gateway.config.gateway import GatewayConfig
from tests.edge_agent.test_app import eventually
from tests.support.gateway.processes import GatewayProcesses
from tests.support.models.talking import talker_repository
from tests.support.models.tiny_models import FOREVER, tiny_repository
from tests.support.models.unsure_model import SURE, UNSURE, better_repository, kinds_repository
from tidegate import clock
from tidegate.config import ConfigError, load
from tidegate.outcome import (
    DeadlineExceeded,
    Forbidden,
    ModelNotFound,
    NothingAlive,
    NotSupported,
    Overloaded,
    ServeError,
    Unreachable,
)
from tidegate.runtime.owned_task import cancel_and_wait
from tidegate.testing.ports import free_port
from tidegate.tools.build.demo.paced import PacedCosts, add_paced

pytestmark = pytest.mark.slow


class Site(NamedTuple):
    """A device that asks, its gateway, and another device that stands in for a pool."""

    device: EdgeApp
    gateway: Gateway
    server: EdgeApp
    session: aiohttp.ClientSession

    async def ask(self, model: str, inputs: list[dict[str, Any]], **headers: str) -> tuple[int, Any, Any]:
        url = f"{self.device.addresses['http']}/v2/models/{model}/infer"
        said = {"tidegate-budget-ms": "30000", **headers}
        async with self.session.post(url, json={"inputs": inputs}, headers=said) as answer:
            return answer.status, answer.headers, await answer.json()


def edge(name: str, models: Path, folder: Path, **keys: Any) -> EdgeApp:
    where: dict[str, Any] = {
        "grpc_port": 0,
        "http_port": 0,
        "model_repository": models,
        "state_dir": folder / name,
    }
    return EdgeApp(load(EdgeConfig, name=name, **(where | {"warmup_budget_s": 0.2} | keys)), draw=lambda: 0.1)


@asynccontextmanager
async def site(folder: Path, models: Path, better: Path, **keys: Any) -> AsyncIterator[Site]:
    """Args: models: of the device and the gateway; better: of the other device; keys: of the device."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        server = await enter(edge("server", better, folder))
        ports: dict[str, Any] = dict.fromkeys(("http_port", "grpc_port", "metrics_port", "admin_port"), 0)
        target = {"name": "server", "tier": "edge", "address": server.addresses["grpc"]}
        help = {"devices": [{"name": "kiosk", "tenant": "shop"}]}
        config = load(
            GatewayConfig, model_repository=models, targets=[target], link_port=free_port(), help=help, **ports
        )
        gateway = await enter(Gateway(config, draw=lambda: 0.1))
        own = {"gateways": [gateway.addresses["link"]], "dial_out": "always", "help": {}, **keys}
        device = await enter(edge("kiosk", models, folder, **own))
        session = await enter(aiohttp.ClientSession())
        await eventually(lambda: gateway.host.ready() and f"edge/{device.config.name}" in gateway.fleet.targets)
        running = Site(device, gateway, server, session)
        await eventually(lambda: device.help is not None and device.help.up)
        yield running


def x(rows: list[list[float]]) -> list[dict[str, Any]]:
    return [{"name": "x", "datatype": "FP32", "shape": [len(rows), len(rows[0])], "data": rows}]


def rounds(number: int) -> list[dict[str, Any]]:
    return [{"name": "rounds", "datatype": "INT64", "shape": [1], "data": [number]}]


async def test_an_unsure_answer_is_made_better_by_a_gateway_and_a_pinned_one_stays(tmp_path: Path) -> None:
    models, better = kinds_repository(tmp_path / "m", unsure="reject"), better_repository(tmp_path / "b")
    async with site(tmp_path, models, better) as running:
        status, said, answer = await running.ask("kinds", x(UNSURE))
        assert (status, said["tidegate-served-by"]) == (200, "edge/server"), answer
        assert "because=unsure" in said["tidegate-helped-by"]
        assert np.argmax(answer["outputs"][0]["data"]) == 3

        sure = await running.ask("kinds", x(SURE))
        assert sure[1]["tidegate-served-by"] == "edge/kiosk"
        pinned = await running.ask("kinds", x(UNSURE), **{"tidegate-pin": "edge"})
        assert (pinned[0], pinned[1]["tidegate-served-by"]) == (200, "edge/kiosk")
        assert "provisional=1" in pinned[1]["tidegate-route"]

        await running.server.__aexit__()
        lost = await running.ask("kinds", x(UNSURE))
        assert lost[0] == 503  # as without help: the model's policy rejects


async def test_the_keeper_of_several_processes_helps_and_the_device_survives_its_death(tmp_path: Path) -> None:
    models, better = kinds_repository(tmp_path / "m", unsure="reject"), better_repository(tmp_path / "b")
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(edge("server", better, tmp_path))
        port = free_port()
        gateway = await stack.enter_async_context(
            GatewayProcesses(
                tmp_path,
                model_repository=str(models),
                targets=[{"name": "server", "tier": "edge", "address": server.addresses["grpc"]}],
                link_port=port,
                help={"devices": [{"name": "kiosk", "tenant": "shop"}]},
            )
        )
        own = {"gateways": [f"127.0.0.1:{port}"], "dial_out": "always", "help": {}}
        device = await stack.enter_async_context(edge("kiosk", models, tmp_path, **own))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        url = f"{device.addresses['http']}/v2/models/kinds/infer"

        async def served_by() -> str:
            said = {"tidegate-budget-ms": "10000"}
            async with session.post(url, json={"inputs": x(UNSURE)}, headers=said) as answer:
                await answer.read()
                return answer.headers.get("tidegate-served-by", str(answer.status))

        async def until_helped() -> None:
            async with asyncio.timeout(60.0):
                while await served_by() != "edge/server":
                    await clock.sleep(0.1)

        await until_helped()
        assert [one["device"] for one in (await gateway.state(session))["help"]] == ["edge/kiosk"]

        keeper = (await gateway.members(session))["keeper"]["pid"]
        os.kill(keeper, signal.SIGKILL)
        assert await served_by() == "503"  # as without a gateway: the model's policy rejects
        await gateway.until_members(session, keeper=keeper)
        await until_helped()


async def test_what_the_queue_here_holds_up_is_answered_elsewhere_in_time(tmp_path: Path) -> None:
    models = tiny_repository(tmp_path / "m")
    async with site(tmp_path, models, models) as running:
        pinned = {"tidegate-pin": "edge", "tidegate-budget-ms": "60000"}
        hog = asyncio.create_task(running.ask("rounds", rounds(FOREVER), **pinned))  # it has the one slot for good
        await eventually(lambda: running.device.host.busy)

        status, said, answer = await running.ask("double", x([[1.0, 2.0]]), **{"tidegate-budget-ms": "4000"})

        assert (status, said.get("tidegate-served-by")) == (200, "edge/server"), answer
        assert "because=late" in said["tidegate-helped-by"]
        assert answer["outputs"][0]["data"] == [2.0, 4.0]
        assert running.device.host.load_report().queued == 0  # it waits no more
        hog.cancel()
        with suppress(asyncio.CancelledError):
            await hog


async def test_what_is_predicted_late_in_the_queue_here_is_asked_elsewhere_before_it_waits(tmp_path: Path) -> None:
    models, quick = tmp_path / "m", tmp_path / "q"
    add_paced("encoder", PacedCosts(edge_ms=((1, 600),)), models)
    add_paced("encoder", PacedCosts(edge_ms=((1, 5),)), quick)
    inputs = [
        {"name": name, "shape": [1, 3], "datatype": "INT64", "data": [1, 1, 1]}
        for name in ("input_ids", "attention_mask")
    ]
    async with site(tmp_path, models, quick) as running:
        # Ten take six seconds, so that the last of them, and all with a later deadline, are late here.
        before = {"tidegate-pin": "edge", "tidegate-budget-ms": "5000"}
        waiting = [asyncio.create_task(running.ask("encoder", inputs, **before)) for _ in range(10)]
        await eventually(lambda: running.device.host.load_report().queued >= 9)

        status, said, answer = await running.ask("encoder", inputs, **{"tidegate-budget-ms": "5000"})

        assert (status, said.get("tidegate-served-by")) == (200, "edge/server"), answer
        assert "because=late" in said["tidegate-helped-by"]
        await cancel_and_wait(*waiting)


async def test_tokens_come_through_a_gateway_as_they_are_made(tmp_path: Path) -> None:
    models = talker_repository(tmp_path / "m", step_ms=5.0)
    async with site(tmp_path, models, models) as running:
        running.device.host.drain()  # it takes nothing itself, and its callers can still ask
        url = f"{running.device.addresses['http']}/v2/models/talker/generate_stream"
        body = {"input_ids": [5, 6, 7], "parameters": {"max_tokens": 8}}
        async with running.session.post(url, json=body, headers={"tidegate-budget-ms": "30000"}) as answer:
            events = [line async for line in answer.content if line.startswith(b"data:")]
            assert answer.status == 200
            assert answer.headers["tidegate-served-by"] == "gateway/main"
            assert answer.headers["tidegate-route"].startswith("helped; ")
        assert len(events) > 2
        assert json.loads(events[-1].removeprefix(b"data:"))["completion_tokens"] == 8


async def test_the_gateway_is_shown_the_credential_of_the_caller_and_no_log_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = tiny_repository(tmp_path / "m")
    async with site(tmp_path, models, models) as running:
        wide = x([[1.0] * 40])  # the server is as small: nobody takes it
        status, _, answer = await running.ask("double", wide, authorization="Bearer tg_secret-of-a-caller")
        assert (status, answer["code"]) == (503, "nothing_alive"), answer
        assert "a gateway was asked" in answer["error"]
    told = capsys.readouterr()
    assert "tg_secret-of-a-caller" not in told.out + told.err


@pytest.mark.parametrize(
    ("own", "gateways", "kind", "again_s"),
    [
        (NotSupported("a"), Unreachable("b"), NothingAlive, 1.0),
        (ModelNotFound("a"), Overloaded("b", retry_after_s=3.0), Overloaded, 3.0),
        (NotSupported("a"), DeadlineExceeded("b"), DeadlineExceeded, None),
        (NotSupported("a"), Forbidden("b"), NotSupported, None),
        (Overloaded("a", retry_after_s=0.5), Unreachable("b"), Overloaded, 0.5),
        (DeadlineExceeded("a"), Overloaded("b"), DeadlineExceeded, None),
    ],
)
def test_two_refusals_are_one_that_says_whether_to_try_again(
    own: ServeError, gateways: ServeError, kind: type[ServeError], again_s: float | None
) -> None:
    one = joint_refusal(own, gateways)
    assert type(one) is kind
    assert one.message == "a; a gateway was asked: b"
    assert one.retry_after_s == again_s


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"help": {}}, "help needs a gateway to ask"),
        ({"help": {}, "gateways": ["gw:1"], "dial_out": "never"}, "dial_out: never forbids it"),
        ({"help": {"model": ["*"]}, "gateways": ["gw:1"]}, "did you mean 'help.models'"),
        ({"help": {"max_in_flight": 0}, "gateways": ["gw:1"]}, "max_in_flight"),
    ],
)
def test_a_configuration_that_cannot_help_is_refused_in_words(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(EdgeConfig, **keys)
