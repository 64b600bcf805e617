"""`tidegate model paced`: a model for trying out routing, from a few numbers or from a scenario."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import yaml
from click.testing import CliRunner, Result

from simulator.scenarios.scenario import ModelSpec
from simulator.scenarios.scenario_file import SCENARIOS, load
from tidegate.engines.paced import read_pace
from tidegate.models.manifest import Manifest
from tidegate.models.repository import Repository
from tidegate.tools.build.cli import model
from tidegate.tools.build.demo.paced import parse_points
from tidegate.tools.build.errors import BuildError


def paced(root: Path, *words: str) -> Result:
    return CliRunner().invoke(model, ["paced", *words, "--repository", str(root)])


def added(root: Path, *words: str) -> Manifest:
    result = paced(root, *words)
    assert result.exit_code == 0, result.output
    repository = Repository(root)
    manifest = repository.manifest(words[0])
    for variant in manifest.variants:
        repository.verify(manifest, variant)
    return manifest


def test_a_few_points_make_a_text_encoder_for_edges_and_the_pool(tmp_path: Path) -> None:
    manifest = added(tmp_path, "encoder", "--edge-ms", "8:8,512:250", "--pool-ms", "1:8,512:18", "--edge-noise", "0.2")
    assert [(one.name, one.where, one.engine) for one in manifest.variants] == [
        ("int8", ("edge",), "paced"),
        ("fp32", ("pool",), "paced"),
    ]
    assert manifest.platform == "tidegate_paced"
    pace = read_pace(Repository(tmp_path).artefact(manifest, manifest.variants[0]))
    assert (pace.cost_ms, pace.noise_sigma) == (((8.0, 8.0), (512.0, 250.0)), 0.2)


def test_a_scenario_has_the_costs_already(tmp_path: Path) -> None:
    manifest = added(tmp_path, "fleet", "--scenario", str(SCENARIOS / "office_wifi.yaml"))
    (spec,) = load("office_wifi").scenario.models.values()
    edge, pool = manifest.variants
    assert edge.max_tokens == spec.edge_max_units
    assert edge.quality is not None and edge.quality.value == spec.edge_quality
    assert read_pace(Repository(tmp_path).artefact(manifest, pool)).cost_ms == spec.pool_ms


def test_a_model_of_the_repository_lends_its_shapes(tmp_path: Path) -> None:
    first = added(tmp_path, "first", "--edge-ms", "1:5", "--edge-max-tokens", "64")
    second = added(tmp_path, "second", "--like", "first", "--edge-ms", "1:9")
    assert (second.inputs, second.outputs, second.axes) == (first.inputs, first.outputs, first.axes)
    assert second.variants[0].max_tokens == 64
    assert second.variants[0].quality == first.variants[0].quality
    third = added(tmp_path, "third", "--like", "first", "--edge-ms", "1:9", "--edge-max-tokens", "32")
    assert third.variants[0].max_tokens == 32


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("m",), "it runs nowhere: give --edge-ms"),
        (("m", "--edge-ms", "8-8"), "--edge-ms '8-8': must look like UNITS:MS"),
        (("m", "--edge-ms", "1:0"), "key 'cost_ms'"),
        (("m", "--edge-ms", "1:1", "--edge-noise", "9"), "key 'noise_sigma'"),
        (("m", "--like", "other", "--edge-ms", "1:1"), "other"),
        (("bad/name", "--edge-ms", "1:1"), "'bad/name' must be"),
        (("m", "--scenario", "gone.yaml"), "gone.yaml: is no readable YAML"),
    ],
)
def test_what_cannot_be_done_is_one_line_that_says_why(tmp_path: Path, words: tuple[str, ...], reason: str) -> None:
    result = paced(tmp_path, *words)
    assert result.exit_code == 1
    assert reason in result.output
    assert not (tmp_path / "m" / "1").exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("models: {}", "key 'models'"),
        ("[]", "key 'models'"),
        ("models: {a: {edge_ms: [[1, 2]]}, b: {}}", "has several models: choose one with --model (a, b)"),
        ("models: {a: {edge_ms: x}}", "key 'models.a'"),
    ],
)
def test_a_scenario_that_does_not_serve_says_why(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(text)
    result = paced(tmp_path, "m", "--scenario", str(path))
    assert result.exit_code == 1
    assert reason in result.output


def test_one_model_of_several_can_be_chosen(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("models: {a: {edge_ms: [[1, 2]]}, b: {pool_ms: [[1, 3]]}}")
    assert [one.name for one in added(tmp_path, "m", "--scenario", str(path), "--model", "b").variants] == ["fp32"]
    assert "there is no model 'c'" in paced(tmp_path, "n", "--scenario", str(path), "--model", "c").output


def test_what_is_there_stays_unless_force_is_given(tmp_path: Path) -> None:
    added(tmp_path, "m", "--edge-ms", "1:5")
    assert "--force" in paced(tmp_path, "m", "--edge-ms", "1:6").output
    added(tmp_path, "m", "--edge-ms", "1:6", "--force")


@pytest.mark.slow
@pytest.mark.parametrize("words", ["512:nan", "inf:3", "8", "a:b", "8:8:8"])
def test_points_that_are_no_finite_numbers_are_refused(words: str) -> None:
    with pytest.raises(BuildError, match="--edge-ms"):
        parse_points("--edge-ms", words)


def test_measuring_a_paced_model_gives_its_own_table_back_as_a_scenario_wants_it(tmp_path: Path) -> None:
    assert paced(tmp_path, "m", "--edge-ms", "1:6,64:20", "--pool-ms", "1:30").exit_code == 0
    found = CliRunner().invoke(model, ["measure", "m", "--repository", str(tmp_path), "--seconds", "3"])
    assert found.exit_code == 0, found.output
    spec = msgspec.convert(yaml.safe_load(found.stdout)["models"]["m"], ModelSpec)
    assert spec.edge_ms is not None and spec.pool_ms is not None
    # Never much below: its pace has a little noise, and what else runs here only adds to it.
    assert dict(spec.pool_ms)[1.0] >= 0.7 * 30.0
    assert dict(spec.edge_ms)[1.0] >= 0.7 * 6.0
