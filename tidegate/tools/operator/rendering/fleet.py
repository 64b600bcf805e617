"""A TidegateFleet becomes a DaemonSet for each group, with one configuration for all and settings for each group.

A group that is a NodeGroup of KubeEdge's becomes an EdgeApplication instead, with a Deployment of one agent a node.

The configuration is in a ConfigMap whose name carries its digest: a change starts agents again, few nodes at a time.
The settings are in one whose name stays and whose folder is mounted: agents follow it, so a change starts nothing.
Nothing here is as large as the fleet has devices.
"""

from __future__ import annotations

from typing import Any, Final

from tidegate.rollout.device_settings import SettingRefused, checked, flattened
from tidegate.tools.operator.conditions import ResourceCondition
from tidegate.tools.operator.rendering.monitor import pod_monitor
from tidegate.tools.operator.rendering.objects import CHECKSUM, Object, ObjectFamily, as_yaml, digest
from tidegate.tools.operator.rendering.pod_template import CONTAINER_SECURITY, POD_SECURITY, image, name_variable
from tidegate.tools.operator.rendering.process_config import MODELS, judged, merged
from tidegate.tools.operator.resource import CustomResource, Refused
from tidegate.tools.operator.specs import FleetGroupSpec, NodeGroupSpec, TidegateFleetSpec

FILE: Final = "edge.yaml"
GROUP_LABEL: Final = "tidegate.dev/group"
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


def render_fleet(resource: CustomResource) -> tuple[list[Object], str, ResourceCondition]:
    """Return its objects, the digest of its configuration, and whether its metrics are scraped. Raises Refused."""
    spec = resource.parsed(TidegateFleetSpec)
    part = part_of(resource)
    config = edge_config(spec)
    keys = {_KEYS: "".join(f"{line}\n" for line in spec.operator_keys)} if spec.operator_keys else {}
    config_map = part.config_map({FILE: as_yaml(config), **keys})
    settings = part.config_map(
        {f"{one.name}.yaml": _settings(one) for one in spec.groups}, name=f"{part.name}-settings"
    )
    checksum = digest([config, spec.operator_keys])
    monitors, monitored = pod_monitor(part, spec.pod_monitor, config)
    agents = [
        _agents(part, spec, one, _template(part, spec, one, config, config_map, settings, checksum))
        for one in spec.groups
    ]
    return [config_map, settings, *agents, *monitors], checksum, monitored


def _settings(group: FleetGroupSpec) -> str:
    try:
        checked(flattened(group.settings))
    except SettingRefused as error:
        raise Refused("InvalidSettings", f"spec.groups, {group.name}: settings: {error}"[:2000]) from error
    return as_yaml(group.settings) if group.settings else ""


def _agents(part: ObjectFamily, spec: TidegateFleetSpec, group: FleetGroupSpec, template: dict[str, Any]) -> Object:
    if group.node_group is not None:
        return _edge_application(part, spec, group, group.node_group, template)
    template["spec"]["nodeSelector"] = group.node_selector or {GROUP_LABEL: group.name}
    said = {
        "selector": {"matchLabels": _selector(part, group)},
        "updateStrategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxUnavailable": _share_or_number(spec.max_unavailable)},
        },
        "template": template,
    }
    return part.object("apps/v1", "DaemonSet", _name(part, group), labels={GROUP_LABEL: group.name}, spec=said)


def _edge_application(
    part: ObjectFamily,
    spec: TidegateFleetSpec,
    group: FleetGroupSpec,
    nodes: NodeGroupSpec,
    template: dict[str, Any],
) -> Object:
    """KubeEdge knows no DaemonSet there: pods that avoid each other make the Deployment one agent a node.

    None comes before the one before it has gone, `maxUnavailable` at a time: two on a node would be one device. By the
    same rule the scheduler keeps an agent off a node that a DaemonSet's still has.
    """
    selector = _selector(part, group)
    apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": selector}}
    template["spec"]["affinity"] = {
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}
    }  # fmt: skip
    name, labels = _name(part, group), {**part.labels, GROUP_LABEL: group.name}
    surge = {"maxSurge": 0, "maxUnavailable": _share_or_number(spec.max_unavailable)}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": part.resource.key.namespace, "labels": labels},
        "spec": {
            "replicas": nodes.nodes,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": surge},
            "selector": {"matchLabels": selector},
            "template": template,
        },
    }
    scope = {"targetNodeGroups": [{"name": nodes.name, "overriders": {"replicas": nodes.nodes}}]}
    said = {"workloadTemplate": {"manifests": [deployment]}, "workloadScope": scope}
    return part.object(
        "apps.kubeedge.io/v1alpha1", "EdgeApplication", name, labels={GROUP_LABEL: group.name}, spec=said
    )


def _name(part: ObjectFamily, group: FleetGroupSpec) -> str:
    return f"{part.name}-{group.name}"


def _selector(part: ObjectFamily, group: FleetGroupSpec) -> dict[str, str]:
    return {**part.selector, GROUP_LABEL: group.name}


def _template(
    part: ObjectFamily,
    spec: TidegateFleetSpec,
    group: FleetGroupSpec,
    config: dict[str, Any],
    config_map: Object,
    settings: Object,
    checksum: str,
) -> dict[str, Any]:
    """Everything but where its pods go."""
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
        **({"ports": [{"name": "metrics", "containerPort": config["metrics_port"]}]} if config["metrics_port"] else {}),
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
    labels = {**part.labels, GROUP_LABEL: group.name}
    return {"metadata": {"labels": labels, "annotations": {CHECKSUM: checksum}}, "spec": pod}


def _share_or_number(text: str) -> int | str:
    return text if text.endswith("%") else int(text)
