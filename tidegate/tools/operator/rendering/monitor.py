"""What the Prometheus operator scrapes by: a ServiceMonitor as the Helm chart has it, and a PodMonitor of a fleet.

Where the configuration names no port of metrics there is nothing to scrape, and so no monitor; the condition
`Monitored` says so, because somebody has asked for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tidegate.tools.operator.conditions import ResourceCondition
from tidegate.tools.operator.rendering.objects import Object, ObjectFamily
from tidegate.tools.operator.specs import MonitorSpec

_API: Final = "monitoring.coreos.com/v1"
METRICS_LABEL: Final = {"tidegate/metrics": "true"}  # of the Service that has the port


def service_monitor(
    part: ObjectFamily, spec: MonitorSpec, config: Mapping[str, Any], *, encrypted: bool = False
) -> tuple[list[Object], ResourceCondition]:
    """Return it, or none, and whether something is scraped.

    Args:
        encrypted: whether metrics are served over TLS. The certificate is not verified then: the fleet's CA is in no
            place where Prometheus finds it.
    """
    selector = {"matchLabels": {**part.selector, **METRICS_LABEL}}
    return _monitor(part, "ServiceMonitor", "endpoints", selector, spec, config, encrypted=encrypted)


def pod_monitor(
    part: ObjectFamily, spec: MonitorSpec, config: Mapping[str, Any]
) -> tuple[list[Object], ResourceCondition]:
    """For agents, which no Service stands before."""
    selector = {"matchLabels": part.selector}
    return _monitor(part, "PodMonitor", "podMetricsEndpoints", selector, spec, config, encrypted=False)


def _monitor(
    part: ObjectFamily,
    kind: str,
    endpoints: str,
    selector: dict[str, Any],
    spec: MonitorSpec,
    config: Mapping[str, Any],
    *,
    encrypted: bool,
) -> tuple[list[Object], ResourceCondition]:
    if not spec.enabled:
        return [], ResourceCondition("Monitored", "False", "NotAsked")
    if not config.get("metrics_port"):
        words = f"spec.config.metrics_port: none is named, so there is no {kind}; name one"
        return [], ResourceCondition("Monitored", "False", "NoMetrics", words)
    endpoint = {
        "port": "metrics",
        "interval": spec.interval,
        **({"scheme": "https", "tlsConfig": {"insecureSkipVerify": True}} if encrypted else {}),
        # Alerts go by jobs whose names begin with `tidegate`.
        "relabelings": [{"targetLabel": "job", "replacement": f"tidegate-{part.component}"}],
    }
    made = part.object(_API, kind, labels=spec.labels, spec={"selector": selector, endpoints: [endpoint]})
    return [made], ResourceCondition("Monitored", "True", "Applied")
