"""A pipeline as an engine: a caller's tensors in, a caller's tensors out, with the model somewhere in the middle.

    request ─▶ steps before ─▶ model ─▶ steps after ─▶ answer

It stands where the model's own engine would stand in a worker process (`part: all`), or runs one side of the steps for
a model that is elsewhere (`before`, `after`). Steps are made when the engine is loaded: files are read, modules are
compiled, and whatever is wrong with them is an EngineError then.

Whatever a step does with one request stays with that request: it is a StepRefused, which names the step. What steps
and the model give is compared with the manifest (`tensor_check.py`) before anything else sees it. Steps see the tensors
that they name, and nothing of other requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidegate.engines.errors import EngineError
from tidegate.engines.protocol import Arrays, Engine
from tidegate.models.manifest import TensorSpec
from tidegate.models.steps import (
    ImageDecodeStep,
    LabelsStep,
    NormaliseStep,
    PoolingStep,
    ResizeStep,
    SoftmaxStep,
    Step,
    TokenizeStep,
    TopKStep,
    kind_of,
)
from tidegate.pipeline import image, scores
from tidegate.pipeline.image_decode import ImageDecoder
from tidegate.pipeline.plan import StepPlan
from tidegate.pipeline.refusal import StepRefused
from tidegate.pipeline.tensor_check import TensorCheck
from tidegate.pipeline.tokenize import TextTokens
from tidegate.types import Datatype

_Given = Sequence[NDArray[Any]]
_Tensors = dict[str, NDArray[Any]]
_UNUSABLE: Final = (ValueError, TypeError, IndexError, ArithmeticError, MemoryError)  # what numpy raises for a tensor


class StepCall(NamedTuple):
    """What a step may need beyond its tensors: the lengths of the request's axes, and what is left of its budget."""

    lengths: dict[str, int]
    budget_s: float


_Compute = Callable[[_Given, StepCall], _Given]


class _LoadedStep(NamedTuple):
    """A step with what it was made of."""

    title: str
    takes: tuple[str, ...]
    gives: tuple[TensorCheck, ...]
    compute: _Compute


class PipelineEngine:
    """The steps of a plan around `inner`; without one, the side that the plan names. Blocks while it loads.

    Raises:
        EngineError: a step's file is missing or no such file, or its runtime is not installed.
    """

    def __init__(self, plan: StepPlan, inner: Engine | None = None) -> None:
        if (inner is None) is (plan.part == "all"):
            raise ValueError(f"part {plan.part!r} {'needs' if inner is None else 'takes no'} model")
        self._plan = plan
        self._inner = inner
        self.device_meter = getattr(inner, "device_meter", None)
        specs = _specs(plan)
        pipeline = plan.pipeline
        self._checks = {name: TensorCheck(spec, plan.axes) for name, spec in specs.items()}
        self._of_inner = tuple(TensorCheck(spec, plan.axes) for spec in pipeline.outputs)
        self._before = tuple(_loaded(one, specs, plan) for one in pipeline.before) if plan.part != "after" else ()
        self._after = tuple(_loaded(one, specs, plan) for one in pipeline.after) if plan.part != "before" else ()
        self._for_model = tuple(spec.name for spec in pipeline.inputs)

    def infer(self, inputs: Arrays) -> _Tensors:
        """As `compute`, with all the time of the world."""
        return self.compute(inputs, inf)

    def within(self, budget_s: float) -> BudgetedPipeline:
        """The engine for one request with so much left of its budget."""
        return BudgetedPipeline(self, budget_s)

    def compute(self, inputs: Arrays, budget_s: float) -> _Tensors:
        """The outputs of this part, for its inputs. Blocks.

        Raises:
            StepRefused: a step cannot do this request; StepTooLate: not in time.
            EngineError: the model raised, or gave what the manifest does not promise.
        """
        call = StepCall({}, budget_s)
        for name, array in inputs.items():
            self._learn(name, array, call.lengths)
        tensors = dict(inputs)
        self._run(self._before, tensors, call)
        if self._plan.part == "before":
            return {name: tensors[name] for name in dict.fromkeys((*self._for_model, *self._plan.kept))}
        if self._inner is not None:
            tensors |= self._of_model({name: tensors[name] for name in self._for_model}, call.lengths)
        self._run(self._after, tensors, call)
        return {spec.name: tensors[spec.name] for spec in self._plan.outputs}

    def _learn(self, name: str, array: NDArray[Any], lengths: dict[str, int]) -> None:
        check = self._checks.get(name)
        if check is None:
            raise StepRefused(f"there is no tensor {name!r} in this pipeline")
        if problem := check.problem(array, lengths):
            raise StepRefused(problem)

    def _run(self, steps: Sequence[_LoadedStep], tensors: _Tensors, call: StepCall) -> None:
        for step in steps:
            try:
                given = step.compute([tensors[name] for name in step.takes], call)
            except StepRefused as error:
                raise type(error)(f"{step.title}: {error}") from error
            except _UNUSABLE as error:
                raise StepRefused(f"{step.title}: cannot use its tensors: {error}") from error
            for check, array in zip(step.gives, given, strict=False):
                if problem := check.problem(array, call.lengths):
                    raise StepRefused(f"{step.title}: {problem}")
                tensors[check.name] = array

    def _of_model(self, inputs: _Tensors, lengths: dict[str, int]) -> _Tensors:
        assert self._inner is not None  # its caller has looked
        outputs = self._inner.infer(inputs)
        found: _Tensors = {}
        for check in self._of_inner:
            name = check.name
            if name not in outputs:
                raise EngineError(f"the artefact gave no output {name!r} (it gave {', '.join(outputs) or 'none'})")
            array = _as_declared(check.spec, outputs[name])
            if problem := check.problem(array, lengths):
                raise EngineError(f"the artefact's output {problem}")
            found[name] = array
        return found

    def __repr__(self) -> str:
        titles = [step.title for step in (*self._before, *self._after)]
        return f"<PipelineEngine {self._plan.part} {', '.join(titles)} around {self._inner!r}>"


