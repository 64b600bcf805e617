"""`tidegate model calibrate`: how sure an edge's answer must be, found by running the real artefacts on labelled data.

The edge's variant and the pool's answer every sample, one at a time as requests mostly come. One part of the samples
chooses the threshold (`threshold.py`), the other only shows what it does. For a user's own classifier the parts are
two halves of the file, dealt at random from a fixed seed; for the digits they are splits that training never saw.

What is written into the manifest is the section `confidence`, and the variants' qualities where none was measured
them: the gateway escalates from a worse variant to a better one, and must know which is which. `max_share` is twice
the share that was seen, so that a model whose world changes is noticed by its provisional answers and not by the pool.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidegate.arrays import array_to_tensor
from tidegate.engines.engine import Engine, EngineError, load_engine
from tidegate.models.confidence import ConfidenceMeasure
from tidegate.models.generative import CommitWindow
from tidegate.models.manifest import Confidence, Manifest, Measure, Quality, Variant, Where
from tidegate.models.repository import Repository, save_manifest
from tidegate.tools.build.errors import BuildError
from tidegate.tools.build.evaluate.threshold import (
    CalibrationGoal,
    GradedSamples,
    ThresholdOutlook,
    threshold_for,
    threshold_outlook,
)
from tidegate.tools.build.samples import Samples, load_samples
from tidegate.tools.build.staging import model_lock

LEAST_SAMPLES = 40
MOST_SAMPLES = 20_000
_LEAST_SHARE = 0.1  # `max_share` is at least this: a share of 1 % doubles by chance alone
_SEED = 7
# Models that come with data of their own: modules with `calibration_samples()` and `held_out_samples()`.
_WITH_DATA = {"digits": "tidegate.tools.build.demo.digits"}


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """How to read confidence; None: as the manifest says, else the margin of its first output."""

    measure: Measure | None = None
    output: str | None = None
    softmax: bool | None = None


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """`manifest` has the new section; the outlooks are of the samples that chose it and of those that did not.

    The section is `confidence`, or of a generating model its `commit_window`.
    """

    manifest: Manifest
    edge: Variant
    pool: Variant
    calibration: ThresholdOutlook
    held_out: ThresholdOutlook

    @property
    def section(self) -> Confidence | CommitWindow:
        generative = self.manifest.generative
        found = self.manifest.confidence if generative is None else generative.commit_window
        assert found is not None  # it was just calibrated
        return found


def calibrate(
    repository: Repository,
    name: str,
    goal: CalibrationGoal,
    *,
    version: str = "",
    data: Path | None = None,
    wishes: CalibrationOptions = CalibrationOptions(),
    write: bool = True,
) -> CalibrationResult:
    """Choose the threshold of a model in the repository, and write it into its manifest.

    Raises:
        BuildError: there is no data, an artefact does not run, or no threshold reaches the goal.
        ModelNotFound, RepositoryError: the model is not there, or its artefacts are not what its manifest says.
    """
    manifest = repository.manifest(name, version)
    if manifest.generative is not None:
        raise BuildError(f"{name_of(manifest)} generates: it is calibrated with a file of prompts and answers, --tasks")
    calibration, held_out = _samples(manifest, data)
    for variant in variants_of(manifest):
        repository.verify(manifest, variant)
    found = calibrate_manifest(manifest, repository.folder(manifest), goal, wishes, calibration, held_out)
    if write:
        with model_lock(repository.root, name):
            save_manifest(repository.folder(manifest), found.manifest)
    return found


def calibrate_manifest(
    manifest: Manifest,
    folder: Path,
    goal: CalibrationGoal,
    wishes: CalibrationOptions,
    calibration: Samples,
    held_out: Samples,
) -> CalibrationResult:
    """The manifest of the version in `folder` with a threshold that reaches the goal on `calibration`."""
    if manifest.pipeline is not None:
        raise BuildError(
            f"{name_of(manifest)} has a pipeline, and calibration runs the artefacts alone: write the section "
            "`confidence` by hand, for an output of the pipeline"
        )
    edge, pool = variants_of(manifest)
    how = _how(manifest, wishes)
    outputs = tuple(spec.name for spec in manifest.outputs)
    try:
        runners = [load_engine(one.engine, folder / one.artefact, outputs=outputs) for one in (edge, pool)]
        graded = [_graded(manifest, how, runners[0], runners[1], samples) for samples in (calibration, held_out)]
    except EngineError as error:
        raise BuildError(f"{name_of(manifest)}: {error}") from error
    if not graded[0].confidence.any():
        raise BuildError(
            f"no answer of {edge.name!r} has a confidence above 0: {how.output!r} holds no probabilities over classes; "
            "where it holds scores, say --softmax"
        )
    threshold = threshold_for(goal, graded[0])
    chosen, checked = (threshold_outlook(part, threshold) for part in graded)
    how = msgspec.structs.replace(how, threshold=threshold, max_share=max_share(chosen))
    measured = with_qualities(manifest, {edge.name: checked.edge, pool.name: checked.pool}, checked.samples)
    return CalibrationResult(msgspec.structs.replace(measured, confidence=how), edge, pool, chosen, checked)


def variants_of(manifest: Manifest) -> tuple[Variant, Variant]:
    """The edge's variant and the pool's. Raises BuildError where there are not two different ones."""
    pool = _best(manifest, "pool")
    edges = [variant for variant in manifest.variants_for("edge") if pool is not None and variant.name != pool.name]
    if pool is None or not edges:
        raise BuildError(f"{name_of(manifest)} needs a variant for the edge and another for the pool to escalate to")
    return edges[0], pool


def max_share(chosen: ThresholdOutlook) -> float:
    """Twice the share that was seen."""
    return min(1.0, max(_LEAST_SHARE, round(2 * chosen.escalated, 2)))


def halves(count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which of so many samples choose a threshold, and which show what it does: dealt at random from a fixed seed."""
    order = np.random.default_rng(_SEED).permutation(count)
    return order[: count // 2], order[count // 2 :]


def name_of(manifest: Manifest) -> str:
    return f"{manifest.name}, version {manifest.version},"


def _best(manifest: Manifest, where: Where) -> Variant | None:
    return max(
        manifest.variants_for(where), key=lambda one: -1.0 if one.quality is None else one.quality.value, default=None
    )


def _how(manifest: Manifest, wishes: CalibrationOptions) -> Confidence:
    """The section with a threshold yet to be found."""
    known = manifest.confidence or Confidence(manifest.outputs[0].name, "margin", threshold=1.0)
    names = [spec.name for spec in manifest.outputs]
    output = wishes.output or known.output
    if output not in names:
        raise BuildError(f"--output {output!r}: {name_of(manifest)} has the outputs {', '.join(names)}")
    return Confidence(
        output,
        wishes.measure or known.measure,
        threshold=1.0,
        softmax=known.softmax if wishes.softmax is None else wishes.softmax,
    )


def _samples(manifest: Manifest, data: Path | None) -> tuple[Samples, Samples]:
    inputs = [spec.name for spec in manifest.inputs if not spec.optional]
    if data is not None:
        return _halves(data, load_samples(data, inputs, most=MOST_SAMPLES))
    module = _WITH_DATA.get(manifest.name)
    if module is None:
        raise BuildError(
            f"no labelled data is known for {manifest.name!r}: give --data FILE.npz "
            f"with the arrays {', '.join(inputs)} and `labels`, a row per sample"
        )
    try:
        source: Any = importlib.import_module(module)
    except ImportError as error:
        raise BuildError(f"the data of {manifest.name} needs {error.name}: pip install 'tidegate[build]'") from error
    if manifest.version != source.VERSION:
        raise BuildError(
            f"{name_of(manifest)} may have been trained on this data: build version {source.VERSION} "
            f"(tidegate model build {manifest.name}), or give --data"
        )
    return source.calibration_samples(), source.held_out_samples()


def _halves(path: Path, samples: Samples) -> tuple[Samples, Samples]:
    count = len(samples.feeds)
    if samples.labels is None:
        raise BuildError(f"{path}: lacks the array `labels`, the right class of each sample")
    if samples.labels.ndim != 1 or samples.labels.dtype.kind not in "iu":
        raise BuildError(f"{path}: `labels` must be one whole number per sample, not {_described(samples.labels)}")
    if count < LEAST_SAMPLES:
        raise BuildError(f"{path}: {count} samples are too few, at least {LEAST_SAMPLES} are needed")
    first, second = (_chosen(samples, samples.labels, half) for half in halves(count))
    return first, second


def _chosen(samples: Samples, labels: NDArray[Any], rows: Sequence[Any] | NDArray[Any]) -> Samples:
    return Samples(tuple(samples.feeds[row] for row in rows), labels[rows])


def _described(array: NDArray[Any]) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _graded(manifest: Manifest, how: Confidence, edge: Engine, pool: Engine, samples: Samples) -> GradedSamples:
    assert samples.labels is not None  # both kinds of samples have them
    judge, spec = ConfidenceMeasure(manifest, how), next(spec for spec in manifest.outputs if spec.name == how.output)
    answers = [edge.infer(feed)[how.output] for feed in samples.feeds]
    better = [pool.infer(feed)[how.output] for feed in samples.feeds]
    return GradedSamples(
        np.array([judge.of(array_to_tensor(spec.name, answer, spec.datatype)) for answer in answers]),
        _right(answers, samples.labels),
        _right(better, samples.labels),
    )


def _right(answers: Sequence[NDArray[Any]], labels: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each answer of one row has its highest score at the label."""
    guesses = [answer.reshape(-1, answer.shape[-1])[0].argmax() for answer in answers]
    return np.asarray(np.array(guesses) == labels)


def with_qualities(manifest: Manifest, accuracies: dict[str, float], samples: int) -> Manifest:
    """Accuracies for those of the two variants that have no quality yet; never two kinds of quality in one model."""
    if any(one.quality is not None for one in manifest.variants if one.name in accuracies):
        return manifest
    variants = tuple(
        msgspec.structs.replace(one, quality=Quality("top1", round(accuracies[one.name], 5), samples))
        if one.name in accuracies
        else one
        for one in manifest.variants
    )
    return msgspec.structs.replace(manifest, variants=variants)
