"""The scaling signal of a running gateway: what its endpoint says, when, and which refusals count."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import urlsplit

import yaml
from aiohttp.test_utils import make_mocked_request
from aiohttp.web import Request, Response

from gateway.core.admission.admission import Admission
from gateway.core.fleet.scaling import ReplicaScaler, ScalingSpec
from gateway.observe.scaling import LOOK_S, ScalingWatch, scaling_families
from tests.support.gateway.doors import admission_of
from tests.support.gateway.fleets import NOW, fleet_of, variant
from tests.support.loop import VirtualTimeLoop
from tidegate import clock


def recorded_rules() -> list[dict[str, str]]:
    groups = yaml.safe_load((DEPLOY.parent / "prometheus" / "tidegate-rules.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if "record" in rule]


def watch_of(admission: Admission) -> ScalingWatch:
    fleet = fleet_of(pool_a=variant())
    fleet.scaling = ReplicaScaler(ScalingSpec(scale_down_s=0.0))
    return ScalingWatch(fleet, admission, fleet.scaling)


async def asked(watch: ScalingWatch) -> tuple[int, dict[str, object]]:
    (route,) = watch.routes()
    request: Request = make_mocked_request("GET", route.path)
    response = await route.handler(request)  # type: ignore[arg-type,misc]
    assert isinstance(response, Response)
    return response.status, json.loads(response.text or "")


def busy(watch: ScalingWatch, seconds: int, a_second: int) -> float:
    now = NOW
    for second in range(seconds):
        now = NOW + second
        for number in range(a_second):
            watch.scaling.arrived(0.030, 0.010, 0.5, now + number / a_second)
        if second % 5 == 0:
            watch.look(now)
    return now


async def test_until_it_knows_the_need_the_endpoint_says_so_with_503_and_the_metric_is_absent() -> None:
    watch = watch_of(admission_of(4))
    busy(watch, 30, 50)
    status, told = await asked(watch)
    assert (status, told["known"]) == (503, False)
    assert scaling_families(watch.scaling) == []


async def test_the_endpoint_and_the_metric_tell_the_same_need() -> None:
    watch = watch_of(admission_of(4))
    busy(watch, 200, 200)
    status, told = await asked(watch)
    assert status == 200
    assert told["pool_replicas_needed"] == watch.scaling.needed.replicas
    replicas, *terms, load = scaling_families(watch.scaling)
    assert [one.samples[0].value for one in terms] == list(watch.scaling.needed.terms)
    assert [one.name for one in terms] == [
        f"tidegate_pool_demand_{name}" for name in ("replicas", "variance", "backlog")
    ]
    assert [sample.value for sample in replicas.samples] == [watch.scaling.needed.replicas]
    assert replicas.name == "tidegate_pool_replicas_needed"
    assert load.name == "tidegate_pool_load"
    assert scaling_families(None) == []


def test_requests_refused_for_lack_of_room_are_load_and_those_over_a_tenants_limit_are_not() -> None:
    loads = []
    for reason in ("over-budget", "shed"):
        admission = admission_of(4)
        watch = watch_of(admission)
        now = busy(watch, 100, 50)
        for second in range(20):
            admission.refused[reason] += 500  # type: ignore[index]
            watch.look(now + 1.0 + second)
        loads.append(watch.scaling.needed.load)
    assert loads[1] > 2.0 * loads[0]


def test_it_looks_by_itself_for_as_long_as_it_is_entered() -> None:
    async def lived() -> list[float]:
        looked: list[float] = []
        watch = watch_of(admission_of(4))
        watch.look = looked.append  # type: ignore[method-assign]
        async with watch:
            await clock.sleep(3.5 * LOOK_S)
        await clock.sleep(3.5 * LOOK_S)
        return looked

    loop = VirtualTimeLoop()
    try:
        assert len(loop.run_until_complete(lived())) == 3
    finally:
        loop.close()


DEPLOY = Path(__file__).parents[3] / "deploy/kubernetes"


async def test_the_manifest_for_keda_reads_what_the_endpoint_says() -> None:
    scaled = yaml.safe_load((DEPLOY / "pool-keda.yaml").read_text())
    (trigger,) = scaled["spec"]["triggers"]
    watch = watch_of(admission_of(4))
    (route,) = watch.routes()
    assert urlsplit(trigger["metadata"]["url"]).path == route.path
    _, told = await asked(watch)
    assert isinstance(told[trigger["metadata"]["valueLocation"]], int)
    assert float(trigger["metadata"]["targetValue"]) == 1.0
    assert "fallback" not in scaled["spec"]


def test_the_manifest_for_an_hpa_reads_the_metric() -> None:
    scaler, adapter = yaml.safe_load_all((DEPLOY / "pool-hpa.yaml").read_text())
    watch = watch_of(admission_of(4))
    busy(watch, 100, 50)
    names = {family.name for family in scaling_families(watch.scaling)}
    (metric,) = scaler["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] in names
    (rule,) = yaml.safe_load(adapter["data"]["external.yaml"])["externalRules"]
    rules = {rule["record"]: rule["expr"] for rule in recorded_rules()}
    assert rule["seriesQuery"] in rules  # what several gateways need is added up from what each tells
    demand = rules["tidegate:pool_replicas_demand"]
    assert set(re.findall(r"tidegate_\w+", demand)) == {name for name in names if "demand" in name}
    assert "tidegate:pool_replicas_demand" in rules[rule["seriesQuery"]]
    assert rule["name"]["as"] == metric["external"]["metric"]["name"]
