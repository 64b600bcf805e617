"""A TidegateGateway becomes a Deployment behind two Services, with the one right that discovery needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tidegate.tools.operator.conditions import ResourceCondition
from tidegate.tools.operator.rendering.model import MountedModel
from tidegate.tools.operator.rendering.monitor import METRICS_LABEL, service_monitor
from tidegate.tools.operator.rendering.network_policy import gateway_policy
from tidegate.tools.operator.rendering.objects import Object, ObjectFamily, as_yaml, digest
from tidegate.tools.operator.rendering.pod_template import disruption_budget, image, name_variable, pod_template
from tidegate.tools.operator.rendering.process_config import MODELS, TLS, judged, merged, named_port
from tidegate.tools.operator.resource import CustomResource, ResourceKey
from tidegate.tools.operator.specs import TidegateGatewaySpec

_CLOSING_S: Final = 15  # what is under way is answered by then; the process needs some seconds more to close
_RESOURCES: Final = {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"memory": "1Gi"}}
FILE: Final = "site.yaml"
PORTS: Final = {"http_port": 8000, "grpc_port": 8001, "metrics_port": 8002, "admin_port": 8003}


def part_of(resource: CustomResource) -> ObjectFamily:
    return ObjectFamily(resource, f"{resource.key.name}-gateway", "gateway")


def scaling_url(key: ResourceKey, spec: Mapping[str, Any] | None, *, encrypted: bool) -> str:
    """Where in the cluster a gateway says how many replicas its pools need; "" where it has no metrics port.

    Args:
        spec: the gateway's; None: there is no such gateway yet, and it will have the usual port.
        encrypted: whether it is then taken for one with TLS.
    """
    said = spec or {}
    port = (said.get("config") or {}).get("metrics_port", PORTS["metrics_port"])
    if spec is not None:
        encrypted = (said.get("tls") or {}).get("mode", "none") != "none"
    scheme = "https" if encrypted else "http"
    return f"{scheme}://{key.name}-gateway-metrics.{key.namespace}.svc:{port}/scaling" if port else ""


def gateway_config(spec: TidegateGatewaySpec) -> dict[str, Any]:
    """Raises Refused: the gateway would not start with it."""
    base: dict[str, Any] = {
        "host": "0.0.0.0",
        **PORTS,
        "model_repository": MODELS,
        "gateways": max(1, spec.replicas),
        "drain_s": float(spec.drain_seconds),
        "log_format": "json",
    }
    if spec.pools:
        base["discovery"] = [
            {"source": "kubernetes", "service": f"{name}-pool", "port_name": "grpc"} for name in spec.pools
        ]
    if spec.tls.mode != "none":
        base["tls"] = dict(TLS)
    config = merged(base, spec.config)
    judged("gateway", config)
    for key in ("http_port", "grpc_port"):
        named_port(config, key)
    return config


def render_gateway(resource: CustomResource, models: Sequence[MountedModel]) -> tuple[list[Object], ResourceCondition]:
    """Return its objects, and whether its metrics are scraped. Raises Refused."""
    spec = resource.parsed(TidegateGatewaySpec)
    part = part_of(resource)
    config = gateway_config(spec)
    config_map = part.config_map({FILE: as_yaml(config)})
    monitors, monitored = service_monitor(part, spec.service_monitor, config, encrypted=spec.tls.mode != "none")
    objects = [
        config_map,
        *_account(part, watches=_watches(config)),
        *_services(part, spec, config),
        *gateway_policy(part, spec.network_policy, config),
        _deployment(part, spec, config, config_map, models),
        *disruption_budget(part, spec),
        *monitors,
    ]
    return objects, monitored


def _watches(config: dict[str, Any]) -> bool:
    return any(one.get("source") == "kubernetes" for one in config.get("discovery") or ())


def _account(part: ObjectFamily, *, watches: bool) -> list[Object]:
    account = part.object("v1", "ServiceAccount", automountServiceAccountToken=watches)
    if not watches:
        return [account]
    rule = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
    subject = {"kind": "ServiceAccount", "name": part.name, "namespace": part.resource.key.namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": part.name}
    api = "rbac.authorization.k8s.io/v1"
    return [
        account,
        part.object(api, "Role", rules=[rule]),
        part.object(api, "RoleBinding", subjects=[subject], roleRef=role),
    ]


def _services(part: ObjectFamily, spec: TidegateGatewaySpec, config: dict[str, Any]) -> list[Object]:
    protocol = "http" if spec.tls.mode == "none" else "https"
    ports: list[dict[str, Any]] = [
        {"name": "http", "port": config["http_port"], "targetPort": "http", "appProtocol": protocol},
        {"name": "grpc", "port": config["grpc_port"], "targetPort": "grpc"},
    ]
    if link_port := config.get("link_port"):
        ports.append({"name": "link", "port": link_port, "targetPort": "link"})
    callers = part.object("v1", "Service", spec={"type": spec.service.type, "selector": part.selector, "ports": ports})
    if spec.service.annotations:
        callers["metadata"]["annotations"] = spec.service.annotations
    if not config["metrics_port"]:
        return [callers]
    # A gateway that has no target yet is not ready, and is watched all the same.
    metrics = {
        "type": "ClusterIP",
        "publishNotReadyAddresses": True,
        "selector": part.selector,
        "ports": [{"name": "metrics", "port": config["metrics_port"], "targetPort": "metrics"}],
    }
    return [callers, part.object("v1", "Service", f"{part.name}-metrics", labels=METRICS_LABEL, spec=metrics)]


def _deployment(
    part: ObjectFamily,
    spec: TidegateGatewaySpec,
    config: dict[str, Any],
    config_map: Object,
    models: Sequence[MountedModel],
) -> Object:
    named = {"http": "http_port", "grpc": "grpc_port", "metrics": "metrics_port", "link": "link_port"}
    ports = [{"name": name, "containerPort": config[key]} for name, key in named.items() if config.get(key)]
    container = {
        "name": "gateway",
        **image(spec.image, "gateway"),
        "args": ["gateway", "--config", f"/etc/tidegate/{FILE}"],
        "env": [name_variable("gateway"), *spec.env],
        "ports": ports,
        **_probes("HTTP" if spec.tls.mode == "none" else "HTTPS"),
        "lifecycle": {"preStop": {"sleep": {"seconds": spec.pre_stop_sleep_seconds}}},
        "resources": spec.resources or _RESOURCES,
    }
    namespace = part.resource.key.namespace
    template = pod_template(
        part,
        spec,
        container,
        config_map=config_map,
        models=models,
        tmp={"medium": "Memory", "sizeLimit": "64Mi"},
        grace_s=spec.pre_stop_sleep_seconds + spec.drain_seconds + _CLOSING_S,
        checksum=digest([config, [one.digest for one in models]]),
        dns_names=[
            f"{name}.{namespace}.svc{zone}"
            for name in (part.name, f"{part.name}-metrics")
            for zone in ("", ".cluster.local")
        ],
    )
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    said = {
        "replicas": spec.replicas,
        "selector": {"matchLabels": part.selector},
        "strategy": strategy,
        "template": template,
    }
    return part.object("apps/v1", "Deployment", spec=said)


def _probes(scheme: str) -> dict[str, Any]:
    """Live as long as it answers at all; ready when a target can be used, and no more once it drains."""

    def asks(path: str, **numbers: int) -> dict[str, Any]:
        return {"httpGet": {"path": f"/v2/health/{path}", "port": "http", "scheme": scheme}, **numbers}

    return {
        "startupProbe": asks("live", periodSeconds=2, failureThreshold=30),
        "livenessProbe": asks("live", periodSeconds=10, timeoutSeconds=5, failureThreshold=6),
        "readinessProbe": asks("ready", periodSeconds=2, timeoutSeconds=2, failureThreshold=2),
    }
