"""A TidegatePool with `ray` becomes a RayService of KubeRay's: Serve places, restarts and updates its replicas.

    deploy/ray/rayservice.yaml      the same by hand; docs/ray.md says how a replica runs and is found

The pool's configuration goes into the arguments of Serve's application, and not into a file. So a changed one updates
the application in its cluster, one replica after another, each drained. What is the pods' own (image, volumes,
resources) makes KubeRay build a second cluster, and end the first once the second serves. Both announce their replicas
then, so the pods' digest is in the replicas' name: two targets of one name would be one to gateways.

KubeRay asks each worker whether Serve's proxy runs on it, unless the pod has a readiness probe. With `proxy_location:
Disabled` none runs, so workers have one: that of Ray's own node. It leaves a cluster as it is where nothing but a
number of workers has changed, so Ray's own autoscaler makes as many workers as Serve has replicas to place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tidegate.tools.operator.rendering.model import MountedModel
from tidegate.tools.operator.rendering.objects import CHECKSUM, Object, ObjectFamily, as_yaml, digest
from tidegate.tools.operator.rendering.pod_template import image
from tidegate.tools.operator.rendering.process_config import MODELS, judged, merged, named_port
from tidegate.tools.operator.resource import CustomResource, Refused
from tidegate.tools.operator.specs import RaySpec, TidegatePoolSpec

APPLICATION: Final = "pool"
_DRAIN_MARGIN_S: Final = 30  # Serve has 10 s more than the pool, and Ray's node ends after Serve
# The first of a free range: replicas of one node count up from it. Ray's own processes have 10002 to 19999.
_GRPC_PORT: Final = 21101
_NODE_HEALTH: Final = {"path": "/api/local_raylet_healthz", "port": 52365}
_HEAD_RESOURCES: Final = {"limits": {"cpu": "2", "memory": "4Gi"}, "requests": {"cpu": "1", "memory": "4Gi"}}
_BROKER_VARIABLE: Final = "TIDEGATE_POOL_MQTT"


def part_of(resource: CustomResource) -> ObjectFamily:
    """Another component than that of a StatefulSet's pods, which a Service and a budget select."""
    return ObjectFamily(resource, f"{resource.key.name}-pool", "ray-pool")


def ray_config(spec: TidegatePoolSpec) -> dict[str, Any]:
    """The keys of each replica, but for its name. Raises Refused: none would start with them."""
    base = {"grpc_port": _GRPC_PORT, "model_repository": MODELS, "device": spec.device, "log_format": "json"}
    config = merged(base, spec.config)
    judged("pool", config)
    named_port(config, "grpc_port")
    if config.get("servers", 1) != 1:
        raise Refused("InvalidConfig", "spec.config.servers: a replica on Ray is one server; ask for more replicas")
    if config.get("advertise") is not None:
        raise Refused("InvalidConfig", "spec.config.advertise: replicas on Ray have an address each; leave it out")
    if not (config.get("mqtt") or spec.env_from or any(one.get("name") == _BROKER_VARIABLE for one in spec.env)):
        words = (
            f"spec.config.mqtt: replicas on Ray announce themselves; name the broker there, or as {_BROKER_VARIABLE}"
        )
        raise Refused("InvalidConfig", words)
    return config


def ray_service(
    part: ObjectFamily, spec: TidegatePoolSpec, ray: RaySpec, resources: dict[str, Any], models: Sequence[MountedModel]
) -> Object:
    """Return the RayService, with the digest of its configuration as an annotation.

    Args:
        resources: of a worker, with its GPUs.

    Raises:
        Refused: no replica would start.
    """
    config = ray_config(spec)
    cluster = _cluster(part, spec, ray, resources, models, float(judged("pool", config).model_dump()["drain_s"]))
    name = f"{part.name}-{digest(cluster)[:6]}"
    arguments = {
        **config, "name": name, "replicas": spec.replicas, "cpus": ray.cpus,
        "gpus": spec.gpus if spec.device == "cuda" else 0,
    }  # fmt: skip
    application = {
        "name": APPLICATION,
        "import_path": "cloud_pool.ray_serve:app",
        "external_scaler_enabled": True,  # `tidegate ray-scale`
        "args": arguments,
    }
    serve = {"proxy_location": "Disabled", "applications": [application]}
    # How many there are is not of the pods: KubeRay keeps the cluster then, and so does the name.
    cluster["workerGroupSpecs"][0]["replicas"] = spec.replicas
    said = {"serveConfigV2": as_yaml(serve), "rayClusterConfig": cluster}
    made = part.object("ray.io/v1", "RayService", spec=said)
    made["metadata"]["annotations"] = {CHECKSUM: digest([config, [one.digest for one in models]])}
    return made


