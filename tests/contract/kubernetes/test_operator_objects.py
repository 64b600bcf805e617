"""What the operator makes is what Kubernetes knows, and what the Helm chart makes of the same values."""

from __future__ import annotations

import copy
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.chart.rendering import EXAMPLES as CHART_EXAMPLES
from tests.support.chart.rendering import Rendered, complaints_about, has_helm, render
from tests.support.operator import definition_files
from tests.support.operator.resources import VOLUME, body, objects_of, one_of
from tidegate.tools.operator.cli import operator as operator_command
from tidegate.tools.operator.cluster_objects import path_of
from tidegate.tools.operator.definitions import GROUP, KINDS
from tidegate.tools.operator.deletion_order import DELETED
from tidegate.tools.operator.reconciler import WORKLOADS
from tidegate.tools.operator.rendering.gateway import PORTS
from tidegate.tools.operator.rendering.ray_service import APPLICATION

EXAMPLES = Path(__file__).parents[3] / "deploy" / "operator" / "examples"
DEPLOY = EXAMPLES.parents[1]
RAY_PYTHON = DEPLOY.parent / ".venv-ray" / "bin" / "python"
PAGE = Path(__file__).parents[3] / "docs" / "operator.md"
RESOURCES = {"requests": {"cpu": "2", "memory": "1Gi"}, "limits": {"memory": "3Gi"}}
TLS = {"mode": "csi", "csi": {"issuerName": "fleet-ca", "gatewayHosts": ["gw.example"]}}
TLS_OF_RESOURCES = {"mode": "csi", "issuerName": "fleet-ca"}
# Of the chart's values and of the resources that say the same: what the operator names and labels in its own way.
OWN_WORDS = ("labels", "ownerReferences", "annotations")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_helm(), reason="`make checks` could not set up Helm's engine here"),
]


def values(**more: Any) -> dict[str, Any]:
    common = {"replicas": 2, "resources": RESOURCES}
    return {
        "fullnameOverride": "t",
        "models": {"volume": VOLUME, "subPath": "prod"},
        "gateway": {**common, "config": {"link_port": 8006}},
        "pool": {**common, "device": "cuda", "gpus": 2, "config": {"precision": "bf16", "drain_s": 7}},
        **more,
    }


POLICY = {
    "callers": [{"namespaceSelector": {"matchLabels": {"team": "apps"}}}],
    "monitoring": [{"namespaceSelector": {"matchLabels": {"team": "watch"}}}],
    "poolEgress": [{"ports": [{"port": 8883}]}],
}
CALLS = {"mqtt": "mqtts://pool:a%2Fb@broker.example", "tracing": {"endpoint": "http://[fd00::7]:4319/v1/traces"}}
VARIABLES: list[dict[str, Any]] = [
    {"name": "TIDEGATE_POOL_MQTT", "valueFrom": {"secretKeyRef": {"name": "broker", "key": "url"}}},
    {"name": "TIDEGATE_POOL_TRACING__ENDPOINT", "value": "https://collector.example/v1/traces"},
    {"name": "TIDEGATE_POOL_DRAIN_S", "value": "5"},
]
MONITOR = {"enabled": True, "interval": "30s", "labels": {"release": "prometheus"}}
# Of the chart's values, and of both resources: what is switched in addition to the above.
SWITCHED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "as it comes": ({}, {}, {}),
    "monitored": (
        {"monitoring": {"serviceMonitor": MONITOR}}, {"serviceMonitor": MONITOR}, {"serviceMonitor": MONITOR}
    ),
    "monitored over tls": (
        {"monitoring": {"serviceMonitor": MONITOR}, "tls": TLS},
        {"serviceMonitor": MONITOR, "tls": TLS_OF_RESOURCES}, {"serviceMonitor": MONITOR, "tls": TLS_OF_RESOURCES},
    ),
    "peers": (
        {"networkPolicy": POLICY},
        {"networkPolicy": {key: POLICY[key] for key in ("callers", "monitoring")}},
        {"networkPolicy": {"monitoring": POLICY["monitoring"], "egress": POLICY["poolEgress"]}},
    ),
    "whoever comes": (
        {"networkPolicy": {"monitoring": []}}, *2 * ({"networkPolicy": {"monitoring": []}},)
    ),
    "no metrics": (
        {"monitoring": {"serviceMonitor": MONITOR}, "gateway": {"config": {"metrics_port": 0}},
         "pool": {"config": {"metrics_port": None}}},
        {"serviceMonitor": MONITOR, "config": {"metrics_port": 0}},
        {"serviceMonitor": MONITOR, "config": {"metrics_port": None}},
    ),
    "a broker and a collector": (
        {"pool": {"config": CALLS}, "networkPolicy": {"poolEgress": POLICY["poolEgress"]}}, {},
        {"config": CALLS, "networkPolicy": {"egress": POLICY["poolEgress"]}},
    ),
    "a broker of a Secret": ({"pool": {"env": VARIABLES}}, {}, {"env": VARIABLES}),
    "off": (
        {"networkPolicy": {"enabled": False}}, *2 * ({"networkPolicy": {"enabled": False}},)
    ),
}  # fmt: skip


