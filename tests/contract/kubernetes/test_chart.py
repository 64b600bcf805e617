"""The Helm chart, by Helm's own engine: strict schemas of two Kubernetes, and the promises that its comments make."""

from __future__ import annotations

import copy
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.chart import values_schema
from tests.support.chart.rendering import CHART, EXAMPLES, ROOT, Rendered, complaints_about, has_helm, render
from tidegate.config import load
from tidegate.tools.config_cli import config_model
from tidegate.tools.config_findings import said_wrongly

pytestmark = pytest.mark.slow
CLAIM = {"volume": {"persistentVolumeClaim": {"claimName": "models"}}}
# Values that Helm must refuse, with a word of the reason.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no models": ({}, "models.volume"),
    "unknown key": ({"models": CLAIM, "gatway": {}}, "gatway"),
    "unknown key of the gateway": ({"models": CLAIM, "gateway": {"config": {"http_prot": 8000}}}, "http_prot"),
    "unknown key in a section": ({"models": CLAIM, "gateway": {"config": {"limits": {"max_rnk": 3}}}}, "max_rnk"),
    "value of the pool": ({"models": CLAIM, "pool": {"config": {"precision": "fp8"}}}, "precision"),
    "several servers in a pod": ({"models": CLAIM, "pool": {"config": {"servers": 2}}}, "pool.config.servers"),
    "one name for two gateways": (
        {"models": CLAIM, "tls": {"mode": "secret", "secret": {"gateway": "a", "pool": "b"}}}, "gateway.replicas"
    ),
    "one name for a scaled pool": (
        {"models": CLAIM, "gateway": {"replicas": 1}, "autoscaling": {"kind": "keda"},
         "tls": {"mode": "secret", "secret": {"gateway": "a", "pool": "b"}}}, "pool.replicas"
    ),
    "names too long for certificates": (
        {"models": CLAIM, "tls": {"mode": "csi", "csi": {"issuerName": "ca"}},
         "fullnameOverride": "inference-of-the-north"}, "fullnameOverride"
    ),
    "a free port of the gateway": (
        {"models": CLAIM, "gateway": {"config": {"grpc_port": 0}}}, "gateway.config.grpc_port"
    ),
    "a free port of the pool": ({"models": CLAIM, "pool": {"config": {"grpc_port": 0}}}, "pool.config.grpc_port"),
    "KEDA asks at a free port": (
        {"models": CLAIM, "gateway": {"config": {"metrics_port": 0}}, "autoscaling": {"kind": "keda"}},
        "gateway.config.metrics_port",
    ),
    "no issuer": ({"models": CLAIM, "fullnameOverride": "t", "tls": {"mode": "csi"}}, "tls.csi.issuerName"),
}  # fmt: skip
# A field that Kubernetes does not know, in a place where the chart takes its words as they are.
MISSPELT = {"models": CLAIM, "pool": {"extraVolumes": [{"name": "x", "emptyDir": {"sizelimit": "1Gi"}}]}}
CSI = {"mode": "csi", "csi": {"issuerName": "ca"}}
SCALED = {"models": CLAIM, "fullnameOverride": "t", "autoscaling": {"kind": "keda"}}
MORE: dict[str, dict[str, Any]] = {
    "misspelt": MISSPELT,
    "keda over tls": {**SCALED, "tls": CSI},
    "other ports": {
        **SCALED,
        "gateway": {"config": {"http_port": 9000, "grpc_port": 9001, "metrics_port": 9002}},
        "pool": {"config": {"grpc_port": 9101, "metrics_port": 9102}},
    },
    "no metrics": {
        **SCALED,
        "monitoring": {"serviceMonitor": {"enabled": True}},
        "autoscaling": {"kind": "hpa"},
        "gateway": {"config": {"metrics_port": 0}},
        "pool": {"config": {"metrics_port": 0}},
    },
    "no metrics of a pool": {
        **SCALED,
        "monitoring": {"serviceMonitor": {"enabled": True}},
        "pool": {"config": {"metrics_port": None}},
    },
    "a pool alone": {
        **SCALED,
        "monitoring": {"serviceMonitor": {"enabled": True}},
        "autoscaling": {"kind": "hpa"},
        "gateway": {"enabled": False, "config": {"metrics_port": 0}},
    },
}
WITHOUT_GATEWAY = {"operator", "misspelt", "a pool alone"}
needs_helm = pytest.mark.skipif(not has_helm(), reason="`make checks` could not set up Helm's engine here")


