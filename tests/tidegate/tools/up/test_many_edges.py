"""Twenty edges on one machine: planned side by side after the first one, with its figures, and told what they take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.support.models.tiny_models import tiny_repository
from tidegate.models.repository import load_manifest, save_manifest
from tidegate.tools.build.demo.paced import PacedCosts, add_paced
from tidegate.tools.up.many_edges import EDGE_BYTES, memory_note, share_costs
from tidegate.tools.up.plan import Options, ProcessPlan, plan

POINTS = [[1.0, 0.002], [8.0, 0.01]]


def twenty(folder: Path, **changes: object) -> Options:
    return Options(folder, folder / "models", edges=20, **changes)  # type: ignore[arg-type]


def edges_of(folder: Path) -> list[ProcessPlan]:
    return [one for one in plan(twenty(folder)).processes if one.role == "edge"]


def costs_path(edge: ProcessPlan) -> Path:
    return Path(str((edge.config or {})["state_dir"])) / "costs.json"


def test_the_first_of_twenty_edges_starts_alone_and_the_others_together() -> None:
    planned = plan(twenty(Path("/data"), cores=4, links=("edge-3=flap_fast", "broker=broker_restart")))
    assert [[one.name for one in together] for together in planned.starts] == [
        ["broker"], ["link-broker"], ["pool"], ["edge-1"], [f"edge-{number}" for number in range(2, 21)],
        ["link-edge-3"], ["gateway"],
    ]  # fmt: skip
    assert planned.at_once == 4
    assert len({(port.host, port.number) for port in planned.ports}) == len(planned.ports)


@pytest.mark.parametrize("edges", [0, 1, 2])
def test_few_edges_start_one_after_the_other(edges: int) -> None:
    planned = plan(Options(Path("/data"), Path("/data/models"), edges=edges))
    assert [together[0].name for together in planned.starts] == [one.name for one in planned.processes]
    assert all(len(together) == 1 for together in planned.starts)


def test_what_the_first_edge_measured_is_there_for_the_others_and_what_they_measured_stays(tmp_path: Path) -> None:
    first, second, third, *_ = edges_of(tmp_path)
    for edge, costs in ((first, {"minilm": POINTS}), (third, {"minilm": [[1.0, 9.0]], "rolled out": POINTS})):
        costs_path(edge).parent.mkdir(parents=True)
        costs_path(edge).write_text(json.dumps(costs))
    assert share_costs(first, (second, third))
    assert json.loads(costs_path(second).read_bytes()) == {"minilm": POINTS}
    assert json.loads(costs_path(third).read_bytes()) == {"minilm": POINTS, "rolled out": POINTS}


@pytest.mark.parametrize("content", [None, b"", b"[]", b"{", b"{}"])
def test_without_figures_nothing_is_shared_and_each_has_to_measure(tmp_path: Path, content: bytes | None) -> None:
    first, *others = edges_of(tmp_path)
    if content is not None:
        costs_path(first).parent.mkdir(parents=True)
        costs_path(first).write_bytes(content)
    assert not share_costs(first, others)
    assert not any(costs_path(edge).exists() for edge in others)


def test_too_many_edges_for_the_memory_are_told_of_with_how_many_would_fit(tmp_path: Path) -> None:
    add_paced("encoder", PacedCosts(edge_ms=((1, 4),), pool_ms=((1, 4),)), tmp_path / "models")
    note = memory_note(20, tmp_path / "models", EDGE_BYTES * 10.5)
    assert note.startswith("20 edges take some 3.8 GB of memory, and 2.0 GB are free") and "--edges 10" in note
    assert memory_note(20, tmp_path / "models", EDGE_BYTES * 30.0) == ""
    assert memory_note(20, tmp_path / "nowhere", None) == ""


@pytest.mark.slow
def test_of_each_model_the_version_counts_that_an_edge_serves(tmp_path: Path) -> None:
    root = tiny_repository(tmp_path, ("1", "2", "3"))
    least = memory_of(root)
    for version, where in (("2", "edge"), ("3", "pool")):
        folder = root / "double" / version
        manifest = load_manifest(folder)
        (variant,) = manifest.variants
        heavy = replace(variant, size_bytes=10**9, where=(where,))
        save_manifest(folder, replace(manifest, variants=(heavy,)))
    assert memory_of(root) == least  # the file of one is cut, and the other is for pools
    (root / "double" / "2" / "model.yaml").write_text("name: [")
    assert memory_of(root) == least
    (root / "double" / "1" / "int8.onnx").unlink()
    assert memory_of(root) < least


def memory_of(root: Path) -> float:
    """Bytes that an edge is said to take, to a kilobyte; none of it is free."""
    low, high = 0.0, 1e12
    while high - low > 1.0:
        middle = (low + high) / 2
        low, high = (middle, high) if memory_note(1, root, middle) else (low, middle)
    return round(high)
