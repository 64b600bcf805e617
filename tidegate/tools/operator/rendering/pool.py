"""A TidegatePool becomes a StatefulSet behind a headless Service, and what scales it.

Who scales acts on the StatefulSet and not on the resource: so a pool grows and shrinks also while there is no operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tidegate.tools.operator.conditions import ResourceCondition
from tidegate.tools.operator.rendering.gateway import scaling_url
from tidegate.tools.operator.rendering.model import MountedModel
from tidegate.tools.operator.rendering.monitor import METRICS_LABEL, service_monitor
from tidegate.tools.operator.rendering.network_policy import pool_policy
from tidegate.tools.operator.rendering.objects import Object, ObjectFamily, as_yaml, digest
from tidegate.tools.operator.rendering.pod_template import disruption_budget, image, name_variable, pod_template
from tidegate.tools.operator.rendering.process_config import MODELS, TLS, judged, merged, named_port
from tidegate.tools.operator.rendering.ray_service import part_of as part_on_ray
from tidegate.tools.operator.rendering.ray_service import ray_service
from tidegate.tools.operator.resource import CustomResource, Refused, ResourceKey
from tidegate.tools.operator.specs import TidegatePoolSpec

_CLOSING_S: Final = 15
_RESOURCES: Final = {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"memory": "4Gi"}}
FILE: Final = "cloud.yaml"
# The signal holds back by itself (scaling.scale_down_s): not twice.
_BEHAVIOR: Final = {
    "scaleUp": {"stabilizationWindowSeconds": 0},
    "scaleDown": {
        "stabilizationWindowSeconds": 0,
        "policies": [{"type": "Percent", "value": 50, "periodSeconds": 60}],
    },
}
_SCALED: Final = ResourceCondition("Autoscaled", "True", "Applied")


def part_of(resource: CustomResource) -> ObjectFamily:
    return ObjectFamily(resource, f"{resource.key.name}-pool", "pool")


def pool_config(spec: TidegatePoolSpec) -> dict[str, Any]:
    """Raises Refused: the pool would not start with it."""
    base: dict[str, Any] = {
        "host": "0.0.0.0",
        "grpc_port": 8101,
        "metrics_port": 8102,
        "model_repository": MODELS,
        "device": spec.device,
        "log_format": "json",
    }
    if spec.tls.mode != "none":
        base["tls"] = dict(TLS)
    config = merged(base, spec.config)
    if config.get("servers", 1) != 1:
        words = "spec.config.servers: a pod of a pool is one server; ask for more replicas instead"
        raise Refused("InvalidConfig", words)
    judged("pool", config)
    named_port(config, "grpc_port")
    return config


def render_pool(
    resource: CustomResource, models: Sequence[MountedModel], gateway: CustomResource | None = None
) -> tuple[list[Object], list[ResourceCondition]]:
    """Return its objects, and whether something scales it and scrapes its metrics.

    Args:
        gateway: the one that scales it; None: it is not there yet.

    Raises:
        Refused: it cannot become anything.
    """
    spec = resource.parsed(TidegatePoolSpec)
    if spec.ray is not None:
        made = ray_service(part_on_ray(resource), spec, spec.ray, _resources(spec), models)
        return [made], [ResourceCondition(one, "False", "NotAsked") for one in ("Autoscaled", "Monitored")]
    part = part_of(resource)
    config = pool_config(spec)
    config_map = part.config_map({FILE: as_yaml(config)})
    monitors, monitored = service_monitor(part, spec.service_monitor, config)
    scalers, scaled = _scaling(part, spec, gateway)
    objects = [
        config_map,
        part.object("v1", "ServiceAccount", automountServiceAccountToken=False),
        _service(part, config),
        *pool_policy(part, spec.network_policy, config, spec.env),
        _stateful_set(part, spec, config, config_map, models),
        *disruption_budget(part, spec),
        *monitors,
        *scalers,  # last: where KEDA is not installed yet, the pool serves all the same
    ]
    return objects, [scaled, monitored]


def _service(part: ObjectFamily, config: dict[str, Any]) -> Object:
    """Headless: gateways read its EndpointSlices, and choose among the pods themselves."""
    ports = [{"name": "grpc", "port": config["grpc_port"], "targetPort": "grpc"}]
    if config["metrics_port"]:
        ports.append({"name": "metrics", "port": config["metrics_port"], "targetPort": "metrics"})
    said = {"clusterIP": "None", "selector": part.selector, "ports": ports}
    return part.object("v1", "Service", labels=METRICS_LABEL, spec=said)


def _stateful_set(
    part: ObjectFamily,
    spec: TidegatePoolSpec,
    config: dict[str, Any],
    config_map: Object,
    models: Sequence[MountedModel],
) -> Object:
    ports = [{"name": "grpc", "containerPort": config["grpc_port"]}]
    if config["metrics_port"]:
        ports.append({"name": "metrics", "containerPort": config["metrics_port"]})
    container = {
        "name": "pool",
        **image(spec.image, f"pool-{spec.device}"),
        "args": ["pool", "--config", f"/etc/tidegate/{FILE}"],
        "env": [name_variable("pool"), *spec.env],
        "ports": ports,
        **_probes(spec, config["grpc_port"]),
        "lifecycle": {"preStop": {"sleep": {"seconds": spec.pre_stop_sleep_seconds}}},
        "resources": _resources(spec),
    }
    drain_s = judged("pool", config).model_dump()["drain_s"]
    template = pod_template(
        part,
        spec,
        container,
        config_map=config_map,
        models=models,
        tmp={},
        grace_s=spec.pre_stop_sleep_seconds + int(drain_s) + _CLOSING_S,
        checksum=digest([config, [one.digest for one in models]]),
        more={"runtimeClassName": spec.runtime_class_name} if spec.runtime_class_name else None,
    )
    said = {
        "serviceName": part.name,
        **({"replicas": spec.replicas} if spec.autoscaling.kind == "none" else {}),
        "podManagementPolicy": "Parallel",  # replicas do not wait for each other
        "selector": {"matchLabels": part.selector},
        "template": template,
    }
    return part.object("apps/v1", "StatefulSet", spec=said)


def _resources(spec: TidegatePoolSpec) -> dict[str, Any]:
    said = spec.resources or _RESOURCES
    if spec.device != "cuda" or not spec.gpus:
        return said
    return {**said, "limits": {spec.gpu_resource: spec.gpus, **said.get("limits", {})}}


def _probes(spec: TidegatePoolSpec, grpc_port: int) -> dict[str, Any]:
    """Kubernetes' probes of gRPC know no TLS: with it the image's own command asks, at an interpreter's start each."""
    if spec.tls.mode == "none":
        asks: dict[str, Any] = {"grpc": {"port": grpc_port}}
        within_s, every_s = 2, 2
    else:
        command = ["/opt/tidegate/bin/tidegate", "health", "pool", "--config", f"/etc/tidegate/{FILE}"]
        asks = {"exec": {"command": command}}
        within_s, every_s = 10, 15
    return {
        "startupProbe": {
            **asks, "periodSeconds": 5, "timeoutSeconds": within_s, "failureThreshold": (spec.start_seconds + 4) // 5
        },
        # Workers that die or hang are replaced by the pool itself; only a pool whose port is shut is started again.
        "livenessProbe": {
            "tcpSocket": {"port": "grpc"}, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6
        },
        "readinessProbe": {**asks, "periodSeconds": every_s, "timeoutSeconds": within_s, "failureThreshold": 2},
    }  # fmt: skip


