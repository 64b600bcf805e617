"""A pipeline from the options of `tidegate model add`: a step is one line, and so is a tensor that the model has not.

    --step "tokenize text -> input_ids,attention_mask file=tokenizer.json max_tokens=128"
    --step "softmax logits -> probabilities"
    --tensor "text=BYTES[batch]" --tensor "probabilities=FP32[batch,3]"

Which steps come after the model is seen from what they take: an output of the model's, or of such a step. What no step
gives and the model has not is the caller's; what no step takes is the answer. Files are read for their digests, and
copied into the version's folder by whoever saves the manifest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from tidegate.models.digest import sha256_of
from tidegate.models.manifest import Axis, Cost, Manifest, Pipeline, TensorSpec
from tidegate.models.steps import KINDS, Step, StepWithFile
from tidegate.models.validate import file_name_problem
from tidegate.tools.build.errors import BuildError
from tidegate.types import Datatype

_TENSOR: Final = re.compile(r"(?P<name>[^=\s]+)=(?P<datatype>[A-Z0-9]+)\[(?P<shape>[^\]]*)\]")
_LISTS: Final = frozenset({"mean", "std"})
Ranges = Mapping[str, tuple[int, int]]


def parse_tensor(words: str) -> TensorSpec:
    """The declaration that "text=BYTES[batch]" makes. Raises BuildError."""
    found = _TENSOR.fullmatch(words.strip())
    if found is None:
        raise BuildError(f"--tensor {words!r}: must be NAME=DATATYPE[LENGTH,AXIS,…], such as text=BYTES[batch]")
    try:
        datatype = Datatype(found["datatype"])
    except ValueError:
        known = ", ".join(one.value for one in Datatype)
        raise BuildError(f"--tensor {words!r}: {found['datatype']!r} is not one of {known}") from None
    entries = [entry.strip() for entry in found["shape"].split(",") if entry.strip()]
    shape = tuple(int(entry) if entry.isdecimal() else entry for entry in entries)
    return TensorSpec(found["name"], datatype, shape)


def parse_step(words: str) -> tuple[Step, Path | None]:
    """The step that a line says, and its file. Raises BuildError."""
    takes, arrow, gives = words.partition("->")
    kind, _, inputs = takes.strip().partition(" ")
    outputs, *options = gives.split() or [""]
    if not (arrow and inputs.strip() and outputs):
        raise BuildError(
            f"--step {words!r}: must be KIND INPUT,… -> OUTPUT,… KEY=VALUE …, such as 'softmax logits -> probabilities'"
        )
    raw: dict[str, Any] = {"step": kind, "inputs": _names(inputs), "outputs": _names(outputs)}
    path = None
    for option in options:
        key, equals, value = option.partition("=")
        if not equals:
            raise BuildError(f"--step {words!r}: {option!r} must be KEY=VALUE")
        if key == "file":
            path = Path(value)
            raw |= _file(words, path)
        else:
            raw[key] = [_value(one) for one in value.split(",")] if key in _LISTS else _value(value)
    try:
        return msgspec.convert(raw, Step, strict=True), path
    except msgspec.ValidationError as error:
        known = "" if kind in KINDS else f": there are {', '.join(KINDS)}"
        raise BuildError(f"--step {words!r}: {error}{known}") from error


def with_pipeline(manifest: Manifest, steps: Sequence[Step], tensors: Sequence[TensorSpec], axes: Ranges) -> Manifest:
    """The manifest of a model's artefacts with these steps around them. Raises BuildError."""
    of_model = {spec.name for spec in manifest.outputs}
    before, after = list[Step](), list[Step]()
    for step in steps:
        if of_model.isdisjoint(step.inputs):
            before.append(step)
        else:
            after.append(step)
            of_model.update(step.outputs)
    declared = {spec.name: spec for spec in (*manifest.inputs, *manifest.outputs, *tensors)}
    given = {name for step in steps for name in step.outputs}
    taken = {name for step in steps for name in step.inputs}
    wanted = [name for step in before for name in step.inputs] + [spec.name for spec in manifest.inputs]
    inputs = [_declared(name, declared) for name in dict.fromkeys(wanted) if name not in given]
    ends = [spec.name for spec in manifest.outputs] + [name for step in after for name in step.outputs]
    outputs = [_declared(name, declared) for name in dict.fromkeys(ends) if name not in taken]
    public = {spec.name for spec in (*inputs, *outputs)}
    pipeline = Pipeline(
        before=tuple(before),
        inputs=manifest.inputs,
        outputs=manifest.outputs,
        cost=manifest.cost,
        after=tuple(after),
        tensors=tuple(spec for spec in tensors if spec.name not in public),
    )
    return msgspec.structs.replace(
        manifest,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        cost=_cost(manifest.cost, inputs),
        axes={**manifest.axes, **_new_axes(manifest, tensors, axes)},
        pipeline=pipeline,
    )


def check_files(manifest: Manifest, files: Mapping[str, Path]) -> None:
    """Raise BuildError where two steps have different files of one name."""
    for step in manifest.pipeline.steps if manifest.pipeline is not None else ():
        if isinstance(step, StepWithFile) and sha256_of(files[step.file]) != step.sha256:
            raise BuildError(f"{files[step.file]}: another step's file has the same name {step.file!r}; rename one")


def _names(words: str) -> list[str]:
    return [name.strip() for name in words.split(",") if name.strip()]


def _file(words: str, path: Path) -> dict[str, Any]:
    if problem := file_name_problem(path.name):
        raise BuildError(f"--step {words!r}: {problem}")
    if not path.is_file():
        raise BuildError(f"--step {words!r}: {path}: there is no such file")
    return {"file": path.name, "sha256": sha256_of(path), "size_bytes": path.stat().st_size}


def _value(text: str) -> Any:
    """A number or a truth, as YAML has them; a word else."""
    if text in ("true", "false"):
        return text == "true"
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def _declared(name: str, declared: Mapping[str, TensorSpec]) -> TensorSpec:
    spec = declared.get(name)
    if spec is None:
        raise BuildError(f"--tensor {name}=DATATYPE[…] is missing: a step names {name!r}, which the model has not")
    return spec


def _cost(of_model: Cost, inputs: Sequence[TensorSpec]) -> Cost:
    """Counted as the model's work is, of what callers send in its place."""
    if not inputs:
        raise BuildError("--step: the steps leave nothing for callers to send")
    known = next((spec.name for spec in inputs if spec.name == of_model.input), inputs[0].name)
    return Cost(of_model.feature, known)


def _new_axes(manifest: Manifest, tensors: Sequence[TensorSpec], ranges: Ranges) -> dict[str, Axis]:
    found: dict[str, Axis] = {}
    for spec in tensors:
        for entry in spec.shape:
            if not isinstance(entry, str) or entry in manifest.axes:
                continue
            if entry not in ranges:
                raise BuildError(f"--axis {entry}=MIN:MAX is missing: the tensor {spec.name!r} names it")
            found[entry] = Axis(*ranges[entry])
    return found
