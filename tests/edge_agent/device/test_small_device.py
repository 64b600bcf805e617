"""A small device's settings on real workers: priority, control group, heat, and costs that outlive a restart."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import msgspec
import pytest

from edge_agent.app import EdgeApp
from edge_agent.config import EdgeConfig
from edge_agent.device.sensors import Sensors
from edge_agent.device.worker_priority import worker_starter
from tests.support.edge.rollouts import eventually
from tests.support.models.tiny_models import tiny_repository
from tidegate import clock
from tidegate.config import load
from tidegate.models.manifest import Manifest, Variant
from tidegate.outcome import Overloaded
from tidegate.runtime.process import StartError
from tidegate.types import Call, Datatype, InferRequest, Tensor
from tidegate.workers.warming.measured_costs import MOST, MeasuredCosts

PLAIN: Final[Manifest] = cast(Any, SimpleNamespace(digest_of=lambda variant: variant.sha256))  # without steps

pytestmark = pytest.mark.slow

Points = tuple[tuple[float, float], ...]


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    return {
        "name": "kiosk-1",
        "grpc_port": 0,
        "http_port": None,
        "model_repository": tiny_repository(tmp_path / "models"),
        "models": ["double"],
        "state_dir": tmp_path / "state",
        "warmup_budget_s": 0.5,
    }


def costs_of(app: EdgeApp) -> list[Points]:
    return [tuple(variant.cost) for offer in app.host.offers() for variant in offer.variants]


async def test_a_restart_knows_what_the_model_cost_and_another_setting_measures_again(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    async with EdgeApp(load(EdgeConfig, **keys)) as app:
        first = costs_of(app)
    file = tmp_path / "state" / "costs.json"
    known = msgspec.json.decode(file.read_bytes(), type=dict[str, Points])
    assert list(known.values()) == first

    told = dict.fromkeys(known, ((1.0, 0.125), (4.0, 0.5)))
    file.write_bytes(msgspec.json.encode(told))
    async with EdgeApp(load(EdgeConfig, **keys)) as app:
        assert costs_of(app) == list(told.values())
    async with EdgeApp(load(EdgeConfig, **keys, threads=2)) as app:
        assert costs_of(app) != list(told.values())
    async with EdgeApp(load(EdgeConfig, **keys, remember_costs=False)) as app:
        assert costs_of(app) != list(told.values())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 100,
        b"[1]",
        b'{"x": [[1, -1]]}',
        b'{"x": []}',
        b'{"x": [[1e999, 1]]}',
        b"[" * 10**6,
        b'{"\xff": [[1, 1]]}',
    ],
)
async def test_a_damaged_file_of_costs_is_as_good_as_none(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_bytes(content)
    calls: list[str] = []

    async def measure(_worker: Any, _key: str, _manifest: Manifest, _variant: Variant) -> Points:
        calls.append("measured")
        return ((1.0, 0.5),)

    async def warm(*_: Any) -> None:
        calls.append("warmed")

    variant = Variant("int8", "x.onnx", "onnx", "int8", ("edge",), "ab" * 32, 1)
    for _ in range(2):
        points = await MeasuredCosts(file, settings="").remembered(measure, warm)(cast(Any, None), "", PLAIN, variant)
        assert points == ((1.0, 0.5),)
    assert calls == ["measured", "warmed"]


async def test_costs_are_bounded_and_a_full_disk_only_measures_again(tmp_path: Path) -> None:
    async def measure(*_: Any) -> Points:
        return ((1.0, 0.5),)

    async def warm(*_: Any) -> None: ...

    measured = MeasuredCosts(tmp_path / "costs.json", settings="").remembered(measure, warm)
    for number in range(MOST + 5):
        variant = Variant("int8", "x.onnx", "onnx", "int8", ("edge",), f"{number:064x}", 1)
        await measured(cast(Any, None), "", PLAIN, variant)
    assert len(msgspec.json.decode((tmp_path / "costs.json").read_bytes())) == MOST

    (tmp_path / "file").write_text("in the way")
    nowhere = MeasuredCosts(tmp_path / "file" / "costs.json", settings="").remembered(measure, warm)
    assert await nowhere(cast(Any, None), "", PLAIN, variant) == ((1.0, 0.5),)


async def test_workers_step_back_and_are_put_where_they_are_told(tmp_path: Path) -> None:
    group = tmp_path / "group"
    group.mkdir()
    (group / "cgroup.procs").touch()

    own = os.getpriority(os.PRIO_PROCESS, 0)
    async with worker_starter(nice=7, cgroup=group)("a") as worker:
        assert worker.pid is not None
        assert os.getpriority(os.PRIO_PROCESS, worker.pid) == 7
        assert (group / "cgroup.procs").read_text() == f"{worker.pid}\n"
        assert os.getpriority(os.PRIO_PROCESS, 0) == own, "the agent itself does not"


def test_a_control_group_that_is_not_there_is_named_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"key 'cgroup': .*cgroup\.procs cannot be written"):
        worker_starter(nice=0, cgroup=tmp_path / "nothing")


async def test_a_device_that_is_too_hot_says_so_and_goes_on_when_it_has_cooled(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_agent.app.Sensors", partial(Sensors, poll_s=0.01))
    zone = tmp_path / "class" / "thermal" / "thermal_zone0"
    zone.mkdir(parents=True)
    (zone / "type").write_text("cpu-thermal\n")
    (zone / "temp").write_text("81000\n")
    async with EdgeApp(load(EdgeConfig, **keys, sensors=tmp_path / "class", max_temperature_c=80.0)) as app:
        assert app.state().admission == "closed"
        request = InferRequest("double", (Tensor("x", Datatype.FP32, (1, 1), b"\0\0\0\0"),))
        with pytest.raises(Overloaded, match="it is at 81 °C"):
            await app.host.infer(Call(request=request, protocol="test", arrived_at=clock.now(), deadline=None))

        (zone / "temp").write_text("74000\n")
        await eventually(lambda: app.state().conditions.temperature_c == 74.0)

        assert app.state().admission == "open"
        await app.host.infer(Call(request=request, protocol="test", arrived_at=clock.now(), deadline=None))
