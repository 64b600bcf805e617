"""What the operator makes is what Kubernetes knows, and what the Helm chart makes of the same values."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.chart.rendering import Rendered, complaints_about, has_helm, render
from tests.support.operator import definition_files
from tests.support.operator.resources import VOLUME, body, objects_of, one_of

EXAMPLES = Path(__file__).parents[3] / "deploy" / "operator" / "examples"
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


def test_kubernetes_knows_every_field_of_what_is_made() -> None:
    examples = [one for path in sorted(EXAMPLES.glob("*.yaml")) for one in yaml.safe_load_all(path.read_text())]
    for one in examples:
        one["metadata"]["namespace"] = "prod"
    made = [each for one in examples for each in objects_of(one)]
    scaled = body("TidegatePool", "h", modelsVolume=VOLUME, autoscaling={"kind": "hpa"})
    definitions = [yaml.safe_load(path.read_text()) for path in definition_files.FOLDER.iterdir()]
    wrong = copy.deepcopy(made[0])
    wrong["metadata"]["lables"] = {}

    assert len(made) > 20 and len(definitions) == 5
    assert complaints_about([*made, *objects_of(scaled), *definitions]) == []
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
