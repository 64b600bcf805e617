"""A TidegateFleet becomes a DaemonSet for each group, with one configuration for all and settings for each group.

The configuration is in a ConfigMap whose name carries its digest: a change starts agents again, few nodes at a time.
The settings are in one whose name stays and whose folder is mounted: agents follow it, so a change starts nothing.
Nothing here is as large as the fleet has devices.
"""

from __future__ import annotations

from typing import Any, Final

from tidegate.rollout.device_settings import SettingRefused, checked, flattened
from tidegate.tools.operator.rendering.objects import CHECKSUM, Object, ObjectFamily, as_yaml, digest
from tidegate.tools.operator.rendering.pod_template import CONTAINER_SECURITY, POD_SECURITY, image, name_variable
from tidegate.tools.operator.rendering.process_config import MODELS, judged, merged
from tidegate.tools.operator.resource import CustomResource, Refused
from tidegate.tools.operator.specs import FleetGroupSpec, TidegateFleetSpec

FILE: Final = "edge.yaml"
_KEYS: Final = "operators.pub"
_PKI: Final = "/etc/tidegate-pki"
_SETTINGS: Final = "/etc/tidegate-device"
_RESOURCES: Final = {"requests": {"cpu": "500m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}
# A device that is cut off keeps its agent, however long.
_TOLERATIONS: Final = (
    {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"},
    {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute"},
    {"key": "node-role.kubernetes.io/edge", "operator": "Exists", "effect": "NoSchedule"},
)


def part_of(resource: CustomResource) -> ObjectFamily:
    return ObjectFamily(resource, f"{resource.key.name}-edge", "edge")


def edge_config(spec: TidegateFleetSpec) -> dict[str, Any]:
    """Raises Refused: no agent would start with it."""
    base: dict[str, Any] = {
        "host": "0.0.0.0",
        "metrics_port": 9002,
        "model_repository": MODELS,
        "state_dir": "/var/lib/tidegate/state",
    }
    if spec.pki_path:
        base["tls"] = {"cert": f"{_PKI}/tls.crt", "key": f"{_PKI}/tls.key", "ca": f"{_PKI}/ca.crt"}
    if spec.config.get("mqtt"):
        base["dial_out"] = "always"  # a gateway does not reach into a pod behind a site's NAT
    if spec.operator_keys:
        base["rollout"] = {"keys": [f"/etc/tidegate/{_KEYS}"]}
    config = merged(base, spec.config)
    judged("edge", config)
    return config


def render_fleet(resource: CustomResource) -> list[Object]:
    """Raises Refused."""
    spec = resource.parsed(TidegateFleetSpec)
    part = part_of(resource)
    config = edge_config(spec)
    keys = {_KEYS: "".join(f"{line}\n" for line in spec.operator_keys)} if spec.operator_keys else {}
    config_map = part.config_map({FILE: as_yaml(config), **keys})
    settings = part.config_map(
        {f"{one.name}.yaml": _settings(one) for one in spec.groups}, name=f"{part.name}-settings"
    )
    return [config_map, settings, *(_daemon_set(part, spec, one, config, config_map, settings) for one in spec.groups)]


def _settings(group: FleetGroupSpec) -> str:
    try:
        checked(flattened(group.settings))
    except SettingRefused as error:
        raise Refused("InvalidSettings", f"spec.groups, {group.name}: settings: {error}"[:2000]) from error
    return as_yaml(group.settings) if group.settings else ""


def _daemon_set(
    part: ObjectFamily,
    spec: TidegateFleetSpec,
    group: FleetGroupSpec,
    config: dict[str, Any],
    config_map: Object,
    settings: Object,
) -> Object:
    name = f"{part.name}-{group.name}"
    selector = {**part.selector, "tidegate.dev/group": group.name}
    env: list[dict[str, Any]] = [
        name_variable("edge", "spec.nodeName"),
        {"name": "TIDEGATE_EDGE_DEVICE_FILE", "value": f"{_SETTINGS}/{group.name}.yaml"},
    ]
    if config.get("rollout"):
        env.append({"name": "TIDEGATE_EDGE_ROLLOUT__GROUPS", "value": f'["{group.name}"]'})
    container = {
        "name": "edge",
        **image(spec.image, "edge"),
        "args": ["edge", "--config", f"/etc/tidegate/{FILE}"],
        "env": env,
        "startupProbe": {
            "exec": {"command": ["/opt/tidegate/bin/tidegate", "health", "edge", "--config", f"/etc/tidegate/{FILE}"]},
            "timeoutSeconds": 10,
            "periodSeconds": 15,
            "failureThreshold": 40,
        },
        "resources": spec.resources or _RESOURCES,
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [
            {"name": "config", "mountPath": "/etc/tidegate", "readOnly": True},
            {"name": "settings", "mountPath": _SETTINGS, "readOnly": True},  # a folder: by subPath it would not change
            *([{"name": "pki", "mountPath": _PKI, "readOnly": True}] if spec.pki_path else []),
            {"name": "state", "mountPath": "/var/lib/tidegate"},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    pod = {
        "nodeSelector": group.node_selector or {"tidegate.dev/group": group.name},
        "tolerations": [*_TOLERATIONS, *spec.tolerations],
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 15,
        "securityContext": {key: one for key, one in POD_SECURITY.items() if not key.startswith("fsGroup")},
        "containers": [container],
        "volumes": [
            {"name": "config", "configMap": {"name": config_map["metadata"]["name"]}},
            {"name": "settings", "configMap": {"name": settings["metadata"]["name"]}},
            *([{"name": "pki", "hostPath": {"path": spec.pki_path, "type": "Directory"}}] if spec.pki_path else []),
            {"name": "state", "hostPath": {"path": spec.state_path, "type": "Directory"}},
            {"name": "tmp", "emptyDir": {"medium": "Memory", "sizeLimit": "256Mi"}},
        ],
    }
    checksum = digest([config, spec.operator_keys])
    template = {
        "metadata": {"labels": {**part.labels, **selector}, "annotations": {CHECKSUM: checksum}},
        "spec": pod,
    }
    said = {
        "selector": {"matchLabels": selector},
        "updateStrategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxUnavailable": _share_or_number(spec.max_unavailable)},
        },
        "template": template,
    }
    return part.object("apps/v1", "DaemonSet", name, labels={"tidegate.dev/group": group.name}, spec=said)


def _share_or_number(text: str) -> int | str:
    return text if text.endswith("%") else int(text)
