"""What a gateway counts, and how Prometheus sees it: `Metrics` is all of it together."""

from gateway.metrics.exposed import Metrics as Metrics
