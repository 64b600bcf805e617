"""NetworkPolicies say what may reach a gateway or a pool, and what a pool may reach, as in the Helm chart.

A pool takes work from the gateways of its namespace, by whatever source those have found it, so its policy does not
depend on which of them name it. It calls the broker and the collector that it is configured with, at any address: a
policy knows no names of hosts, and either may be outside of the cluster. Only their ports are known, and where a Secret
has the URL not even these, so the usual ones are let out then.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from tidegate.tools.operator.rendering.objects import Object, ObjectFamily
from tidegate.tools.operator.specs import GatewayPolicySpec, Kubernetes, PoolPolicySpec

_PORTS: Final = {"mqtt": 1883, "mqtts": 8883, "http": 80, "https": 443}
_BROKERS: Final = (1883, 8883)
_COLLECTORS: Final = (4318,)
# Variables that have one of a pool's URLs, and the ports that it has where it cannot be read.
_VARIABLES: Final[Mapping[str, tuple[int, ...]]] = {
    "TIDEGATE_POOL_MQTT": _BROKERS,
    "TIDEGATE_POOL_TRACING__ENDPOINT": _COLLECTORS,
}
_UNREADABLE: Final = "?"


def gateway_policy(part: ObjectFamily, spec: GatewayPolicySpec, config: Mapping[str, Any]) -> list[Object]:
    """None where it is switched off. Ports are those of the container, by name."""
    if not spec.enabled:
        return []
    ports = ["http", "grpc", *(["link"] if config.get("link_port") else [])]
    return [_policy(part, ["Ingress"], ingress=[_lets_in(ports, spec.callers), *_monitoring(spec.monitoring, config)])]


def pool_policy(
    part: ObjectFamily, spec: PoolPolicySpec, config: Mapping[str, Any], env: Sequence[Kubernetes]
) -> list[Object]:
    """None where it is switched off.

    Args:
        env: variables of the container.
    """
    if not spec.enabled:
        return []
    gateways = {**part.selector, "app.kubernetes.io/component": "gateway"}
    del gateways["app.kubernetes.io/instance"]
    work = _lets_in(["grpc"], [{"podSelector": {"matchLabels": gateways}}])
    names = {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}
    called = dict.fromkeys(port for url, usual in _urls(config, env) for port in _ports_of(url, usual))
    calls = [{"ports": [{"port": port} for port in called]}] if called else []
    return [
        _policy(
            part,
            ["Ingress", "Egress"],
            ingress=[work, *_monitoring(spec.monitoring, config)],
            egress=[names, *calls, *spec.egress],
        )
    ]


def _urls(config: Mapping[str, Any], env: Sequence[Kubernetes]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What the pool calls, each with the ports that are usual for it."""
    yield config.get("mqtt") or "", _BROKERS
    yield (config.get("tracing") or {}).get("endpoint") or "", _COLLECTORS
    for one in env:
        if usual := _VARIABLES.get(str(one.get("name", "")).upper()):
            yield _UNREADABLE if "valueFrom" in one else str(one.get("value") or ""), usual


def _ports_of(url: str, usual: tuple[int, ...]) -> tuple[int, ...]:
    """The port of a URL that says one, or that of its scheme; the usual ones where neither can be read."""
    if not url:
        return ()
    head = re.match(r"([a-z]+)://[^/?#]*", url, re.IGNORECASE)
    if head is None:
        return usual
    said = re.search(r":([0-9]+)$", head[0])
    port = int(said[1]) if said else _PORTS.get(head[1].lower(), 0)
    return (port,) if 0 < port < 65536 else usual


def _monitoring(peers: Sequence[Kubernetes], config: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [_lets_in(["metrics"], peers)] if config.get("metrics_port") else []


def _lets_in(ports: Sequence[str], peers: Sequence[Kubernetes]) -> dict[str, Any]:
    return {"ports": [{"port": one} for one in ports], **({"from": list(peers)} if peers else {})}


def _policy(part: ObjectFamily, types: list[str], **rules: Any) -> Object:
    said = {"podSelector": {"matchLabels": part.selector}, "policyTypes": types, **rules}
    return part.object("networking.k8s.io/v1", "NetworkPolicy", spec=said)