def sent(tls: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    common: dict[str, Any] = {"modelsVolume": VOLUME, "modelsSubPath": "prod", "resources": RESOURCES}
    if tls:
        common["tls"] = {"mode": "csi", "issuerName": "fleet-ca"}
    hosts = {"tls": {**common["tls"], "hosts": ["gw.example"]}} if tls else {}
    scaling = {"scaling": {"min_replicas": 1, "max_replicas": 16}}
    gateway = body("TidegateGateway", "t", pools=["t"], config={"link_port": 8006, **scaling}, **{**common, **hosts})
    config = {"precision": "bf16", "drain_s": 7}
    return gateway, body("TidegatePool", "t", device="cuda", gpus=2, replicas=2, config=config, **common)


@pytest.fixture(scope="module")
def charts() -> dict[str, Rendered]:
    basic = {"fullnameOverride": "t", "models": {"volume": VOLUME}}
    switched = {name: {**basic, **own} for name, (own, _, _) in SWITCHED.items()}
    return render({"plain": values(), "tls": values(tls=TLS), **switched})[0]


@pytest.fixture(scope="module")
def operators() -> Rendered:
    return render({"operator": yaml.safe_load(CHART_EXAMPLES["operator"].read_text())})[0]["operator"]


def test_the_chart_installs_an_operator_that_is_closed_and_off_by_default(
    operators: Rendered, charts: dict[str, Rendered]
) -> None:
    assert (operators.error, operators.complaints) == ("", [])
    assert [one for one in charts["plain"].documents if "operator" in one["metadata"]["name"]] == []
    pod = operators.one("Deployment", "-operator")["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert pod["securityContext"]["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"]
    options = [one.partition("=")[0] for one in container["args"][2:]]
    known = {name for option in operator_command.commands["run"].params for name in option.opts}
    assert container["args"][:2] == ["operator", "run"] and set(options) <= known


def test_the_operator_of_the_example_needs_nothing_that_is_not_there(operators: Rendered) -> None:
    (container,) = operators.one("Deployment", "-operator")["spec"]["template"]["spec"]["containers"]

    assert [one for one in container["env"] if "secretKeyRef" in one.get("valueFrom", {})] == []
    assert not any(one.startswith("--conductor") for one in container["args"]), "nothing makes an admin Service"


def test_the_way_to_a_gateway_that_the_page_shows_leads_there(operators: Rendered) -> None:
    blocks = re.findall(r"<<EOF\n(.*?)^EOF$", PAGE.read_text(), re.M | re.S)
    spec = next(yaml.safe_load(one)["spec"] for one in blocks if "admin_host" in one)
    service, policy = next(list(yaml.safe_load_all(one)) for one in blocks if "NetworkPolicy" in one)
    objects = objects_of(body("TidegateGateway", "main", modelsVolume=VOLUME, **spec))
    pod = one_of(objects, "Deployment")["spec"]["template"]
    operator = operators.one("Deployment", "-operator")["spec"]["template"]["metadata"]["labels"]

    assert complaints_about([*objects, service, policy]) == []
    for selector in (service["spec"]["selector"], policy["spec"]["podSelector"]["matchLabels"]):
        assert selector.items() <= pod["metadata"]["labels"].items()
    (admin,) = policy["spec"]["ingress"]
    (peer,) = admin["from"]
    # The release is called `op` there and `edge` here.
    assert (peer["podSelector"]["matchLabels"] | {"app.kubernetes.io/instance": "edge"}).items() <= operator.items()
    assert service["spec"]["ports"][0]["port"] == admin["ports"][0]["port"] == PORTS["admin_port"]
    own = one_of(objects, "NetworkPolicy")
    assert own["metadata"]["name"] != policy["metadata"]["name"], "it stays beside this one"
    let_in = {port["port"] for rule in own["spec"]["ingress"] for port in rule["ports"]}
    assert {one["name"] for one in pod["spec"]["containers"][0]["ports"]} == let_in, "what callers use stays open"


def test_the_chart_passes_on_what_an_operator_with_conductors_needs() -> None:
    own = {"enabled": True, "conductors": {"main": "https://main-admin.prod.svc:8003"},
           "extraVolumes": [{"name": "ca", "configMap": {"name": "fleet-ca"}}],
           "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/fleet", "readOnly": True}]}  # fmt: skip
    made = render({"own": {"gateway": {"enabled": False}, "pool": {"enabled": False}, "operator": own}})[0]["own"]

    assert (made.error, made.complaints) == ("", [])
    pod = made.one("Deployment", "-operator")["spec"]["template"]["spec"]
    assert "--conductor=main=https://main-admin.prod.svc:8003" in pod["containers"][0]["args"]
    assert own["extraVolumeMounts"][0] in pod["containers"][0]["volumeMounts"]  # type: ignore[index]
    assert own["extraVolumes"][0] in pod["volumes"]  # type: ignore[index]


