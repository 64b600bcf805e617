"""What other operators are given: monitors for Prometheus, a RayService for KubeRay, EdgeApplications for KubeEdge."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.support.operator.resources import MODEL, VOLUME, body, objects_of, one_of, stored
from tidegate.config import load
from tidegate.tools.config_cli import config_model
from tidegate.tools.operator.rendering.render import render

BROKER = {"mqtt": "mqtt://broker:1883"}
RAY: dict[str, Any] = {"redisAddress": "redis:6379"}
ASKED = {"enabled": True}


def ray_pool(**spec: Any) -> dict[str, Any]:
    models = {} if "models" in spec else {"modelsVolume": VOLUME}
    return body("TidegatePool", "gpus", **{**models, "config": BROKER, "ray": RAY, **spec})


def service(*others: dict[str, Any], **spec: Any) -> dict[str, Any]:
    (made,) = objects_of(ray_pool(**spec), *others)
    return made


def arguments(made: dict[str, Any]) -> dict[str, Any]:
    (application,) = yaml.safe_load(made["spec"]["serveConfigV2"])["applications"]
    found: dict[str, Any] = application["args"]
    return found


def cluster(made: dict[str, Any]) -> dict[str, Any]:
    """The Ray cluster, but for what KubeRay changes within it."""
    found = dict(made["spec"]["rayClusterConfig"])
    (workers,) = found["workerGroupSpecs"]
    found["workerGroupSpecs"] = [{key: one for key, one in workers.items() if key != "replicas"}]
    return found


@pytest.mark.parametrize(
    ("kind", "component"), [("TidegateGateway", "gateway"), ("TidegatePool", "pool"), ("TidegateFleet", "edge")]
)
def test_a_monitor_is_there_where_it_is_asked_for_and_finds_a_port(kind: str, component: str) -> None:
    fleet = kind == "TidegateFleet"
    own: dict[str, Any] = {"groups": [{"name": "a"}]} if fleet else {"modelsVolume": VOLUME}
    switch, made = ("podMonitor", "PodMonitor") if fleet else ("serviceMonitor", "ServiceMonitor")

    def monitors(**spec: Any) -> tuple[int, str]:
        rendered = render(stored(body(kind, "main", **own, **spec)), {})
        said = next(one for one in rendered.conditions if one.type == "Monitored")
        return sum(one["kind"] == made for one in rendered.objects), said.reason

    assert monitors() == (0, "NotAsked")
    assert monitors(**{switch: ASKED}) == (1, "Applied")
    for port in (0, None) if kind != "TidegateGateway" else (0,):
        assert monitors(**{switch: ASKED}, config={"metrics_port": port}) == (0, "NoMetrics")
    objects = objects_of(body(kind, "main", **own, **{switch: {**ASKED, "labels": {"release": "p"}, "interval": "1m"}}))
    monitor = one_of(objects, made)
    endpoint = monitor["spec"]["podMetricsEndpoints" if fleet else "endpoints"][0]
    assert monitor["metadata"]["labels"]["release"] == "p" and endpoint["interval"] == "1m"
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": f"tidegate-{component}"}]
    chosen = monitor["spec"]["selector"]["matchLabels"].items()
    if fleet:
        pod = one_of(objects, "DaemonSet")["spec"]["template"]
        found = [one for one in pod["spec"]["containers"][0]["ports"] if chosen <= pod["metadata"]["labels"].items()]
    else:
        services = [one for one in objects if one["kind"] == "Service" and chosen <= one["metadata"]["labels"].items()]
        found = [port for one in services for port in one["spec"]["ports"]]
    assert [one["name"] for one in found].count("metrics") == 1


def test_a_policy_lets_in_gateways_of_any_name_and_no_port_that_is_not_open() -> None:
    pool = one_of(objects_of(body("TidegatePool", "cores", modelsVolume=VOLUME)), "NetworkPolicy")["spec"]
    gateways = objects_of(body("TidegateGateway", "main", modelsVolume=VOLUME, config={"metrics_port": 0}))
    labels = one_of(gateways, "Deployment")["spec"]["template"]["metadata"]["labels"]
    (peer,) = pool["ingress"][0]["from"]

    assert peer["podSelector"]["matchLabels"].items() <= labels.items()
    assert not peer["podSelector"]["matchLabels"].items() <= pool["podSelector"]["matchLabels"].items(), "no pool's"
    rules = one_of(gateways, "NetworkPolicy")["spec"]["ingress"]
    assert [port["port"] for rule in rules for port in rule["ports"]] == ["http", "grpc"]
    off = {"networkPolicy": {"enabled": False}}
    assert not [
        one for one in objects_of(body("TidegatePool", "cores", modelsVolume=VOLUME, **off))
        if one["kind"] == "NetworkPolicy"
    ]  # fmt: skip


SECRET = {"valueFrom": {"secretKeyRef": {"name": "broker", "key": "url"}}}


@pytest.mark.parametrize(
    ("spec", "ports"),
    [
        ({}, []),
        ({"config": {"mqtt": "mqtt://broker"}}, [1883]),
        ({"config": {"mqtt": "MQTTS://pool:1234@broker?protocol=5"}}, [8883]),
        ({"config": {"mqtt": "mqtts://[fd00::7]:18883"}}, [18883]),
        ({"config": {"tracing": {"endpoint": "https://collector/v1/traces"}}}, [443]),
        ({"config": {"mqtt": "mqtt://b:4318", "tracing": {"endpoint": "http://c:4318/v1/traces"}}}, [4318]),
        ({"env": [{"name": "TIDEGATE_POOL_MQTT", "value": "mqtt://$(USER):$(PASSWORD)@broker:1884"}]}, [1884]),
        ({"env": [{"name": "TIDEGATE_POOL_MQTT", **SECRET}]}, [1883, 8883]),
        ({"env": [{"name": "TIDEGATE_POOL_TRACING__ENDPOINT", "value": "$(COLLECTOR)"}]}, [4318]),
        ({"env": [{"name": "SOME_URL", "value": "http://elsewhere:8080"}]}, []),
    ],
)
def test_a_policy_lets_a_pool_out_to_its_broker_and_its_collector(spec: dict[str, Any], ports: list[int]) -> None:
    """Of whatever address: what a policy names are pods and networks, and not hosts."""
    own = {"ports": [{"port": 8200}]}
    asked = body("TidegatePool", "cores", modelsVolume=VOLUME, networkPolicy={"egress": [own]}, **spec)
    names, *calls, last = one_of(objects_of(asked), "NetworkPolicy")["spec"]["egress"]

    assert {port["port"] for port in names["ports"]} == {53} and last == own
    assert calls == ([{"ports": [{"port": port} for port in ports]}] if ports else [])


def test_a_changed_configuration_of_a_pool_on_ray_is_another_application_in_the_same_cluster() -> None:
    before, after = service(), service(config={**BROKER, "drain_s": 2.5}, replicas=4)

    assert cluster(before) == cluster(after), "KubeRay would make a second one"
    assert (arguments(after)["drain_s"], arguments(after)["replicas"]) == (2.5, 4)
    assert arguments(before)["name"] == arguments(after)["name"], "what was measured of a replica stays"


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [{"image": {"tag": "0.3.0"}}, {"env": [{"name": "A", "value": "1"}]}, {"resources": {"limits": {"cpu": "8"}}},
     {"ray": {**RAY, "reconnectTimeoutSeconds": 900}}, {"config": {**BROKER, "drain_s": 60}}],
)  # fmt: skip
def test_replicas_of_a_second_cluster_have_names_of_their_own(change: dict[str, Any]) -> None:
    """Both clusters announce theirs until KubeRay ends the first."""
    assert cluster(service()) != cluster(service(**change))
    assert arguments(service())["name"] != arguments(service(**change))["name"]


@pytest.mark.slow
def test_a_changed_model_is_a_second_cluster() -> None:
    model = body("TidegateModel", "digits-1", **MODEL)
    other = body("TidegateModel", "digits-1", **{**MODEL, "manifest": {**MODEL["manifest"], "summary": "other"}})
    first, second = (
        service(one, models=["digits-1"]) for one in (model, other)
    )  # fmt: skip

    mounts = first["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0][
        "volumeMounts"
    ]
    assert [one["mountPath"] for one in mounts] == ["/var/lib/tidegate/models/digits/1"]
    assert cluster(first) != cluster(second)


def test_a_replica_on_ray_is_a_pool_that_starts() -> None:
    """Also of the longest name, with the rank that Serve adds."""
    (made,) = objects_of(body("TidegatePool", "a" * 40, modelsVolume=VOLUME, config=BROKER, ray=RAY, device="cuda"))
    given = arguments(made)
    keys = {key: one for key, one in given.items() if key not in ("replicas", "cpus", "gpus")}

    config = load(config_model("pool"), **{**keys, "name": f"{given['name']}-999"})
    assert config.model_dump()["grpc_port"] not in range(10_002, 20_000), "Ray's own processes have those"
    assert (given["gpus"], given["cpus"]) == (1, 1.0)
    assert len(made["metadata"]["name"]) <= 47, "KubeRay takes no longer one"


def test_a_worker_of_ray_outlives_the_drain_of_its_replica() -> None:
    made = service(config={**BROKER, "drain_s": 45})
    pod = made["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > 45 + 10, "what Serve adds to the drain"


def test_a_pool_on_ray_takes_the_brokers_url_from_a_secret() -> None:
    variable = {"name": "TIDEGATE_POOL_MQTT", "valueFrom": {"secretKeyRef": {"name": "broker", "key": "url"}}}
    made = service(config={}, env=[variable])

    assert "mqtt" not in arguments(made)
    workers = made["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    assert variable in workers["env"]


def test_a_group_of_kubeedges_has_the_agents_of_any_other_and_one_a_node() -> None:
    groups: list[dict[str, Any]] = [
        {"name": "kiosks"}, {"name": "tills", "nodeGroup": {"name": "shop-tills", "nodes": 3}}
    ]  # fmt: skip
    objects = objects_of(body("TidegateFleet", "shops", groups=groups, maxUnavailable="2"))
    (deployment,) = one_of(objects, "EdgeApplication")["spec"]["workloadTemplate"]["manifests"]
    (target,) = one_of(objects, "EdgeApplication")["spec"]["workloadScope"]["targetNodeGroups"]
    daemon, agent = one_of(objects, "DaemonSet")["spec"]["template"], deployment["spec"]["template"]

    assert target == {"name": "shop-tills", "overriders": {"replicas": 3}}
    assert one_of(objects, "DaemonSet")["metadata"]["name"].endswith("-kiosks"), "one agent a device"
    plain = {"nodeSelector", "affinity", "containers"}
    assert {key: one for key, one in daemon["spec"].items() if key not in plain} == {
        key: one for key, one in agent["spec"].items() if key not in plain
    }
    same = yaml.safe_dump(daemon["spec"]["containers"]).replace("kiosks", "tills")
    assert same == yaml.safe_dump(agent["spec"]["containers"])
    (apart,) = agent["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["labelSelector"]["matchLabels"].items() <= agent["metadata"]["labels"].items()
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 2}