class BudgetedPipeline(NamedTuple):
    """A pipeline for one request. An `Engine`."""

    engine: PipelineEngine
    budget_s: float

    @property
    def device_meter(self) -> Any:
        return self.engine.device_meter

    def infer(self, inputs: Arrays) -> _Tensors:
        return self.engine.compute(inputs, self.budget_s)


def _specs(plan: StepPlan) -> dict[str, TensorSpec]:
    """The declaration of every tensor; of one that is declared twice, the one with bounds."""
    specs: dict[str, TensorSpec] = {}
    for spec in (*plan.inputs, *plan.pipeline.inputs, *plan.pipeline.outputs, *plan.outputs, *plan.pipeline.tensors):
        if spec.name not in specs or spec.bounds is not None:
            specs[spec.name] = spec
    return specs


def _as_declared(spec: TensorSpec, array: NDArray[Any]) -> NDArray[Any]:
    """Of the declared datatype, as answers of models without a pipeline are made."""
    if spec.datatype is Datatype.BYTES:
        return array
    return np.ascontiguousarray(array, spec.datatype.numpy_name)


def _loaded(step: Step, specs: Mapping[str, TensorSpec], plan: StepPlan) -> _LoadedStep:
    file = getattr(step, "file", "")
    title = f"step {kind_of(step)} ({file or step.outputs[0]})"
    path = Path(plan.folder) / file
    try:
        compute = _compute_of(step, path, specs, plan)
    except (OSError, ValueError) as error:
        words = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise EngineError(f"{title}: {path}: {words}") from error
    checks = tuple(TensorCheck(specs[name], plan.axes) for name in step.outputs)
    return _LoadedStep(title, step.inputs, checks, compute)


def _compute_of(step: Step, path: Path, specs: Mapping[str, TensorSpec], plan: StepPlan) -> _Compute:
    """What does the step. Raises EngineError, OSError, ValueError."""
    if isinstance(step, TokenizeStep):
        tokens = _text_tokens(step, path, specs[step.outputs[0]], plan)
        mask = specs[step.outputs[-1]].datatype.numpy_name

        def tokenize(given: _Given, _: StepCall) -> _Given:
            ids, real = tokens.of(given[0])
            return ids, real.astype(mask, copy=False)

        return tokenize
    if isinstance(step, ImageDecodeStep):
        decoder = _image_decoder(step, specs[step.outputs[0]])
        return lambda given, call: (decoder.of(given[0], budget_s=call.budget_s),)
    if isinstance(step, LabelsStep):
        labels = scores.Labels(step, path)
        return lambda given, _: (labels.of(given[0]),)
    if isinstance(step, ResizeStep):
        return lambda given, _: (image.resize(step, given[0]),)
    if isinstance(step, NormaliseStep):
        return lambda given, _: (image.normalise(step, given[0]),)
    if isinstance(step, PoolingStep):
        return lambda given, _: (scores.pool(step, *given),)
    if isinstance(step, SoftmaxStep):
        return lambda given, _: (scores.softmax(given[0]),)
    if isinstance(step, TopKStep):
        return lambda given, _: scores.top_k(step, given[0])
    return _wasm(path, step.file, [specs[one] for one in step.inputs], [specs[one] for one in step.outputs], plan)


def _text_tokens(step: TokenizeStep, path: Path, ids: TensorSpec, plan: StepPlan) -> TextTokens:
    try:
        return TextTokens(step, path, ids, plan.axes)
    except ImportError as error:
        raise EngineError(
            f"step tokenize ({step.file}) needs tokenizers, which is not installed: pip install 'tidegate[text]'"
        ) from error


def _image_decoder(step: ImageDecodeStep, pixels: TensorSpec) -> ImageDecoder:
    try:
        return ImageDecoder(step, pixels)
    except ImportError as error:
        raise EngineError(
            f"step image_decode ({pixels.name}) needs Pillow, which is not installed: pip install 'tidegate[images]'"
        ) from error


def _wasm(path: Path, name: str, takes: Sequence[TensorSpec], gives: Sequence[TensorSpec], plan: StepPlan) -> _Compute:
    try:  # imported here: most workers have no modules
        from tidegate.pipeline.wasm_module import BadModule, WasmModule
    except ImportError as error:
        raise EngineError(f"step wasm ({name}) needs wasmtime ({error}): pip install 'tidegate[wasm]'") from error
    try:
        module = WasmModule(path, name, plan.limits)
    except BadModule as error:
        raise EngineError(f"step wasm ({name}): {path}: {error}") from error
    return lambda given, call: module.run(takes, given, gives, budget_s=call.budget_s)
