"""Metrics with their labels, `tidegate-*` headers and routes that pages name are those of the recorded surface."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.contract.pages.text import Piece, blocks, inline_code, pages, read
from tests.contract.surface.record import recorded

METRIC = re.compile(r"(?<![\w./-])((?:tidegate|nv_inference|gen_ai)_[a-z0-9_]+)(?:\{([a-z_, ]+)\})?(?![\w(./-])")
HEADER = re.compile(r"(?<![\w/.@-])tidegate-[a-z][a-z-]*[a-z](?![\w.*/@-])")
ROUTE = re.compile(r"(?<![\w.~-])/(?:v[12]|debug|scaling|metrics|healthz|openapi.json)(?:/[A-Za-z0-9_.{}*~-]+)*")
SERIES = ("_bucket", "_sum", "_count", "_total", "_created")
# Of the pytest plugin and of OIP's metadata, which look like metrics; the file that comes with the rules.
OTHER_NAMES = {"tidegate_paced", "tidegate_stack", "tidegate_queued"}
ABSENT = {"nv_inference_compute_input_duration_us"}  # which the design says, with its reason
# Programs, units, packages and files that are called so.
OTHER_WORDS = {
    "tidegate-edge",
    "tidegate-gateway",
    "tidegate-pool",
    "tidegate-rules",
    "tidegate-overview",
    "tidegate-links",
}


def metrics() -> dict[str, set[str]]:
    """Each metric's labels."""
    found: dict[str, set[str]] = {}
    for line in recorded("metrics"):
        name, labels = re.match(r"\w+ / ([\w:]+): \w+\((.*)\)$", line).groups()  # type: ignore[union-attr]
        found.setdefault(name, set()).update(filter(None, labels.split(", ")))
    return found


def codes() -> Iterator[Piece]:
    """Code within prose, and every line of a block."""
    for page in pages():
        yield from inline_code(page)
        for block in blocks(page):
            for number, line in enumerate(block.text.splitlines()):
                yield Piece(page, block.line + number, line)


@pytest.mark.slow
def test_every_metric_on_a_page_is_exposed_with_the_labels_that_are_named() -> None:
    known = metrics()
    labels_of_all = set().union(*known.values())
    rules = set(re.findall(r"record: (\S+)", read("deploy/prometheus/tidegate-rules.yaml")))
    wrong, seen = [], set()
    for code in codes():
        for name, labels in METRIC.findall(code.text):
            if name in OTHER_NAMES | ABSENT | rules | labels_of_all or name.endswith("_"):
                continue
            seen.add(name)
            base = name if name in known else next((name[: -len(one)] for one in SERIES if name.endswith(one)), name)
            if base not in known and f"{name}_total" not in known:
                wrong.append(f"{code.place}: {name} is no metric")
            elif strange := {one.strip() for one in labels.split(",") if one.strip()} - known.get(base, set()):
                wrong.append(f"{code.place}: {name} has no label {', '.join(sorted(strange))}")
    assert not wrong, "\n".join(wrong)
    assert len(seen) > 100


def test_every_metric_of_the_pool_that_its_page_names_in_short_is_exposed() -> None:
    known = metrics()
    (line,) = re.findall(r"(?s)\*\*Metrics\*\*.*?(?=\n- \*\*)", read("docs/pool.md"))
    short = [one for one in re.findall(r"`([a-z_]+)(?:\{([a-z_,]+)\})?`", line) if one[0] != "metrics_port"]
    assert len(short) > 20
    for name, labels in short:
        assert f"tidegate_pool_{name}" in known, name
        assert set(filter(None, labels.split(","))) <= known[f"tidegate_pool_{name}"], name


def headers() -> set[str]:
    """Words between quotes in the source, and what refusals carry."""
    found = {line.rpartition(" / ")[2] for line in recorded("literals") if re.search(r"/ tidegate-[a-z-]+[a-z]$", line)}
    return found | {word for line in recorded("headers") for word in re.findall(r" / (tidegate-[a-z-]+):", line)}


@pytest.mark.slow
def test_every_header_on_a_page_is_one_of_the_product() -> None:
    known = headers()
    wrong, seen = [], set()
    for code in codes():
        for name in set(HEADER.findall(code.text)) - OTHER_WORDS:
            seen.add(name)
            if name not in known and name != "tidegate-bugdet-ms":  # the example of a mistyped one
                wrong.append(f"{code.place}: {name}")
    assert not wrong, "\n".join(wrong)
    assert len(seen) > 12


def test_every_header_of_the_product_is_on_the_page_of_headers() -> None:
    page = read("docs/headers.md")
    silent = {
        "tidegate-arrays",
        "tidegate-code",
        "tidegate-hop",
        "tidegate-model",
        "tidegate-operator",
        "tidegate-python",
        "tidegate-recording",
    }
    assert {name for name in headers() - silent if f"`{name}" not in page} == set()


def routes() -> set[str]:
    lines = (line.split(" / ", 1)[1] for line in recorded("routes"))
    return {found[1] for line in lines if (found := re.match(r"(?:\*|[A-Z]+) (/\S*)", line))}


@pytest.mark.parametrize("own", ["/v2/tickets/{ticket}", "/debug/decisions", "/scaling"])
def test_the_routes_are_read_from_the_record(own: str) -> None:
    assert own in routes()


@pytest.mark.slow
def test_every_route_on_a_page_is_served() -> None:
    patterns = [re.compile(re.sub(r"\{[^}]*\}", r"[^/]+", re.sub(r"\{tail.*?\}", ".+", one)) + "$") for one in routes()]
    wrong, seen = [], set()
    for code in codes():
        for path in ROUTE.findall(re.sub(r"https?://[^/\s]+", "", code.text)):
            seen.add(path)
            served = any(one.match(path) for one in patterns)
            if not served and not any(one.startswith(path.removesuffix("*").rstrip("/") + "/") for one in routes()):
                wrong.append(f"{code.place}: {path}")
    assert not wrong, "\n".join(wrong)
    assert len(seen) > 20