def _cluster(
    part: ObjectFamily,
    spec: TidegatePoolSpec,
    ray: RaySpec,
    resources: dict[str, Any],
    models: Sequence[MountedModel],
    drain_s: float,
) -> dict[str, Any]:
    fault_tolerance: dict[str, Any] = {"redisAddress": ray.redis_address}
    if ray.redis_password:
        reference = {"name": ray.redis_password.name, "key": ray.redis_password.key}
        fault_tolerance["redisPassword"] = {"valueFrom": {"secretKeyRef": reference}}
    head = {
        "name": "ray-head",
        **image(spec.image, "ray"),
        "env": _environment(spec, ray),
        **({"envFrom": spec.env_from} if spec.env_from else {}),
        "resources": ray.head_resources or _HEAD_RESOURCES,
    }
    worker = {
        "name": "ray-worker",
        **image(spec.image, "ray"),
        "env": _environment(spec, ray),
        **({"envFrom": spec.env_from} if spec.env_from else {}),
        "resources": resources,
        "readinessProbe": {
            "httpGet": _NODE_HEALTH, "initialDelaySeconds": 10, "periodSeconds": 5, "timeoutSeconds": 2,
            "failureThreshold": 10,
        },
        "volumeMounts": [*_model_mounts(spec), *(one for model in models for one in model.mounts),
                         *spec.extra_volume_mounts],
    }  # fmt: skip
    volumes = [
        *([{"name": "models", **spec.models_volume}] if spec.models_volume else []),
        *(one for model in models for one in model.volumes),
        *spec.extra_volumes,
    ]
    placed = {
        "nodeSelector": spec.node_selector, "tolerations": spec.tolerations, "affinity": spec.affinity,
        "runtimeClassName": spec.runtime_class_name,
    }  # fmt: skip
    more = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": int(drain_s) + _DRAIN_MARGIN_S,
        "volumes": volumes,
        **{key: one for key, one in placed.items() if one},
    }
    checksum = digest([one.digest for one in models]) if models else ""
    workers = {
        "groupName": "workers",
        "minReplicas": 1,
        "maxReplicas": ray.max_workers,
        "rayStartParams": {},
        "template": _template(part, spec, worker, more, checksum=checksum),
    }
    return {
        "enableInTreeAutoscaling": True,
        "gcsFaultToleranceOptions": fault_tolerance,
        # KubeRay gives it an account, by which the autoscaler asks for workers. No replica is on it, whose end would
        # take the replica along.
        "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": _template(part, spec, head, {})},
        "workerGroupSpecs": [workers],
    }


def _environment(spec: TidegatePoolSpec, ray: RaySpec) -> list[dict[str, Any]]:
    """Ray reads from the environment alone how long a node waits for the head."""
    waits = {"name": "RAY_gcs_rpc_server_reconnect_timeout_s", "value": str(ray.reconnect_timeout_seconds)}
    return [waits, *spec.env]


def _model_mounts(spec: TidegatePoolSpec) -> list[dict[str, Any]]:
    if not spec.models_volume:
        return []
    sub = {"subPath": spec.models_sub_path} if spec.models_sub_path else {}
    return [{"name": "models", "mountPath": MODELS, "readOnly": True, **sub}]


def _template(
    part: ObjectFamily,
    spec: TidegatePoolSpec,
    container: dict[str, Any],
    more: dict[str, Any],
    *,
    checksum: str = "",
) -> dict[str, Any]:
    closed = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    pod = {
        "enableServiceLinks": False,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [{**container, "securityContext": closed}],
        **({"imagePullSecrets": [{"name": one} for one in spec.image_pull_secrets]} if spec.image_pull_secrets else {}),
        **more,
    }
    annotations = {**({CHECKSUM: checksum} if checksum else {}), **spec.pod_annotations}
    return {"metadata": {"labels": part.selector, "annotations": annotations}, "spec": pod}