@pytest.fixture(scope="module")
def rendering() -> tuple[dict[str, Rendered], list[Any]]:
    values = {name: yaml.safe_load(path.read_text()) for name, path in EXAMPLES.items()}
    return render(values | {name: wrong for name, (wrong, _) in WRONG.items()} | MORE)


@pytest.fixture
def rendered(rendering: tuple[dict[str, Rendered], list[Any]]) -> dict[str, Rendered]:
    return rendering[0]


@pytest.fixture(params=sorted((set(EXAMPLES) | set(MORE)) - WITHOUT_GATEWAY))
def example(request: pytest.FixtureRequest, rendered: dict[str, Rendered]) -> Rendered:
    return rendered[request.param]


def pods(example: Rendered) -> Iterator[tuple[str, dict[str, Any]]]:
    for one in example.documents:
        if one["kind"] in ("Deployment", "StatefulSet"):
            yield one["metadata"]["name"], one["spec"]["template"]


def test_the_schema_of_the_values_has_the_keys_of_the_configuration() -> None:
    assert values_schema.FILE.read_text() == values_schema.text(), "run python -m tests.support.chart.values_schema"


@needs_helm
def test_helm_finds_nothing_to_complain_of(rendering: tuple[dict[str, Rendered], list[Any]]) -> None:
    assert rendering[1] == []


@needs_helm
def test_what_each_example_makes_is_what_kubernetes_knows(example: Rendered) -> None:
    assert example.error == ""
    assert example.documents
    assert example.complaints == []


@needs_helm
def test_a_field_that_kubernetes_does_not_know_is_found(rendered: dict[str, Rendered]) -> None:
    assert len(rendered["misspelt"].complaints) == 2, "once a version"
    assert all("sizelimit" in one for one in rendered["misspelt"].complaints)


@needs_helm
@pytest.mark.parametrize("name", sorted(WRONG))
def test_wrong_values_are_refused_by_name(name: str, rendered: dict[str, Rendered]) -> None:
    assert WRONG[name][1] in rendered[name].error


@needs_helm
def test_what_is_wrong_with_others_resources_is_found(rendered: dict[str, Rendered]) -> None:
    scaled = rendered["gpu-keda"].one("ScaledObject", "-pool")
    assert complaints_about([scaled]) == []
    for path, wrong in (("pollingIntervall", 15), ("maxReplicaCount", "8")):
        assert complaints_about([{**scaled, "spec": {**scaled["spec"], path: wrong}}])
    no_target = copy.deepcopy(scaled)
    del no_target["spec"]["triggers"][0]["metadata"]["targetValue"]
    assert complaints_about([no_target])


@needs_helm
def test_the_manifests_of_deploy_are_what_kubernetes_knows() -> None:
    paths = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
    documents = [one for path in paths for one in yaml.safe_load_all(path.read_text())]

    assert len(documents) >= 7
    assert complaints_about(documents) == []


@needs_helm
def test_the_configuration_in_it_is_valid(example: Rendered, tmp_path: Path) -> None:
    parts = {"gateway": "-gateway", "pool": "-pool"}
    if not any(one["kind"] == "StatefulSet" for one in example.documents):
        del parts["pool"]
    for role, part in parts.items():
        path = tmp_path / f"{role}.yaml"
        path.write_text(yaml.safe_dump(example.configuration(part)))
        assert said_wrongly(load(config_model(role), path)) == []


