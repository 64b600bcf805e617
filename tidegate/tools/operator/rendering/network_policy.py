"""NetworkPolicies say what may reach a gateway or a pool, and what a pool may reach, as in the Helm chart.

A pool takes work from the gateways of its namespace, by whatever source those have found it, so its policy does not
depend on which of them name it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tidegate.tools.operator.rendering.objects import Object, ObjectFamily
from tidegate.tools.operator.specs import GatewayPolicySpec, Kubernetes, PoolPolicySpec


def gateway_policy(part: ObjectFamily, spec: GatewayPolicySpec, config: Mapping[str, Any]) -> list[Object]:
    """None where it is switched off. Ports are those of the container, by name."""
    if not spec.enabled:
        return []
    ports = ["http", "grpc", *(["link"] if config.get("link_port") else [])]
    return [_policy(part, ["Ingress"], ingress=[_lets_in(ports, spec.callers), *_monitoring(spec.monitoring, config)])]


def pool_policy(part: ObjectFamily, spec: PoolPolicySpec, config: Mapping[str, Any]) -> list[Object]:
    """None where it is switched off."""
    if not spec.enabled:
        return []
    gateways = {**part.selector, "app.kubernetes.io/component": "gateway"}
    del gateways["app.kubernetes.io/instance"]
    work = _lets_in(["grpc"], [{"podSelector": {"matchLabels": gateways}}])
    names = {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}
    return [
        _policy(
            part,
            ["Ingress", "Egress"],
            ingress=[work, *_monitoring(spec.monitoring, config)],
            egress=[names, *spec.egress],
        )
    ]


def _monitoring(peers: Sequence[Kubernetes], config: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [_lets_in(["metrics"], peers)] if config.get("metrics_port") else []


def _lets_in(ports: Sequence[str], peers: Sequence[Kubernetes]) -> dict[str, Any]:
    return {"ports": [{"port": one} for one in ports], **({"from": list(peers)} if peers else {})}


def _policy(part: ObjectFamily, types: list[str], **rules: Any) -> Object:
    said = {"podSelector": {"matchLabels": part.selector}, "policyTypes": types, **rules}
    return part.object("networking.k8s.io/v1", "NetworkPolicy", spec=said)
