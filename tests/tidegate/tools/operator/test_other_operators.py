"""The operator beside KEDA, KubeRay, KubeEdge and Prometheus': what is switched over, switched off, not installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.operator.cluster import OperatorCluster
from tests.support.operator.operating import operating, until
from tests.support.operator.resources import VOLUME, body
from tidegate import clock

pytestmark = pytest.mark.slow
POOL = "cores-pool"
RAY = {"redisAddress": "redis:6379"}
KEDA = {"kind": "keda", "gateway": "main"}


def pool(**spec: Any) -> dict[str, Any]:
    return body("TidegatePool", "cores", **{"modelsVolume": VOLUME, "replicas": 3, **spec})


def on_ray(**spec: Any) -> dict[str, Any]:
    return pool(config={"mqtt": "mqtt://broker:1883"}, ray=RAY, **spec)


def gateway(**spec: Any) -> dict[str, Any]:
    return body("TidegateGateway", "main", modelsVolume=VOLUME, **spec)


def says(
    cluster: OperatorCluster, kind: str, name: str, which: str, status: str, reason: str = ""
) -> Callable[[], bool]:
    """Whether the condition is so, about the newest spec."""

    def so() -> bool:
        said = cluster.condition(kind, name, which)
        newest = said.get("observedGeneration") == cluster.one(kind, name)["metadata"]["generation"]
        return newest and said["status"] == status and reason in ("", said["reason"])

    return so


async def test_a_pool_goes_from_the_metric_to_keda_in_one_step_and_keeps_its_replicas(cluster: OperatorCluster) -> None:
    cluster.send(gateway())
    cluster.send(pool(autoscaling={"kind": "hpa"}))
    seen: list[int] = []

    def watched(key: tuple[str, str, str], one: dict[str, Any] | None) -> None:
        if key[0] == "statefulsets" and one is not None:
            seen.append(one["spec"].get("replicas", 1))

    async with operating(cluster):
        await until(says(cluster, "TidegatePool", "cores", "Autoscaled", "True"), "scaled by the metric")
        cluster.by_hand("StatefulSet", POOL, lambda one: one["spec"].update(replicas=5))
        cluster.on_change = watched
        cluster.change("TidegatePool", "cores", autoscaling=KEDA)
        await until(says(cluster, "TidegatePool", "cores", "Autoscaled", "True"), "scaled by KEDA")

    assert (cluster.names("ScaledObject"), cluster.names("HorizontalPodAutoscaler")) == ({POOL}, set())
    assert cluster.one("StatefulSet", POOL)["spec"]["replicas"] == 5 and set(seen) <= {5}, seen


async def test_nothing_else_scales_a_pool_before_keda_has_let_go_of_it(cluster: OperatorCluster) -> None:
    cluster.held_back = {"scaledobjects"}
    cluster.send(gateway())
    cluster.send(pool(autoscaling=KEDA))
    async with operating(cluster):
        await until(says(cluster, "TidegatePool", "cores", "Autoscaled", "True"), "scaled by KEDA")
        cluster.change("TidegatePool", "cores", autoscaling={"kind": "hpa"})
        await until(says(cluster, "TidegatePool", "cores", "Autoscaled", "False", "Replacing"), "it waits")
        await clock.sleep(1.5)  # it has looked again
        assert cluster.names("HorizontalPodAutoscaler") == set()
        assert cluster.writes.count(("delete", "scaledobjects", POOL)) == 1
        cluster.let_go("ScaledObject", POOL)
        await until(says(cluster, "TidegatePool", "cores", "Autoscaled", "True"), "scaled by the metric")
        assert cluster.names("HorizontalPodAutoscaler") == {POOL}


async def test_a_resource_that_was_read_before_its_watch_told_of_it_is_noticed_by_those_that_name_it(
    cluster: OperatorCluster,
) -> None:
    cluster.send(gateway())
    cluster.send(pool(autoscaling=KEDA))

    def asked() -> str:
        found: str = cluster.one("ScaledObject", POOL)["spec"]["triggers"][0]["metadata"]["url"]
        return found

    async with operating(cluster):
        await until(says(cluster, "TidegatePool", "cores", "Autoscaled", "True"), "scaled by KEDA")
        await until(says(cluster, "TidegateGateway", "main", "Ready", "True"), "ready")
        cluster.quiet = {"tidegategateways"}
        cluster.change("TidegateGateway", "main", config={"metrics_port": 9002})
        await clock.sleep(0.5)
        assert ":8002/" in asked(), "nothing has told of it"
        cluster.by_hand("Deployment", "main-gateway", lambda one: one["spec"].update(replicas=7))
        await until(lambda: cluster.one("Deployment", "main-gateway")["spec"]["replicas"] == 2, "the gateway was read")
        cluster.quiet = set()
        await until(lambda: ":9002/" in asked(), "KEDA asks at the new port")


async def test_policies_and_monitors_come_and_go_with_their_switches(cluster: OperatorCluster) -> None:
    asked = {"enabled": True, "labels": {"release": "prometheus"}}
    cluster.send(gateway(serviceMonitor=asked))
    cluster.send(pool(serviceMonitor=asked))
    cluster.send(body("TidegateFleet", "shops", groups=[{"name": "tills"}], podMonitor=asked))
    async with operating(cluster):
        for kind, name in (("TidegateGateway", "main"), ("TidegatePool", "cores"), ("TidegateFleet", "shops")):
            await until(says(cluster, kind, name, "Monitored", "True"), f"{kind} is monitored")
        assert cluster.names("ServiceMonitor") == cluster.names("NetworkPolicy") == {"main-gateway", POOL}
        assert cluster.names("PodMonitor") == {"shops-edge"}
        cluster.change("TidegateGateway", "main", config={"metrics_port": 0}, networkPolicy={"enabled": False})
        cluster.change("TidegatePool", "cores", serviceMonitor={"enabled": False})
        cluster.change("TidegateFleet", "shops", podMonitor={"enabled": False})
        await until(says(cluster, "TidegateGateway", "main", "Monitored", "False", "NoMetrics"), "told")
        await until(says(cluster, "TidegatePool", "cores", "Monitored", "False", "NotAsked"), "told")
        await until(says(cluster, "TidegateFleet", "shops", "Monitored", "False", "NotAsked"), "told")

    assert cluster.names("ServiceMonitor") == cluster.names("PodMonitor") == set()
    assert cluster.names("NetworkPolicy") == {POOL}


async def test_what_is_not_installed_is_told_and_keeps_nothing_else_from_running(cluster: OperatorCluster) -> None:
    cluster.installed = set()
    cluster.send(gateway(serviceMonitor={"enabled": True}))
    cluster.send(pool(autoscaling=KEDA))
    cluster.send(body("TidegatePool", "rays", **on_ray()["spec"]))
    async with operating(cluster) as operator:
        await until(says(cluster, "TidegateGateway", "main", "Monitored", "False", "NotInstalled"), "told")
        await until(says(cluster, "TidegateGateway", "main", "Ready", "True"), "the gateway serves")
        await until(says(cluster, "TidegatePool", "cores", "Autoscaled", "False", "NotInstalled"), "told")
        await until(says(cluster, "TidegatePool", "cores", "Ready", "True"), "the pool serves")
        await until(says(cluster, "TidegatePool", "rays", "Ready", "False", "NotInstalled"), "told")
        assert "KubeRay" in cluster.condition("TidegatePool", "rays")["message"] and operator.poll() is None
        cluster.installed = {"rayservices", "scaledobjects", "servicemonitors"}
        await until(says(cluster, "TidegatePool", "rays", "Ready", "True"), "found without a change", within_s=60)
        await until(lambda: bool(cluster.names("ScaledObject") and cluster.names("ServiceMonitor")), "all is there")


async def test_without_kuberay_a_pool_keeps_what_serves_and_what_protects_and_scales_it(
    cluster: OperatorCluster,
) -> None:
    cluster.installed -= {"rayservices"}
    cluster.send(gateway())
    cluster.send(pool(autoscaling=KEDA, serviceMonitor={"enabled": True}))
    async with operating(cluster):
        await until(says(cluster, "TidegatePool", "cores", "Autoscaled", "True"), "scaled by KEDA")
        await until(says(cluster, "TidegatePool", "cores", "Ready", "True"), "it serves")
        before = {key for key in cluster.objects if key[2].startswith(POOL)}
        cluster.change(
            "TidegatePool", "cores", config={"mqtt": "mqtt://broker:1883"}, ray=RAY, autoscaling={}, serviceMonitor={}
        )
        await until(says(cluster, "TidegatePool", "cores", "Ready", "False", "NotInstalled"), "told")
        assert before <= cluster.objects.keys(), "all that it had"
        assert {one[0] for one in before} == {
            "statefulsets", "networkpolicies", "poddisruptionbudgets", "scaledobjects", "services", "serviceaccounts",
            "configmaps", "servicemonitors",
        }  # fmt: skip
        cluster.installed |= {"rayservices"}
        await until(says(cluster, "TidegatePool", "cores", "Ready", "True"), "Serve runs it", within_s=60)
        await until(lambda: not before & cluster.objects.keys(), "what it had is gone")
    deleted = [plural for verb, plural, _ in cluster.writes if verb == "delete"]
    assert deleted.index("statefulsets") < min(map(deleted.index, ("networkpolicies", "poddisruptionbudgets")))


async def test_without_kubeedge_a_group_keeps_its_agents(cluster: OperatorCluster) -> None:
    """There are none beside others on a node, so the new ones are only waited for as far as their controller."""
    cluster.installed -= {"edgeapplications"}
    edge = [{"name": "tills", "nodeGroup": {"name": "tills", "nodes": 4}}]
    cluster.send(body("TidegateFleet", "shops", groups=[{"name": "tills"}, {"name": "kiosks"}]))
    async with operating(cluster):
        await until(says(cluster, "TidegateFleet", "shops", "Ready", "True"), "agents run")
        (config_map,) = cluster.names("ConfigMap") - {"shops-edge-settings"}
        cluster.change("TidegateFleet", "shops", groups=edge, config={"drain_s": 3})
        await until(says(cluster, "TidegateFleet", "shops", "Ready", "False", "NotInstalled"), "told")
        await until(lambda: cluster.names("DaemonSet") == {"shops-edge-tills"}, "the other group was taken out")
        assert config_map in cluster.names("ConfigMap"), "agents that start again need it"
        cluster.installed |= {"edgeapplications"}
        await until(says(cluster, "TidegateFleet", "shops", "Ready", "True"), "KubeEdge runs them", within_s=60)
        await until(lambda: cluster.names("DaemonSet") == set(), "no DaemonSet beside it")
        await until(lambda: config_map not in cluster.names("ConfigMap"), "nobody needs it")


async def test_a_pool_moves_to_ray_and_back_and_what_serves_stays_until_the_other_does() -> None:
    async with OperatorCluster(controllers=False) as cluster:
        cluster.send(pool(config={"mqtt": "mqtt://broker:1883"}))
        async with operating(cluster):
            await until(lambda: POOL in cluster.names("StatefulSet"), "a StatefulSet")
            cluster.roll_out("StatefulSet", POOL)
            await until(says(cluster, "TidegatePool", "cores", "Ready", "True"), "ready")
            cluster.send(on_ray())
            await until(lambda: POOL in cluster.names("RayService"), "a RayService")
            cluster.serve(POOL, "DEPLOY_FAILED", "no such model")
            await until(
                lambda: "no such model" in cluster.condition("TidegatePool", "cores").get("message", ""), "Serve's word"
            )
            assert (cluster.names("StatefulSet"), cluster.names("Service")) == ({POOL}, {POOL})
            assert cluster.names("NetworkPolicy") == cluster.names("PodDisruptionBudget") == {POOL}
            cluster.serve(POOL, "RUNNING")
            await until(says(cluster, "TidegatePool", "cores", "Ready", "True"), "Serve runs it")
            await until(lambda: cluster.names("StatefulSet") == set(), "the StatefulSet is gone")
            left = {key[0] for key in cluster.objects}
            assert left == {"tidegatepools", "rayservices", "leases"}
            status = cluster.one("TidegatePool", "cores")["status"]
            assert (status["replicas"], status["readyReplicas"]) == (3, 3)
            assert "app.kubernetes.io/component=ray-pool" in status["selector"]

            cluster.send(pool())
            await until(lambda: POOL in cluster.names("StatefulSet"), "a StatefulSet again")
            assert cluster.names("RayService") == {POOL}
            cluster.roll_out("StatefulSet", POOL)
            await until(lambda: cluster.names("RayService") == set(), "the RayService is gone")


async def test_a_group_moves_to_kubeedge_and_back(cluster: OperatorCluster) -> None:
    daemon, edge = [{"name": "tills"}], [{"name": "tills", "nodeGroup": {"name": "tills", "nodes": 4}}]
    cluster.send(body("TidegateFleet", "shops", groups=daemon))
    async with operating(cluster):
        await until(lambda: cluster.names("DaemonSet") == {"shops-edge-tills"}, "a DaemonSet")
        cluster.change("TidegateFleet", "shops", groups=edge)
        await until(lambda: cluster.names("DaemonSet") == set(), "no DaemonSet beside it")
        await until(lambda: cluster.one("TidegateFleet", "shops")["status"].get("readyDevices") == 4, "four agents")
        await until(says(cluster, "TidegateFleet", "shops", "Ready", "True"), "ready")
        assert cluster.names("EdgeApplication") == {"shops-edge-tills"}
        assert cluster.names("Deployment") == {"shops-edge-tills-tills"}, "KubeEdge's own, which stays"
        cluster.change("TidegateFleet", "shops", groups=daemon)
        await until(lambda: cluster.names("EdgeApplication") == set(), "no EdgeApplication beside it")
        await until(lambda: cluster.names("DaemonSet") == {"shops-edge-tills"}, "a DaemonSet again")
