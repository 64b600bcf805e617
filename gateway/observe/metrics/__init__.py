"""What a gateway counts, and how Prometheus sees it: `Metrics` is all of it together."""

from gateway.observe.metrics.registry import Metrics as Metrics
