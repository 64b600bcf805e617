"""Queries of deploy/ as tests need them: where each stands, what it names, and what promtool says of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[3]
RULES = ROOT / "deploy" / "prometheus" / "tidegate-rules.yaml"
DASHBOARDS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
PROMTOOL = shutil.which("promtool") or shutil.which("promtool", path=str(ROOT / ".venv" / "bin"))
NO_PROMTOOL = "needs promtool (`make tools`)"

# What Grafana puts in the place of its variables.
_VARIABLES = {
    "$__rate_interval": "1m",
    "$__all": ".*",
    "$instance": ".*",
    "$model": ".*",
    "$target": ".*",
    "$lane": ".*",
}
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_DURATION = re.compile(r"\[[^\]]*\]|\boffset\s+\w+")
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\s*\{([^}]*)\}")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_WORD = re.compile(r"(?<![\w.])[a-zA-Z_:][\w:]*")
_LANGUAGE = {
    "sum", "max", "min", "avg", "count", "by", "without", "on", "ignoring", "group_left", "group_right", "and", "or",
    "unless", "bool", "rate", "increase", "histogram_quantile", "max_over_time", "min_over_time", "avg_over_time",
    "vector", "time", "offset", "deriv", "sqrt", "ceil",
}  # fmt: skip


class Query(NamedTuple):
    where: str
    text: str


class Named(NamedTuple):
    """What a query names: metrics, the labels of each one's selectors, and labels that it groups by."""

    metrics: frozenset[str]
    labels: dict[str, set[str]]
    groups: frozenset[str]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def queries() -> Iterator[Query]:
    """Every expression of the rules and the dashboards, variables filled in."""
    for rule in rules():
        yield Query(rule.get("alert") or rule["record"], rule["expr"])
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                yield Query(f"{path.stem}: {panel['title']}", filled_in(target["expr"]))


def filled_in(text: str) -> str:
    for name in sorted(_VARIABLES, key=len, reverse=True):
        text = text.replace(name, _VARIABLES[name])
    assert "$" not in text, text
    return text


def named(text: str) -> Named:
    """Raises AssertionError for a word that is neither a metric of ours nor of the language."""
    bare = _STRING.sub('""', text)
    labels: dict[str, set[str]] = {}
    for metric, inside in _SELECTOR.findall(bare):
        labels.setdefault(metric, set()).update(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", inside))
    groups = {word for inside in _GROUPING.findall(bare) for word in re.findall(r"\w+", inside)}
    rest = _GROUPING.sub(lambda found: found[0].split("(")[0], re.sub(r"\{[^}]*\}", "", _DURATION.sub("", bare)))
    words = {word for word in _WORD.findall(rest) if not word.replace("e", "").isdecimal()} - _LANGUAGE
    return Named(frozenset(words), labels, frozenset(groups))


def promtool(*arguments: str) -> str:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=120, check=False)
    words = done.stdout + done.stderr
    assert done.returncode == 0, words
    return words


class Trial(NamedTuple):
    """Series with their values in promtool's notation, and queries with when to ask them and the count expected."""

    series: Sequence[tuple[str, str]]
    expected: Sequence[tuple[str, str, float | None]]  # None: no series


def judge(folder: Path, step: str, trials: Sequence[Trial]) -> None:
    """Have promtool run the rules over each trial, a value and an evaluation each `step`."""
    path = folder / "tests.yaml"
    contents = {
        "rule_files": [str(RULES)],
        "evaluation_interval": step,
        "tests": [
            {
                "interval": step,
                "input_series": [{"series": one, "values": values} for one, values in trial.series],
                "promql_expr_test": [
                    {
                        "expr": f"count({query})",
                        "eval_time": at,
                        "exp_samples": [] if count is None else [{"labels": "{}", "value": count}],
                    }
                    for query, at, count in trial.expected
                ],
            }
            for trial in trials
        ],
    }
    path.write_text(yaml.safe_dump(contents))
    promtool("test", "rules", str(path))
