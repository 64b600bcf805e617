"""A trial runs a pipeline's steps around each artefact while the model is added, as the workers of targets run them.

A file that is no tokenizer, a module that cannot be run, and classes without a name would else be found by the first
target that loads the model, or by callers, who are told that their requests are wrong. What is not installed here is
said and not tried: a laptop has no need of what devices have. Modules may refuse what is made up, which is said too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from tidegate.engines.engine import Engine, EngineError
from tidegate.models.example import example_arrays, least_lengths
from tidegate.models.manifest import Manifest, Pipeline, Where
from tidegate.models.steps import LabelsStep, TokenizeStep, TopKStep
from tidegate.pipeline.config import default_steps
from tidegate.pipeline.pipeline_engine import PipelineEngine
from tidegate.pipeline.plan import StepPlan, plan_of
from tidegate.pipeline.refusal import StepRefused
from tidegate.pipeline.scores import Labels
from tidegate.tools.build.errors import BuildError


def try_steps(manifest: Manifest, files: Mapping[str, Path], engines: Mapping[Where, Engine], notes: list[str]) -> None:
    """Raise BuildError unless the steps load, and do the smallest inputs with every artefact.

    Args:
        files: what the steps read, by the names that they have in the manifest.
    """
    pipeline = manifest.pipeline
    if pipeline is None:
        return
    for step, classes in _named_classes(pipeline):
        if classes > (names := _names_in(step, files[step.file])):
            raise BuildError(f"step labels ({step.file}): {classes} classes, and {files[step.file]} has {names} lines")
    notes.extend(_refused_texts(manifest, pipeline))
    with TemporaryDirectory(prefix="tidegate-steps-") as folder:
        for name, path in files.items():
            (Path(folder) / name).symlink_to(path.resolve())
        plan = plan_of(manifest, folder, default_steps().limits)
        assert plan is not None  # it has a pipeline
        for where, engine in engines.items():
            _try(where, plan, engine, manifest, notes)


def _try(where: Where, plan: StepPlan, engine: Engine, manifest: Manifest, notes: list[str]) -> None:
    try:
        PipelineEngine(plan, engine).infer(example_arrays(manifest, least_lengths(manifest)))
    except StepRefused as error:
        if not plan.pipeline.modules:
            raise BuildError(f"the steps cannot do what is made up for them: {error}") from error
        notes.append(f"{where}: made-up inputs are refused: {error}")
    except EngineError as error:
        if not isinstance(error.__cause__, ImportError):
            words = str(error).replace(f"{plan.folder}/", "")
            raise BuildError(f"the steps cannot be run around the {where}'s artefact: {words}") from error
        notes.append(f"{where}: not tried with its steps: {error}")


def _names_in(step: LabelsStep, path: Path) -> int:
    try:
        return len(Labels(step, path))
    except (OSError, ValueError) as error:
        raise BuildError(f"step labels ({step.file}): {path}: {error}") from error


def _named_classes(pipeline: Pipeline) -> Iterator[tuple[LabelsStep, int]]:
    """Each step that names the best classes, with how many there are, where that is fixed."""
    shapes = {spec.name: spec.shape for spec in (*pipeline.outputs, *pipeline.tensors)}
    best = {step.outputs[1]: step for step in pipeline.steps if isinstance(step, TopKStep) and len(step.outputs) > 1}
    for step in pipeline.steps:
        if isinstance(step, LabelsStep) and step.inputs[0] in best:
            classes = shapes.get(best[step.inputs[0]].inputs[0], ("",))[-1]
            if isinstance(classes, int):
                yield step, classes


def _refused_texts(manifest: Manifest, pipeline: Pipeline) -> Iterator[str]:
    """What to say of texts that are cut at more tokens than the model takes."""
    shapes = {spec.name: spec.shape for spec in pipeline.inputs}
    for step in pipeline.steps:
        axis = shapes.get(step.outputs[0], ("",))[-1]
        if isinstance(step, TokenizeStep) and isinstance(axis, str) and axis in manifest.axes:
            most = manifest.axes[axis].max
            if step.max_tokens > most:
                yield (
                    f"step tokenize: texts of more than {most} tokens are refused, since axis {axis} ends there and "
                    f"max_tokens does not (max_tokens={most} cuts them)"
                )