def test_the_operator_may_do_what_it_does_and_nothing_else(operators: Rendered) -> None:
    roles = [
        one for one in operators.documents if one["kind"] == "Role" and one["metadata"]["name"].endswith("-operator")
    ]
    assert {one["metadata"]["namespace"] for one in roles} == {"prod", "shops"}
    allowed = {
        (group, resource): set(rule["verbs"])
        for rule in roles[0]["rules"] for group in rule["apiGroups"] for resource in rule["resources"]
    }  # fmt: skip
    needed: dict[tuple[str, str], set[str]] = {("discovery.k8s.io", "endpointslices"): {"get", "list", "watch"}}
    for kind in KINDS:
        needed[GROUP, kind.plural] = {"get", "list", "watch"}
        needed[GROUP, f"{kind.plural}/status"] = {"patch"}
        if kind.name != "TidegateRollout":  # makes no objects
            needed[GROUP, f"{kind.plural}/finalizers"] = {"update"}
    for api, kind in {(one["apiVersion"], one["kind"]) for one in made()} | {
        one for each in DELETED.values() for one in each
    }:
        group, plural = api.rpartition("/")[0], path_of(api, kind, "n").rpartition("/")[2]
        watched = {"watch"} if kind in WORKLOADS else set()
        needed[group, plural] = {"get", "list", "create", "patch", "delete"} | watched

    assert allowed == needed
    assert not any("secrets" in resource or "*" in verbs for (_, resource), verbs in allowed.items())


def made() -> list[dict[str, Any]]:
    """What the examples become, and what scales by the metric."""
    examples = [one for path in sorted(EXAMPLES.glob("*.yaml")) for one in yaml.safe_load_all(path.read_text())]
    for one in examples:
        one["metadata"]["namespace"] = "prod"
    scaled = body("TidegatePool", "h", modelsVolume=VOLUME, autoscaling={"kind": "hpa"})
    return [each for one in [*examples, scaled] for each in objects_of(one)]


