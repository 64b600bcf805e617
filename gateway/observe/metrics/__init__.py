"""What a gateway counts, and how Prometheus sees it: `GatewayMetrics` is all of it together."""

from gateway.observe.metrics.registry import GatewayMetrics as GatewayMetrics
