"""Small scenarios for tests."""

from __future__ import annotations

from pathlib import Path

from simulator.scenarios.scenario_file import LoadedScenario, parse

SMALL = """
summary: two devices and a pool
duration_s: 6
warmup_s: 1
models:
  m:
    edge_ms: [[1, 4], [100, 40]]
    pool_ms: [[1, 8], [100, 9], [3200, 60]]
    edge_quality: 0.98
    edge_max_units: 100
links:
  lan: {delay_ms: 1, jitter: {dist: lognormal, ms: 0.3}}
  wan: {delay_ms: 10, jitter: {dist: lognormal, ms: 1.0}}
edges:
  - {name: device, count: 2, slow: [1.0, 2.0], link: lan}
pools:
  - {name: gpu, link: wan}
arrivals: {rate: 60}
classes:
  - {name: short, share: 3, model: m, length: {median: 20, sigma: 0.5, max: 100}, budget_ms: 200, priority: 1}
  - {name: long, share: 1, model: m, length: {median: 300, sigma: 0.3, max: 1000}, budget_ms: 500}
"""


def edited(*edits: tuple[str, str], extra: str = "") -> LoadedScenario:
    """The small fleet with pieces of its YAML replaced."""
    text = SMALL
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return LoadedScenario(parse(text + extra, "test"), Path(), "test")