def test_kubernetes_knows_every_field_of_what_is_made() -> None:
    objects = made()
    definitions = [yaml.safe_load(path.read_text()) for path in definition_files.FOLDER.iterdir()]
    wrong = copy.deepcopy(objects[0])
    wrong["metadata"]["lables"] = {}

    within = [one for each in objects for one in inside(each)]
    misspelt, unknown = (copy.deepcopy(one_of(objects, "RayService")) for _ in range(2))
    misspelt["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["maxReplica"] = 3
    unknown["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["container"] = []

    assert len(objects) > 20 and len(definitions) == 5
    assert {"RayService", "EdgeApplication", "ServiceMonitor", "PodMonitor", "NetworkPolicy"} <= {
        one["kind"] for one in objects
    }
    assert len(within) == 3, "the pods of Ray's head and workers, and KubeEdge's Deployment"
    assert complaints_about([*objects, *within, *definitions]) == []
    assert len(complaints_about([wrong, misspelt, inside(unknown)[0]])) == 3 * 2, "each once a version"


def inside(one: dict[str, Any]) -> list[dict[str, Any]]:
    """What an object of another operator's carries of Kubernetes' own, as resources."""
    if one["kind"] == "EdgeApplication":
        return list(one["spec"]["workloadTemplate"]["manifests"])
    if one["kind"] != "RayService":
        return []
    cluster = one["spec"]["rayClusterConfig"]
    templates = [cluster["headGroupSpec"]["template"], *(each["template"] for each in cluster["workerGroupSpecs"])]
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "ray", **each.get("metadata", {})},
            "spec": each["spec"],
        }
        for each in templates
    ]


@pytest.mark.parametrize("name", sorted(SWITCHED))
def test_policies_and_monitors_are_those_of_the_chart(name: str, charts: dict[str, Rendered]) -> None:
    chart, (_, of_gateway, of_pool) = charts[name], SWITCHED[name]
    assert (chart.error, chart.complaints) == ("", [])
    common: dict[str, Any] = {"modelsVolume": VOLUME}
    gateway = body("TidegateGateway", "t", pools=["t"], **common, **of_gateway)
    objects = [*objects_of(gateway), *objects_of(body("TidegatePool", "t", **common, **of_pool))]
    kinds = ("NetworkPolicy", "ServiceMonitor")
    ours, theirs = (
        {(one["kind"], one["metadata"]["name"]): one for one in each if one["kind"] in kinds}
        for each in (objects, chart.documents)
    )

    assert ours.keys() == theirs.keys()
    assert name == "no metrics" or len(ours) == {"off": 0, "as it comes": 2, "peers": 2, "whoever comes": 2}.get(
        name, 4 if "monitor" in name else 2
    )
    for key, one in ours.items():
        assert unselected(one["spec"]) == unselected(theirs[key]["spec"])
        assert one["metadata"]["labels"].items() >= (MONITOR["labels"].items() if key[0] == "ServiceMonitor" else set())  # type: ignore[attr-defined]


def unselected(spec: Any) -> Any:
    """A spec in which pods and Services of ours are named by their component, and not by what the two name it."""
    if isinstance(spec, list):
        return [unselected(one) for one in spec]
    if not isinstance(spec, dict):
        return spec
    own = ("app.kubernetes.io/name", "app.kubernetes.io/instance")
    return {key: unselected(one) for key, one in spec.items() if key not in own}


