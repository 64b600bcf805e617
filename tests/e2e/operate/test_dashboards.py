"""Every query of the dashboards and the alerts against the real /metrics of a running gateway, pool and edge."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.support.faults.fleet_stack import FleetStack
from tests.support.mqtt.brokers import MOSQUITTO
from tests.support.observe.metric_tables import documented
from tests.support.observe.promql import (
    DASHBOARDS,
    NO_PROMTOOL,
    PROMTOOL,
    Trial,
    filled_in,
    judge,
    named,
    queries,
    rules,
)
from tidegate.tools.build.demo.paced import PacedCosts, add_paced

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.needs_mosquitto,
    pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed"),
    pytest.mark.timeout(240),
]
SHORT, LONG = 20, 300  # tokens; no edge takes a long one
TABLES = (
    "Gateway",
    "Pool",
    "Edge",
    "The process itself, at all three",
    "Triton's names, at all three",
    "OpenAI's routes, in OpenTelemetry's words",
)
SCRAPES = {"job", "instance"}  # labels that a scrape adds
PARTS = {"gateway": "tidegate-gateway", "pool": "tidegate-pool", "a": "tidegate-edge"}

# Documented as absent until they are known, which takes a pool's measure, and the rules that are made of them.
NOT_YET = {
    "tidegate_pool_replicas_needed",
    "tidegate_pool_demand_replicas",
    "tidegate_pool_demand_variance",
    "tidegate_pool_demand_backlog",
}
WITH_TLS = {  # documented as absent without it, as in this fleet
    "tidegate_certificate_not_before_timestamp_seconds",
    "tidegate_certificate_not_after_timestamp_seconds",
}
RULES_OF_THEM = {"tidegate:pool_replicas_demand", "tidegate:pool_replicas_needed"}
NOTHING_OF_IT = {"tidegate-links: Failed attempts"}  # none failed

Scraped = dict[str, list[Metric]]


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    """The families of each part, after some requests."""
    folder = tmp_path_factory.mktemp("scraped")
    costs = PacedCosts(edge_ms=((1, 5), (100, 30)), pool_ms=((1, 10), (1000, 40)), edge_max_units=100)
    add_paced("encoder", costs, folder / "models")
    part = {"warmup_budget_s": 1.0, "metrics_port": 0}
    with FleetStack(folder / "run", folder / "models", edges={"a": part}, pool=part) as fleet:
        for tokens in (SHORT, LONG) * 6:
            _ask(fleet.http, tokens)
        yield {
            name: list(text_string_to_metric_families(_read(_metrics_of(fleet.part(name).addresses)))) for name in PARTS
        }


def _metrics_of(addresses: dict[str, str]) -> str:
    return f"http://{addresses['metrics'].removeprefix('http://')}/metrics"


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def _ask(url: str, tokens: int) -> None:
    inputs = [
        {"name": name, "datatype": "INT64", "shape": [1, tokens], "data": [1] * tokens}
        for name in ("input_ids", "attention_mask")
    ]
    headers = {"content-type": "application/json", "tidegate-budget-ms": "20000"}
    body = json.dumps({"inputs": inputs}).encode()
    request = urllib.request.Request(f"{url}/v2/models/encoder/infer", body, headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status == 200


def family_of(name: str) -> str:
    return re.sub(r"_(bucket|sum|count)$", "", name)


def known(scraped: Scraped) -> dict[str, set[str]]:
    """Labels by metric: those that samples show, and where there are none yet, those of the documentation.

    The documentation is held against what the processes expose elsewhere (tests/metrics).
    """
    told = {name: set(row.labels) for name, row in documented(*TABLES).items()}
    found: dict[str, set[str]] = {name: told[name] for name in NOT_YET | WITH_TLS}
    for family in (one for families in scraped.values() for one in families):
        name = family.name + ("_total" if family.type == "counter" else "")
        shown = {label for sample in family.samples for label in sample.labels}
        found.setdefault(name, set()).update(shown or told.get(name, set()))
    return found


def test_every_metric_and_label_of_every_query_is_there(scraped: Scraped) -> None:
    metrics = known(scraped)
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    asked = list(queries())
    assert len(asked) > 90
    for query in asked:
        found = named(query.text)
        assert found.metrics, query
        labels: set[str] = set()
        for name in found.metrics:
            if name == "up" or name in recorded:
                labels |= {"job", "instance", "model"}
                continue
            own = metrics.get(name) or metrics.get(family_of(name))
            assert own is not None, f"{query.where}: nobody exposes {name}"
            own = own | SCRAPES | {"le"}
            assert found.labels.get(name, set()) <= own, f"{query.where}: {name} has {sorted(own)}"
            labels |= own
        assert found.groups <= labels, f"{query.where}: groups by {sorted(found.groups - labels)}"


@pytest.mark.skipif(PROMTOOL is None, reason=NO_PROMTOOL)
def test_every_query_of_the_dashboards_brings_series_where_there_is_something_to_show(
    scraped: Scraped, tmp_path: Path
) -> None:
    series = [
        (_written(sample.name, {**sample.labels, "job": PARTS[part], "instance": part}), _values(sample.value, counts))
        for part, families in scraped.items()
        for family in families
        for sample in family.samples
        for counts in [
            family.type in ("counter", "histogram", "unknown") and sample.name != "process_start_time_seconds"
        ]
        if not sample.name.endswith("_created")
    ]
    there = {name.partition("{")[0] for name, _ in series} | {
        rule["record"] for rule in rules() if "record" in rule and "d" not in rule["record"].partition("rate")[2]
    }
    shown = [
        query
        for query in queries()
        if query.where not in NOTHING_OF_IT
        and ": " in query.where
        and named(query.text).metrics <= there - RULES_OF_THEM
        and "tidegate_deadline_missed:" not in query.text
    ]
    assert len(shown) > 45

    judge(tmp_path, "15s", [Trial(series, [(f"count({query.text})", "9m", 1.0) for query in shown])])


def _written(name: str, labels: dict[str, str]) -> str:
    return f"{name}{{{','.join(f'{key}={json.dumps(value)}' for key, value in sorted(labels.items()))}}}"


def _values(value: float, counts: bool) -> str:
    """Ten minutes of it. What counts goes on counting, or rates would have nothing to show."""
    return f"{value}+{1 if counts else 0}x40"


def test_dashboards_can_be_imported_and_no_panel_overlaps_another() -> None:
    assert [path.stem for path in DASHBOARDS] == ["tidegate-links", "tidegate-overview", "tidegate-pool"]
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        assert board["uid"] == path.stem
        ids = [panel["id"] for panel in board["panels"]]
        assert len(ids) == len(set(ids))
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            place = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert place["x"] + place["w"] <= 24
            assert not cells & taken, panel["title"]
            taken |= cells
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                inner = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"])
                assert inner is not None
                assert named(filled_in(inner[1])).metrics <= documented(*TABLES).keys() | {
                    "tidegate_pool_batch_rows_count"
                }