def _scaling(
    part: ObjectFamily, spec: TidegatePoolSpec, gateway: CustomResource | None
) -> tuple[list[Object], ResourceCondition]:
    scaling = spec.autoscaling
    target = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": part.name}
    if scaling.kind == "hpa":
        metric = {
            "metric": {"name": "tidegate_pool_replicas_needed"},
            "target": {"type": "AverageValue", "averageValue": "1"},
        }
        said = {
            "scaleTargetRef": target,
            "minReplicas": scaling.min_replicas,
            "maxReplicas": scaling.max_replicas,
            "behavior": _BEHAVIOR,
            "metrics": [{"type": "External", "external": metric}],
        }
        return [part.object("autoscaling/v2", "HorizontalPodAutoscaler", spec=said)], _SCALED
    if scaling.kind == "none":
        return [], ResourceCondition("Autoscaled", "False", "NotAsked")
    key = ResourceKey("TidegateGateway", part.resource.key.namespace, scaling.gateway)
    url = scaling_url(key, None if gateway is None else gateway.spec, encrypted=spec.tls.mode != "none")
    if not url:
        # Not refused: what the pool runs does not depend on who scales it.
        words = (
            f"spec.autoscaling.gateway: {key} has config.metrics_port 0, a free one, so nothing scales this pool and "
            "it keeps the replicas that it has; name one there"
        )
        return [], ResourceCondition("Autoscaled", "False", "NoMetrics", words)
    trigger = {
        "type": "metrics-api",
        "metricType": "AverageValue",
        "metadata": {"url": url, "valueLocation": "pool_replicas_needed", "targetValue": "1", **_trust(url)},
    }
    # No `fallback`: a gateway that does not know yet answers 503, and no metric leaves the pool as it is.
    said = {
        "scaleTargetRef": target,
        "pollingInterval": scaling.polling_interval,
        "minReplicaCount": scaling.min_replicas,
        "maxReplicaCount": scaling.max_replicas,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": _BEHAVIOR}},
        "triggers": [trigger],
    }
    return [part.object("keda.sh/v1alpha1", "ScaledObject", spec=said)], _SCALED


def _trust(url: str) -> dict[str, str]:
    """KEDA takes a CA from a Secret alone, and the fleet's comes to each pod by the CSI driver.

    So the certificate is not verified, as by the chart's ServiceMonitor: who can answer in the gateway's place sets a
    number within the bounds, and learns nothing.
    """
    return {"unsafeSsl": "true"} if url.startswith("https:") else {}
