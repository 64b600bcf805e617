"""The operator with an API server that refuses, forgets, is cut and is away; restarted, killed, and beside another."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import yaml

from tests.support.operator.cluster import OperatorCluster
from tests.support.operator.operating import LEASE_S, operating, until
from tests.support.operator.resources import MODEL, VOLUME, body
from tidegate import clock

pytestmark = pytest.mark.slow
GATEWAY = "main-gateway"


def gateway(**spec: Any) -> dict[str, Any]:
    return body("TidegateGateway", "main", modelsVolume=VOLUME, **spec)


def is_ready(cluster: OperatorCluster, kind: str = "TidegateGateway", name: str = "main") -> bool:
    one = cluster.one(kind, name)
    ready = cluster.condition(kind, name)
    generation = one["metadata"]["generation"]
    return (ready.get("status"), one.get("status", {}).get("observedGeneration")) == ("True", generation)


def fleet_of(cluster: OperatorCluster) -> str:
    """The key `fleet` of the configuration that new pods of the gateway would read."""
    volumes = cluster.one("Deployment", GATEWAY)["spec"]["template"]["spec"]["volumes"]
    data = cluster.one("ConfigMap", volumes[0]["configMap"]["name"])["data"]
    found: str = yaml.safe_load(data["site.yaml"]).get("fleet", "")
    return found


async def changed(cluster: OperatorCluster, fleet: str) -> float:
    """Change the configuration; return the seconds until pods would have it."""
    cluster.change("TidegateGateway", "main", config={"fleet": fleet})
    return await until(lambda: fleet_of(cluster) == fleet, f"the configuration says {fleet}")


async def test_a_resource_becomes_objects_and_its_status_says_so(cluster: OperatorCluster) -> None:
    cluster.send(gateway(pools=["cores"]))
    cluster.send(body("TidegatePool", "cores", modelsVolume=VOLUME, replicas=3))
    async with operating(cluster):
        await until(lambda: is_ready(cluster) and is_ready(cluster, "TidegatePool", "cores"), "both are ready")

    status = cluster.one("TidegatePool", "cores")["status"]
    assert (status["replicas"], status["readyReplicas"]) == (3, 3)
    assert "app.kubernetes.io/component=pool" in status["selector"], "the scale subresource finds pods by it"
    assert cluster.names("Service") == {GATEWAY, f"{GATEWAY}-metrics", "cores-pool"}
    for kind in ("TidegateGateway", "TidegatePool"):
        meta = cluster.one(kind, "main" if kind == "TidegateGateway" else "cores")["metadata"]
        assert "annotations" not in meta and "finalizers" not in meta, "it could not be deleted without an operator"


async def test_a_pool_keeps_its_replicas_when_autoscaling_is_switched_on(cluster: OperatorCluster) -> None:
    cluster.send(body("TidegatePool", "cores", modelsVolume=VOLUME, replicas=3))
    seen: list[int] = []

    def watched(key: tuple[str, str, str], one: dict[str, Any] | None) -> None:
        if key[0] == "statefulsets" and one is not None:
            seen.append(one["spec"].get("replicas", 1))

    async with operating(cluster):
        await until(lambda: is_ready(cluster, "TidegatePool", "cores"), "ready")
        cluster.on_change = watched
        for kind in ("hpa", "none", "hpa"):  # a second time, the one before has been somebody's already
            cluster.change("TidegatePool", "cores", autoscaling={"kind": kind})
            wanted = {"cores-pool"} if kind == "hpa" else set()
            await until(
                lambda wanted=wanted: (
                    is_ready(cluster, "TidegatePool", "cores")  # type: ignore[misc]
                    and cluster.names("HorizontalPodAutoscaler") == wanted
                ),
                f"autoscaling is {kind}",
            )
        cluster.by_hand("StatefulSet", "cores-pool", lambda one: one["spec"].update(replicas=5))
        cluster.change("TidegatePool", "cores", config={"drain_s": 3})
        await until(lambda: is_ready(cluster, "TidegatePool", "cores"), "ready again")

    assert cluster.one("StatefulSet", "cores-pool")["spec"]["replicas"] == 5, "what scales it alone says how many"
    assert set(seen) <= {3, 5}, seen


async def test_a_pool_that_nothing_can_scale_changes_all_the_same_and_says_so(cluster: OperatorCluster) -> None:
    cluster.send(gateway(config={"metrics_port": 0}))
    cluster.send(body("TidegatePool", "cores", modelsVolume=VOLUME, replicas=3))
    async with operating(cluster):
        await until(lambda: is_ready(cluster, "TidegatePool", "cores"), "ready")
        cluster.change("TidegatePool", "cores", autoscaling={"kind": "keda", "gateway": "main"}, config={"drain_s": 3})
        await until(
            lambda: cluster.condition("TidegatePool", "cores", "Autoscaled").get("reason") == "NoMetrics", "told"
        )
        assert cluster.condition("TidegatePool", "cores", "Accepted")["status"] == "True"
        await until(lambda: is_ready(cluster, "TidegatePool", "cores"), "ready again")
        spec = cluster.one("StatefulSet", "cores-pool")["spec"]
        assert (spec["replicas"], spec["template"]["spec"]["terminationGracePeriodSeconds"]) == (3, 2 + 3 + 15)
        cluster.change("TidegatePool", "cores", autoscaling={"kind": "hpa", "gateway": "main"})
        await until(
            lambda: cluster.condition("TidegatePool", "cores", "Autoscaled").get("status") == "True", "it is scaled"
        )
        assert cluster.names("HorizontalPodAutoscaler") == {"cores-pool"}


async def test_a_change_arrives_and_what_was_before_goes_once_no_pod_needs_it(cluster: OperatorCluster) -> None:
    cluster.send(gateway(config={"fleet": "one"}))
    async with operating(cluster):
        await until(lambda: is_ready(cluster), "ready")
        first = cluster.names("ConfigMap")
        await changed(cluster, "two")
        await until(lambda: is_ready(cluster) and len(cluster.names("ConfigMap")) == 1, "the old ConfigMap is gone")
        assert cluster.names("ConfigMap") != first


async def test_a_configuration_of_old_pods_stays_while_new_ones_do_not_come_up() -> None:
    async with OperatorCluster(controllers=False) as cluster:
        cluster.send(gateway(config={"fleet": "one"}))
        async with operating(cluster):
            await until(lambda: GATEWAY in cluster.names("Deployment"), "a Deployment")
            cluster.roll_out("Deployment", GATEWAY)
            await until(lambda: is_ready(cluster), "ready")
            await changed(cluster, "two")
            await until(lambda: cluster.condition("TidegateGateway", "main")["status"] == "False", "under way")
            assert len(cluster.names("ConfigMap")) == 2
            cluster.roll_out("Deployment", GATEWAY)
            await until(lambda: is_ready(cluster) and len(cluster.names("ConfigMap")) == 1, "one is left")


async def test_nothing_is_written_while_nothing_changes(cluster: OperatorCluster) -> None:
    cluster.send(gateway())
    async with operating(cluster):
        await until(lambda: is_ready(cluster), "ready")
    versions = {key: one["metadata"]["resourceVersion"] for key, one in cluster.objects.items() if key[0] != "leases"}
    async with operating(cluster, "b"):
        await until(lambda: cluster.asked["list", "rolebindings"] >= 3, "the second has looked at all of it")
        await clock.sleep(0.5)

    now = {key: one["metadata"]["resourceVersion"] for key, one in cluster.objects.items() if key[0] != "leases"}
    assert now == versions


async def test_what_cannot_run_is_refused_and_what_ran_goes_on(cluster: OperatorCluster) -> None:
    cluster.send(gateway(config={"fleet": "one"}))
    async with operating(cluster):
        await until(lambda: is_ready(cluster), "ready")
        before = cluster.one("Deployment", GATEWAY)
        cluster.change("TidegateGateway", "main", config={"fleet": "two", "admin_host": "0.0.0.0"})
        await until(
            lambda: cluster.condition("TidegateGateway", "main", "Accepted").get("status") == "False", "refused"
        )
        said = cluster.condition("TidegateGateway", "main", "Accepted")
        assert said["reason"] == "InvalidConfig" and "admin_host" in said["message"]
        assert cluster.condition("TidegateGateway", "main")["status"] == "True", "the one before still runs"
        assert cluster.one("Deployment", GATEWAY) == before
        await changed(cluster, "three")
        await until(
            lambda: cluster.condition("TidegateGateway", "main", "Accepted").get("status") == "True", "accepted again"
        )


async def test_a_model_that_comes_later_is_waited_for(cluster: OperatorCluster) -> None:
    cluster.send(body("TidegatePool", "cores", models=["digits-1"]))
    async with operating(cluster):
        await until(lambda: cluster.condition("TidegatePool", "cores", "Accepted").get("reason") == "NoModel", "told")
        cluster.send(body("TidegateModel", "digits-1", **MODEL))
        await until(lambda: is_ready(cluster, "TidegatePool", "cores"), "ready")
        await until(lambda: cluster.one("TidegateModel", "digits-1")["status"]["usedBy"] == 1, "counted")


async def test_deleted_objects_come_back_and_deleted_resources_do_not(cluster: OperatorCluster) -> None:
    cluster.send(gateway())
    async with operating(cluster):
        await until(lambda: is_ready(cluster), "ready")
        cluster.remove("Deployment", GATEWAY)
        await until(lambda: GATEWAY in cluster.names("Deployment"), "it is there again")
        cluster.remove("TidegateGateway", "main")
        await clock.sleep(1.0)
        assert {key[0] for key in cluster.objects} == {"leases"}


async def test_what_somebody_changed_by_hand_is_set_back_and_what_he_added_stays(cluster: OperatorCluster) -> None:
    cluster.send(gateway())

    def by_hand(one: dict[str, Any]) -> None:
        one["spec"]["replicas"] = 9
        one["metadata"]["labels"]["team"] = "vision"

    async with operating(cluster):
        await until(lambda: is_ready(cluster), "ready")
        cluster.by_hand("Deployment", GATEWAY, by_hand)
        await until(lambda: cluster.one("Deployment", GATEWAY)["spec"]["replicas"] == 2, "set back")
        assert cluster.one("Deployment", GATEWAY)["metadata"]["labels"]["team"] == "vision"


@pytest.mark.parametrize("status", [409, 429, 500, 503])
async def test_refused_writes_are_made_again(cluster: OperatorCluster, status: int) -> None:
    cluster.send(gateway(config={"fleet": "one"}))
    async with operating(cluster):
        await until(lambda: is_ready(cluster), "ready")
        cluster.fail(status, 3, verb="patch")
        await changed(cluster, "two")
        await until(lambda: is_ready(cluster), "ready again")


async def test_watches_that_are_cut_and_versions_that_are_forgotten_lose_nothing(cluster: OperatorCluster) -> None:
    cluster.send(gateway(config={"fleet": "one"}))
    async with operating(cluster):
        await until(lambda: is_ready(cluster), "ready")
        cluster.cut_watches()
        await changed(cluster, "two")
        cluster.fail(500, 2, verb="watch")
        cluster.change("TidegateGateway", "main", config={"fleet": "three"})
        cluster.forget_log()
        cluster.cut_watches()
        # What is still being done about the change before may read this one, too.
        await until(lambda: cluster.asked["list", "tidegategateways"] >= 2, "listed again")
        await until(lambda: fleet_of(cluster) == "three", "the configuration says three")


async def test_an_api_server_that_is_away_changes_nothing_and_is_found_again(cluster: OperatorCluster) -> None:
    cluster.send(gateway(config={"fleet": "one"}))
    async with operating(cluster) as operator:
        await until(lambda: is_ready(cluster), "ready")
        await cluster.stop()
        cluster.change("TidegateGateway", "main", config={"fleet": "two"})
        await clock.sleep(4 * LEASE_S)  # longer than kopf tries by itself
        assert fleet_of(cluster) == "one" and operator.poll() is None
        await cluster.start()
        await until(lambda: fleet_of(cluster) == "two", "made up for")


async def test_without_an_operator_nothing_changes(cluster: OperatorCluster) -> None:
    cluster.send(gateway(config={"fleet": "one"}))
    async with operating(cluster):
        await until(lambda: is_ready(cluster), "ready")
    before = {key: one for key, one in cluster.objects.items() if key[0] not in ("tidegategateways", "leases")}
    cluster.change("TidegateGateway", "main", config={"fleet": "two"})
    await clock.sleep(0.5)
    assert before == {key: one for key, one in cluster.objects.items() if key[0] not in ("tidegategateways", "leases")}
    async with operating(cluster, "b"):
        await until(lambda: fleet_of(cluster) == "two", "what was asked meanwhile")


async def test_of_two_operators_one_acts_and_the_other_takes_over(cluster: OperatorCluster) -> None:
    cluster.send(gateway(config={"fleet": "one"}))
    async with operating(cluster, "a") as first:
        await until(lambda: is_ready(cluster), "ready")
        async with operating(cluster, "b"):
            await clock.sleep(2 * LEASE_S)
            assert holder(cluster) == "a"
            first.terminate()
            await until(lambda: holder(cluster) == "b", "it was given back")
            await changed(cluster, "two")
            await until(lambda: is_ready(cluster), "ready")


async def test_an_operator_that_cannot_renew_its_lease_stops_before_another_begins(cluster: OperatorCluster) -> None:
    cluster.send(gateway(config={"fleet": "one"}))
    async with operating(cluster, "a"):
        await until(lambda: is_ready(cluster), "ready")
        cluster.fail(500, 10_000, plural="leases")
        await clock.sleep(LEASE_S)
        written = len(cluster.writes)
        cluster.change("TidegateGateway", "main", config={"fleet": "two"})
        await clock.sleep(LEASE_S)
        assert len(cluster.writes) == written


async def test_a_killed_operator_is_followed_by_another(cluster: OperatorCluster) -> None:
    """Killed between two of its writes: the next one makes them all, once the lease has run out."""
    cluster.send(gateway(config={"fleet": "one"}))
    async with operating(cluster, "killed") as killed:
        cluster.on_change = lambda key, _one: killed.kill() if key[0] == "serviceaccounts" else None
        await until(lambda: killed.poll() is not None, "it was killed in the middle")
    cluster.on_change = lambda _key, _one: None
    assert killed.returncode == -signal.SIGKILL
    assert cluster.names("Deployment") == set()
    async with operating(cluster, "follower"):
        await until(lambda: GATEWAY in cluster.names("Deployment") and is_ready(cluster), "made by the next one")
    assert holder(cluster) == "", "given back"


def holder(cluster: OperatorCluster) -> str:
    return str(cluster.one("Lease", "tidegate-operator")["spec"]["holderIdentity"])