def test_a_pool_on_ray_is_that_of_the_manifest_for_kuberay() -> None:
    theirs = yaml.safe_load((DEPLOY / "ray" / "rayservice.yaml").read_text())
    ours = one_of(made(), "RayService")
    (group,), (own,) = (one["spec"]["rayClusterConfig"]["workerGroupSpecs"] for one in (theirs, ours))
    workers, own_workers = (one["template"]["spec"]["containers"][0] for one in (group, own))

    assert complaints_about([theirs, *inside(theirs)]) == []
    clusters = [one["spec"]["rayClusterConfig"] for one in (theirs, ours)]
    assert clusters[0]["enableInTreeAutoscaling"] is clusters[1]["enableInTreeAutoscaling"] is True
    started = [one["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParams"] for one in (theirs, ours)]
    assert started[0] == started[1], "no replica on the head"
    assert workers["readinessProbe"] == own_workers["readinessProbe"]
    heads = [
        one["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0] for one in (theirs, ours)
    ]
    for one in (own_workers, *heads):
        assert workers["env"][0] == one["env"][0], "they serve on without the head"
    assert group["template"]["spec"]["terminationGracePeriodSeconds"] == 60
    assert own["template"]["spec"]["terminationGracePeriodSeconds"] == 60
    assert own_workers["resources"]["limits"]["nvidia.com/gpu"] == 1
    serves, own_serves = (yaml.safe_load(one["spec"]["serveConfigV2"]) for one in (theirs, ours))
    assert own_serves["proxy_location"] == serves["proxy_location"] == "Disabled"
    (application,), (own_application,) = (one.pop("applications") for one in (serves, own_serves))
    assert {**application, "args": {}} == {**own_application, "args": {}}
    numbers = ("replicas", "cpus", "gpus")
    assert [application["args"][key] for key in numbers] == [own_application["args"][key] for key in numbers]


@pytest.mark.skipif(not RAY_PYTHON.exists(), reason="`make ray` has not set up Ray here")
def test_ray_takes_the_application_and_each_replica_is_one_of_its_own() -> None:
    program = (
        "import json, sys, yaml; from ray.serve.schema import ServeDeploySchema;"
        "from cloud_pool.ray_serve import replica_config;"
        "said = yaml.safe_load(sys.stdin.read()); found = ServeDeploySchema.model_validate(said).applications[0];"
        "given = {key: one for key, one in found.args.items() if key not in ('replicas', 'cpus', 'gpus')};"
        "made = [replica_config('', given, rank, rank, '10.0.0.1') for rank in (0, 1)];"
        "json.dump([[one.name, one.grpc_port, str(one.mqtt), found.name] for one in made], sys.stdout)"
    )
    text = one_of(made(), "RayService")["spec"]["serveConfigV2"]
    done = subprocess.run(
        [RAY_PYTHON, "-c", program], input=text, capture_output=True, text=True, check=False, cwd=DEPLOY.parent,
        env={"TIDEGATE_POOL_MQTT": "mqtts://user:secret@broker:8883"},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert first[0].removesuffix("-0") == second[0].removesuffix("-1") and second[1] == first[1] + 1
    assert "broker:8883" in first[2] and "secret" not in text
    assert first[3] == APPLICATION, "its status is read under this name"


def test_agents_of_kubeedge_are_those_of_the_manifest() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "kubeedge" / "edge-application.yaml").read_text()))
    theirs, ours = (
        one["spec"]["workloadTemplate"]["manifests"][0]["spec"]["template"]["spec"]
        for one in (one_of(documents, "EdgeApplication"), one_of(made(), "EdgeApplication"))
    )

    for key in ("tolerations", "enableServiceLinks", "automountServiceAccountToken", "terminationGracePeriodSeconds",
                "securityContext"):  # fmt: skip
        assert theirs[key] == ours[key]
    assert {one["name"] for one in theirs["volumes"]} == {one["name"] for one in ours["volumes"]}
    their, own = theirs["containers"][0], ours["containers"][0]
    for key in ("args", "securityContext", "startupProbe", "volumeMounts"):
        assert their[key] == own[key]
    assert {one["name"] for one in their["env"]} <= {one["name"] for one in own["env"]}


@pytest.mark.parametrize("name", ["plain", "tls"])
@pytest.mark.parametrize(("kind", "part"), [("Deployment", "gateway"), ("StatefulSet", "pool")])
def test_pods_are_those_of_the_chart(name: str, kind: str, part: str, charts: dict[str, Rendered]) -> None:
    chart = charts[name]
    assert chart.error == ""
    gateway, pool = sent(TLS if name == "tls" else None)
    objects = objects_of(gateway if part == "gateway" else pool)
    ours, theirs = one_of(objects, kind), chart.one(kind, f"-{part}")

    assert plain(ours) == plain(theirs)
    file = {"gateway": "site.yaml", "pool": "cloud.yaml"}[part]
    assert yaml.safe_load(one_of(objects, "ConfigMap")["data"][file]) == chart.configuration(f"-{part}")


def plain(workload: dict[str, Any]) -> dict[str, Any]:
    """A workload without what the two name in their own ways: labels, the ConfigMap, and volumes' order."""
    spec = copy.deepcopy(workload["spec"])
    spec["selector"] = {}
    pod = spec["template"]["spec"]
    spec["template"]["metadata"] = {}
    for one in pod["topologySpreadConstraints"]:
        one["labelSelector"] = {}
    pod["volumes"] = {one["name"]: one for one in pod["volumes"]}
    pod["volumes"]["config"] = {}
    container = pod["containers"][0]
    container["volumeMounts"] = {one["mountPath"]: one for one in container["volumeMounts"]}
    return dict(spec)
