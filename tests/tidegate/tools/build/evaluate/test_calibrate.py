"""Calibrating thresholds: of the digits with their own data, and of a user's own classifier with a file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from tests.support.models.tiny_models import classifier
from tidegate.models.digest import sha256_of
from tidegate.models.manifest import Axis, Cost, Manifest, TensorSpec, Variant
from tidegate.models.repository import Repository, save_manifest
from tidegate.models.trusted_digests import FILE_NAME
from tidegate.tools.build.cli import model
from tidegate.types import Datatype

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # whoever comes first waits for the build


def run(*words: Any) -> tuple[int, str]:
    result = CliRunner().invoke(model, ["calibrate", *map(str, words)], catch_exceptions=False)
    return result.exit_code, result.stdout + ("" if result.exit_code == 0 else result.stderr)


def values(*words: Any) -> dict[str, Any]:
    done = CliRunner().invoke(model, ["calibrate", *map(str, words), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def digits(demo_repository: Repository, tmp_path: Path) -> Path:
    """A repository of one's own with the real digits."""
    shutil.copytree(demo_repository.root / "digits", tmp_path / "digits")
    shutil.copy(demo_repository.root / FILE_NAME, tmp_path)  # the pool's variant is a program
    return tmp_path


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A repository with a classifier that nobody measured, whose edge reads half of what its pool does."""
    folder = tmp_path / "own" / "1"
    folder.mkdir(parents=True)
    variants = []
    for name, where, features in (("fp32", "pool", 8), ("int8", "edge", 4)):
        path = classifier(folder / f"{name}.onnx", features=features)
        variants.append(
            Variant(
                name,
                artefact=path.name,
                engine="onnx",
                precision=name,
                where=(where,),  # type: ignore[arg-type]
                sha256=sha256_of(path),
                size_bytes=path.stat().st_size,
            )
        )
    manifest = Manifest(
        name="own",
        version="1",
        inputs=(TensorSpec("x", Datatype.FP32, ("batch", 8)),),
        outputs=(TensorSpec("scores", Datatype.FP32, ("batch", 4)),),
        variants=tuple(variants),
        cost=Cost("items", "x"),
        axes={"batch": Axis(1, 8)},
    )
    save_manifest(folder, manifest)
    return tmp_path


def labelled(path: Path, count: int = 200, **more: Any) -> Path:
    """Samples with a noisy sign of their class in either half of the features, of which the edge reads one."""
    draw = np.random.default_rng(1)
    labels = draw.integers(0, 4, count)
    x = draw.normal(0.0, 0.6, (count, 8)).astype(np.float32)
    x[np.arange(count), labels] += 1.5
    x[np.arange(count), 4 + labels] += 1.5
    np.savez(path, **{"x": x, "labels": labels, **more})
    return path


def test_the_digits_come_with_a_threshold_that_escalates_a_tenth(demo_repository: Repository) -> None:
    found = values("digits", "--escalate", "10%", "--repository", demo_repository.root, "--dry-run")
    manifest = demo_repository.manifest("digits")
    assert manifest.confidence == msgspec.convert(found["confidence"], type(manifest.confidence))
    assert (found["calibration"]["samples"], found["held_out"]["samples"]) == (225, 450)
    assert found["calibration"]["escalated"] == pytest.approx(0.1, abs=0.005)
    assert found["held_out"]["escalated"] < 0.2
    assert found["held_out"]["edge"] < found["held_out"]["combined"] <= 1.0
    assert found["held_out"]["combined"] >= found["held_out"]["pool"] - 0.005
    assert not found["written"]


def test_an_accuracy_is_reached_with_few_escalations_and_written_down(digits: Path) -> None:
    before = Repository(digits).manifest("digits")
    code, output = run("digits", "--accuracy", "99%", "--measure", "entropy", "--repository", digits)
    assert code == 0
    assert [line.split()[0] for line in output.splitlines()] == [
        "digits,", "threshold", "samples", "calibration", "held", "written"
    ]  # fmt: skip
    after = Repository(digits).manifest("digits")
    assert after.confidence is not None
    assert after.confidence.measure == "entropy"
    assert msgspec.structs.replace(after, confidence=before.confidence) == before, "nothing else changes"


def test_an_older_build_may_have_been_trained_on_the_data(digits: Path) -> None:
    shutil.move(digits / "digits" / "2", digits / "digits" / "1")
    manifest = digits / "digits" / "1" / "model.yaml"
    manifest.write_text(manifest.read_text().replace("version: '2'", "version: '1'"))
    code, output = run("digits", "--escalate", "10%", "--repository", digits)
    assert code == 1
    assert "version 1, may have been trained on this data: build version 2" in output


def test_ones_own_classifier_is_calibrated_and_measured_with_a_file(own: Path) -> None:
    data = labelled(own / "data.npz")
    found = values("own", "--escalate", "0.2", "--data", data, "--softmax", "--repository", own)
    assert (found["calibration"]["samples"], found["held_out"]["samples"]) == (100, 100)
    assert found["calibration"]["escalated"] == pytest.approx(0.2, abs=0.011)
    assert found["held_out"]["edge"] < found["held_out"]["combined"]
    after = Repository(own).manifest("own")
    assert after.confidence is not None
    assert (after.confidence.output, after.confidence.softmax) == ("scores", True)
    qualities = {one.name: one.quality and one.quality.value for one in after.variants}
    assert qualities == {"int8": found["held_out"]["edge"], "fp32": found["held_out"]["pool"]}
    again = values("own", "--escalate", "0.2", "--data", data, "--repository", own)
    assert again["confidence"] == found["confidence"], "the way of reading confidence is remembered"


def test_what_cannot_be_done_is_refused_with_the_way_out(own: Path) -> None:
    data = labelled(own / "data.npz")
    for words, message in (
        (
            ("--escalate", "10%"),
            "no labelled data is known for 'own': give --data FILE.npz with the arrays x and `labels`",
        ),
        (("--escalate", "10%", "--data", data), "'scores' holds no probabilities over classes; where it holds scores"),
        (("--accuracy", "100%", "--data", data, "--softmax"), "the best that can be reached is"),
        (("--escalate", "10%", "--data", data, "--output", "score"), "has the outputs scores"),
        (("--escalate", "10%", "--data", labelled(own / "few.npz", 20)), "20 samples are too few"),
        (
            ("--escalate", "10%", "--data", labelled(own / "odd.npz", labels=np.ones((200, 2)))),
            "`labels` must be one whole number per sample, not float64[200, 2]",
        ),
    ):
        code, output = run("own", *words, "--repository", own)
        assert (code, message in output) == (1, True), output
    assert Repository(own).manifest("own").confidence is None


def test_a_file_without_labels_and_a_model_without_a_pool_are_refused(own: Path) -> None:
    np.savez(own / "bare.npz", x=np.zeros((50, 8), np.float32))
    assert (
        "lacks the array `labels`"
        in run("own", "--escalate", "10%", "--data", own / "bare.npz", "--repository", own)[1]
    )
    manifest = Repository(own).manifest("own")
    edge_only = msgspec.structs.replace(manifest, variants=manifest.variants_for("edge"))
    save_manifest(own / "own" / "1", edge_only)
    code, output = run("own", "--escalate", "10%", "--data", labelled(own / "data.npz"), "--repository", own)
    assert code == 1
    assert "needs a variant for the edge and another for the pool" in output


@pytest.mark.parametrize("share", ["0", "101%", "x", "-1"])
def test_a_share_that_is_none_is_a_wrong_use(tmp_path: Path, share: str) -> None:
    code, output = run("digits", f"--escalate={share}", "--repository", tmp_path)
    assert code == 2
    assert "is no share" in output


def test_exactly_one_goal_is_given(tmp_path: Path) -> None:
    assert run("digits", "--repository", tmp_path)[0] == 2
    code, output = run("digits", "--escalate", "1%", "--accuracy", "99%", "--repository", tmp_path)
    assert code == 2
    assert "give one of --escalate and --accuracy" in output
