"""The tables of docs/observability.md, and families as they would stand in them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from prometheus_client.metrics_core import Metric

DOCS = Path(__file__).parents[3] / "docs" / "observability.md"
_ROW = re.compile(r"^\| `([a-z_]+)` \| (\w+) \|([^|]*)\| (.+) \|$")


class Row(NamedTuple):
    kind: str
    labels: frozenset[str]


def documented(*sections: str) -> dict[str, Row]:
    """Every metric of the tables under these headings."""
    rows = {}
    section = ""
    for line in DOCS.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            section = line.lstrip("# ")
        elif section in sections and (one := _ROW.match(line)):
            rows[one[1]] = Row(one[2], frozenset(re.findall(r"`(\w+)`", one[3])))
    assert rows, f"no tables under {sections}"
    return rows


def exposed(families: Iterable[Metric]) -> dict[str, Row]:
    """By the names that the tables have. Labels are those of its samples: a family without any has none to show."""
    rows = {}
    for family in families:
        if family.name.startswith("process_"):
            continue
        kind = "counter" if family.type == "unknown" else family.type
        name = family.name + ("_total" if family.type == "counter" else "")
        rows[name] = Row(kind, frozenset({key for one in family.samples for key in one.labels} - {"le"}))
    return rows


def check(families: Iterable[Metric], *sections: str) -> set[str]:
    """Names and kinds are those of the tables, and labels too where there are samples; returns who has none."""
    seen, told = exposed(families), documented(*sections)
    assert set(seen) == set(told), "docs/observability.md has a row for each metric, and no other"
    silent = set()
    for name, row in seen.items():
        assert row.kind == told[name].kind, name
        if row.labels or not told[name].labels:
            assert row.labels == told[name].labels, name
        else:
            silent.add(name)
    return silent
