"""What the operator makes is what Kubernetes knows, and what the Helm chart makes of the same values."""

from __future__ import annotations

import copy
import re
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
from tidegate.tools.operator.reconciler import DELETED, WORKLOADS
from tidegate.tools.operator.rendering.gateway import PORTS

EXAMPLES = Path(__file__).parents[3] / "deploy" / "operator" / "examples"
PAGE = Path(__file__).parents[3] / "docs" / "operator.md"
RESOURCES = {"requests": {"cpu": "2", "memory": "1Gi"}, "limits": {"memory": "3Gi"}}
TLS = {"mode": "csi", "csi": {"issuerName": "fleet-ca", "gatewayHosts": ["gw.example"]}}
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
    return render({"plain": values(), "tls": values(tls=TLS)})[0]


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
    others, admin = policy["spec"]["ingress"]
    (peer,) = admin["from"]
    # The release is called `op` there and `edge` here.
    assert (peer["podSelector"]["matchLabels"] | {"app.kubernetes.io/instance": "edge"}).items() <= operator.items()
    assert service["spec"]["ports"][0]["port"] == admin["ports"][0]["port"] == PORTS["admin_port"]
    open_ports = {one["containerPort"] for one in pod["spec"]["containers"][0]["ports"]}
    assert open_ports <= {one["port"] for one in others["ports"]}, "what callers use stays open"


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

    assert len(objects) > 20 and len(definitions) == 5
    assert complaints_about([*objects, *definitions]) == []
    assert len(complaints_about([wrong])) == 2, "once a version"


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