@needs_helm
def test_the_values_own_keys_win_over_the_charts(rendered: dict[str, Rendered]) -> None:
    gateway = rendered["gpu-keda"].configuration("-gateway")

    assert gateway["max_body_bytes"] == 8388608  # which Go writes as 8.388608e+06
    assert gateway["scaling"] == {"min_replicas": 1, "max_replicas": 8, "start_s": 180}
    assert (gateway["gateways"], gateway["fleet"]) == (3, "shops")


@needs_helm
def test_a_gateway_finds_its_pool(rendered: dict[str, Rendered]) -> None:
    cpu = rendered["cpu"]
    source = cpu.configuration("-gateway")["discovery"][0]
    service = cpu.one("Service", "-pool")["spec"]

    assert source["service"] == cpu.one("Service", "-pool")["metadata"]["name"]
    assert source["port_name"] in {port["name"] for port in service["ports"]}
    assert service["clusterIP"] == "None"
    binding = cpu.one("RoleBinding", "-gateway")
    gateway = dict(pods(cpu))[cpu.one("Deployment", "-gateway")["metadata"]["name"]]
    assert binding["subjects"][0]["name"] == gateway["spec"]["serviceAccountName"]
    assert cpu.one("Role", "-gateway")["rules"] == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
    ]


@needs_helm
def test_what_selects_pods_selects_some(example: Rendered) -> None:
    labels = [pod["metadata"]["labels"] for _, pod in pods(example)]
    selectors = [
        (one["kind"], one["metadata"]["name"], selector)
        for one in example.documents
        if (selector := _selector(one)) is not None
    ]

    assert len(selectors) >= 4
    for kind, name, selector in selectors:
        chosen = [one for one in labels if selector.items() <= one.items()]
        assert len(chosen) == 1, f"{kind} {name}"


def _selector(one: dict[str, Any]) -> dict[str, str] | None:
    spec = one.get("spec", {})
    if one["kind"] == "Service":
        return dict(spec["selector"])
    if one["kind"] == "NetworkPolicy":
        return dict(spec["podSelector"]["matchLabels"])
    if one["kind"] in ("Deployment", "StatefulSet", "PodDisruptionBudget"):
        return dict(spec["selector"]["matchLabels"])
    return None


@needs_helm
def test_the_ports_that_are_named_are_open(example: Rendered) -> None:
    for name, pod in pods(example):
        container = pod["spec"]["containers"][0]
        role = "gateway" if name.endswith("-gateway") else "pool"
        config = example.configuration(f"-{role}")
        open_ports = {one["containerPort"] for one in container["ports"]}
        assert open_ports == {
            value for key, value in config.items() if key.endswith("_port") and key != "admin_port" and value
        }, "all but the operators', which listens on loopback"
        named = {one["name"]: one["containerPort"] for one in container["ports"]}
        probed = {probe["httpGet"]["port"] for probe in _probes(container) if "httpGet" in probe}
        assert probed <= set(named)
        asked = {probe["grpc"]["port"] for probe in _probes(container) if "grpc" in probe}
        assert asked <= {named["grpc"]}
        services = [one for one in example.documents if one["kind"] == "Service" and role in one["metadata"]["name"]]
        for port in [port for one in services for port in one["spec"]["ports"]]:
            assert port["port"] == named[port["targetPort"]], "a caller finds what the configuration says"


@needs_helm
@pytest.mark.parametrize("name", ["no metrics", "no metrics of a pool", "a pool alone"])
def test_a_port_of_metrics_that_nobody_can_find_is_left_out(name: str, rendered: dict[str, Rendered]) -> None:
    made = rendered[name]
    assert (made.error, made.complaints) == ("", [])
    services = {one["metadata"]["name"] for one in made.documents if one["kind"] == "Service"}
    gateways = {
        "no metrics": {"t-gateway"}, "no metrics of a pool": {"t-gateway", "t-gateway-metrics"}, "a pool alone": set(),
    }  # fmt: skip
    assert services == {"t-pool"} | gateways[name]
    for part, pod in pods(made):
        opened = {one["name"] for one in pod["spec"]["containers"][0]["ports"]}
        policy = made.one("NetworkPolicy", part)["spec"]["ingress"]
        assert {port["port"] for rule in policy for port in rule["ports"]} == opened, "what is let in is open"
    assert made.one("ScaledObject" if name == "no metrics of a pool" else "HorizontalPodAutoscaler", "t-pool")
    monitors = {one["metadata"]["name"] for one in made.documents if one["kind"] == "ServiceMonitor"}
    scraped = {"no metrics": set(), "no metrics of a pool": {"t-gateway"}, "a pool alone": {"t-pool"}}
    assert monitors == scraped[name], "a monitor finds a Service"


