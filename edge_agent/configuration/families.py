"""The settings that are changed from outside, as metrics of the agent's own port."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from edge_agent.configuration.service import ConfigurationService
from tidegate.metrics.families import gauge, single

STATES = ("committed", "planned", "active", "rolled_back", "failed")


def configuration_families(service: ConfigurationService | None) -> Iterator[Metric]:
    """None of an agent that nobody may change from outside."""
    if service is None:
        return
    report = service.report
    states = [((state,), float(report.state == state)) for state in STATES]
    yield gauge("tidegate_edge_settings", "1 in the state of settings changed from outside.", ("state",), states)
    words = "Settings that are not as its fleet or its own file desires them."
    yield single("tidegate_edge_settings_different", words, float(len(report.differs)))
    words = "1 while the device's own file of settings is refused."
    yield single("tidegate_edge_device_file_refused", words, float(bool(report.file)))