def _probes(container: dict[str, Any]) -> list[dict[str, Any]]:
    return [container[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")]


@needs_helm
def test_a_pod_is_not_killed_while_it_drains(example: Rendered) -> None:
    for name, pod in pods(example):
        role = "gateway" if name.endswith("-gateway") else "pool"
        keys = example.configuration(f"-{role}")
        drain_s = keys.get("drain_s", config_model(role).model_fields["drain_s"].default)
        sleeps_s = pod["spec"]["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert pod["spec"]["terminationGracePeriodSeconds"] >= sleeps_s + drain_s + 5


@needs_helm
def test_every_pod_is_as_closed_as_it_can_be(example: Rendered) -> None:
    for _name, pod in pods(example):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["enableServiceLinks"] is False, "TIDEGATE_GATEWAY_METRICS_PORT would be an address"
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            writable = {one["mountPath"] for one in container["volumeMounts"] if not one.get("readOnly")}
            assert writable <= {"/tmp", "/var/lib/tidegate", "/etc/tidegate"}


@needs_helm
def test_the_pool_is_scaled_as_in_the_manifests_without_a_chart(rendered: dict[str, Rendered]) -> None:
    kubernetes = ROOT / "deploy" / "kubernetes"
    keda = yaml.safe_load((kubernetes / "pool-keda.yaml").read_text())["spec"]
    hpa = next(iter(yaml.safe_load_all((kubernetes / "pool-hpa.yaml").read_text())))["spec"]

    of_keda = rendered["gpu-keda"].one("ScaledObject", "-pool")["spec"]
    of_hpa = rendered["tls-hpa"].one("HorizontalPodAutoscaler", "-pool")["spec"]

    assert of_keda["advanced"] == keda["advanced"]
    assert (of_hpa["behavior"], of_hpa["metrics"]) == (hpa["behavior"], hpa["metrics"])
    assert "replicas" not in rendered["gpu-keda"].one("StatefulSet", "-pool")["spec"], "it would be set back"
    url = of_keda["triggers"][0]["metadata"]["url"]
    service = rendered["gpu-keda"].one("Service", "-gateway-metrics")["metadata"]["name"]
    assert url == f"http://{service}.prod.svc:8002/scaling"


@needs_helm
def test_keda_asks_at_the_port_of_the_configuration(rendered: dict[str, Rendered]) -> None:
    trigger = rendered["other ports"].one("ScaledObject", "-pool")["spec"]["triggers"][0]["metadata"]

    assert trigger["url"] == "http://t-gateway-metrics.prod.svc:9002/scaling"
    assert "unsafeSsl" not in trigger


@needs_helm
def test_over_tls_keda_can_ask_a_gateway(rendered: dict[str, Rendered]) -> None:
    scaled = rendered["keda over tls"]
    trigger = scaled.one("ScaledObject", "-pool")["spec"]["triggers"][0]["metadata"]
    gateway = dict(pods(scaled))["t-gateway"]["spec"]
    volume = next(one for one in gateway["volumes"] if one["name"] == "pki")["csi"]["volumeAttributes"]

    host = trigger["url"].removeprefix("https://").partition(":")[0]
    assert host in volume["csi.cert-manager.io/dns-names"].split(",")
    assert trigger["unsafeSsl"] == "true", "KEDA has no CA of the fleet"


@needs_helm
def test_a_scaled_pool_keeps_the_replicas_that_it_has(tmp_path: Path) -> None:
    """Helm's engine asks no cluster here, so what it would answer is put in the question's place."""
    chart = tmp_path / "tidegate"
    shutil.copytree(CHART, chart)
    template = chart / "templates" / "pool.yaml"
    asks = 'lookup "apps/v1" "StatefulSet" .Release.Namespace $name'
    assert asks in template.read_text()
    template.write_text(template.read_text().replace(asks, 'dict "spec" (dict "replicas" 7.0)'))

    found = render({"scaled": SCALED, "fixed": {**SCALED, "autoscaling": {"kind": "none"}}}, chart)[0]

    assert found["scaled"].complaints == []
    assert found["scaled"].one("StatefulSet", "-pool")["spec"]["replicas"] == 7
    assert found["fixed"].one("StatefulSet", "-pool")["spec"]["replicas"] == 1


@needs_helm
def test_the_alerts_are_those_of_the_repository(rendered: dict[str, Rendered]) -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "tidegate-rules.yaml").read_text())

    assert rendered["gpu-keda"].one("PrometheusRule", "tide")["spec"] == rules
    for part in ("gateway", "pool"):
        monitor = rendered["gpu-keda"].one("ServiceMonitor", part)["spec"]
        labels = [one["metadata"]["labels"] for one in rendered["gpu-keda"].documents if one["kind"] == "Service"]
        assert sum(monitor["selector"]["matchLabels"].items() <= one.items() for one in labels) == 1
        assert monitor["endpoints"][0]["relabelings"] == [{"targetLabel": "job", "replacement": f"tidegate-{part}"}]


@needs_helm
def test_a_gpu_is_asked_for_with_the_image_for_it(rendered: dict[str, Rendered]) -> None:
    container = rendered["gpu-keda"].one("StatefulSet", "-pool")["spec"]["template"]["spec"]["containers"][0]

    assert container["image"].startswith("localhost/tidegate-pool-cuda:")
    assert container["resources"]["limits"] == {"memory": "32Gi", "nvidia.com/gpu": 1}
    assert rendered["gpu-keda"].configuration("-pool")["device"] == "cuda"
    plain = rendered["cpu"].one("StatefulSet", "-pool")["spec"]["template"]["spec"]["containers"][0]
    assert plain["image"].startswith("localhost/tidegate-pool-cpu:")
    assert "nvidia.com/gpu" not in plain["resources"]["limits"]


@needs_helm
def test_over_tls_each_pod_has_the_certificate_of_its_name(rendered: dict[str, Rendered]) -> None:
    for name, pod in pods(rendered["tls-hpa"]):
        role = "gateway" if name.endswith("-gateway") else "pool"
        volume = next(one for one in pod["spec"]["volumes"] if one["name"] == "pki")["csi"]["volumeAttributes"]
        assert volume["csi.cert-manager.io/uri-sans"] == f"tidegate://{role}/${{POD_NAME}}"
        assert f"${{POD_NAME}}.{role}.tidegate.internal" in volume["csi.cert-manager.io/dns-names"].split(",")
        named = pod["spec"]["containers"][0]["env"][0]
        assert named["name"] == f"TIDEGATE_{role.upper()}_NAME"
        assert named["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}


@needs_helm
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed here")
def test_kustomize_takes_what_the_chart_makes(rendered: dict[str, Rendered], tmp_path: Path) -> None:
    overlay = tmp_path / "overlay"
    shutil.copytree(ROOT / "deploy" / "kustomize", overlay)
    (overlay / "rendered.yaml").write_text(yaml.safe_dump_all(rendered["cpu"].documents))

    built = subprocess.run(["kubectl", "kustomize", str(overlay)], capture_output=True, text=True, check=False)

    assert built.returncode == 0, built.stderr
    documents = list(yaml.safe_load_all(built.stdout))
    assert len(documents) == len(rendered["cpu"].documents)
    assert complaints_about(documents) == []
    deployment = next(one for one in documents if one["kind"] == "Deployment")
    assert deployment["spec"]["template"]["spec"]["priorityClassName"] == "inference"


def test_the_charts_version_is_the_projects() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

    assert (chart["version"], chart["appVersion"]) == (project, project)
