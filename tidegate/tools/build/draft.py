"""A draft is a manifest for inspected artefacts: what they declare, and a stated choice where they declare nothing.

Every choice comes back as a sentence that names the flag which changes it, so that nothing is guessed in silence. Pure:
measuring and running belong to `add.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from tidegate.models.manifest import Axis, Batching, Bounds, Cost, Feature, Manifest, TensorSpec, Text
from tidegate.tools.build.agree import AgreedSignature
from tidegate.tools.build.errors import BuildError
from tidegate.types import Datatype

OPEN_BATCH, OPEN_LENGTH = (
    64,
    512,
)  # for axes that no artefact limits: enough to be useful, little enough to be warmed up
_INTEGERS = {Datatype.INT64, Datatype.INT32}
_FEATURES: tuple[Feature, ...] = ("tokens", "pixels", "items", "bytes")


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """The user's options. Empty fields are chosen."""

    axes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    cost: str = ""
    default_budget_s: float = 2.0
    tokenizer: str = ""  # the file's name inside the version's folder
    steps_axes: frozenset[str] = frozenset()  # of tensors that steps have and the artefacts have not


@dataclass(frozen=True, slots=True)
class Draft:
    """A manifest without variants; `choices` are sentences; `open_axes` have a largest length that is only a guess."""

    manifest: Manifest
    choices: tuple[str, ...]
    open_axes: tuple[str, ...]


def draft(name: str, version: str, agreed: AgreedSignature, wishes: DraftOptions) -> Draft:
    """Raises BuildError: a wish names what is not there, or a text model lacks an input."""
    choices: list[str] = []
    inputs = _bounded(agreed.inputs, wishes.bounds, choices)
    own = {name: span for name, span in wishes.axes.items() if name in agreed.axes or name not in wishes.steps_axes}
    axes, open_axes = _axes(agreed, own, choices)
    cost = parse_cost(wishes.cost, inputs) if wishes.cost else _cost(inputs, choices)
    manifest = Manifest(
        name=name,
        version=version,
        inputs=inputs,
        outputs=agreed.outputs,
        variants=(),
        cost=cost,
        axes=axes,
        default_budget_s=wishes.default_budget_s,
        batching=Batching(max_batch_size=_most_rows(inputs, axes)),
    )
    if wishes.tokenizer:
        manifest = msgspec.structs.replace(manifest, text=_text(manifest, wishes.tokenizer, choices))
    return Draft(manifest, tuple(choices), open_axes)


def parse_cost(words: str, inputs: Sequence[TensorSpec]) -> Cost:
    """The cost that "tokens:input_ids" names. Raises BuildError."""
    feature, _, name = words.partition(":")
    known = next((one for one in _FEATURES if one == feature), None)
    if known is None:
        raise BuildError(f"--cost {words!r}: {feature!r} is not one of {', '.join(_FEATURES)}")
    if name not in {spec.name for spec in inputs}:
        raise BuildError(f"--cost {words!r}: {name!r} is not an input (inputs: {_names(inputs)})")
    return Cost(known, name)


def mask_of(manifest: Manifest) -> TensorSpec | None:
    """The input that says which positions of the cost input are real: integers 0 and 1 of the same shape."""
    costly = next(spec for spec in manifest.inputs if spec.name == manifest.cost.input)
    return next((spec for spec in manifest.inputs if spec.shape == costly.shape and _is_mask(spec)), None)


def row_axis(manifest: Manifest) -> str | None:
    """The axis that makes a row of the cost input longer, where rows are of tokens; None if rows are fixed."""
    costly = next(spec for spec in manifest.inputs if spec.name == manifest.cost.input)
    last = costly.shape[-1] if len(costly.shape) > 1 else None
    return last if isinstance(last, str) and manifest.cost.feature == "tokens" else None


def batch_axis(manifest: Manifest) -> str | None:
    """The axis of rows: the first of the cost input, when it varies."""
    costly = next(spec for spec in manifest.inputs if spec.name == manifest.cost.input)
    first = costly.shape[0] if costly.shape else None
    return first if isinstance(first, str) else None


def _is_mask(spec: TensorSpec) -> bool:
    return spec.bounds == Bounds(0, 1) and "mask" in spec.name


def _bounded(
    inputs: Sequence[TensorSpec], wishes: Mapping[str, tuple[float, float]], choices: list[str]
) -> tuple[TensorSpec, ...]:
    unknown = sorted(set(wishes) - {spec.name for spec in inputs})
    if unknown:
        raise BuildError(f"--bounds {unknown[0]}: not an input (inputs: {_names(inputs)})")
    return tuple(_with_bounds(spec, wishes.get(spec.name), choices) for spec in inputs)


def _with_bounds(spec: TensorSpec, wish: tuple[float, float] | None, choices: list[str]) -> TensorSpec:
    if wish is not None:
        return msgspec.structs.replace(spec, bounds=Bounds(*wish))
    if spec.bounds is not None:
        choices.append(f"{spec.name}: values {_span(spec.bounds)}, by the table that they index")
    elif spec.datatype in _INTEGERS and "mask" in spec.name:
        choices.append(f"{spec.name}: values 0 to 1, by its name (--bounds {spec.name}=0:1)")
        return msgspec.structs.replace(spec, bounds=Bounds(0, 1))
    elif spec.datatype is not Datatype.BYTES and spec.datatype is not Datatype.BOOL:
        choices.append(f"{spec.name}: any values; nothing limits them (--bounds {spec.name}=MIN:MAX)")
    return spec


def _axes(
    agreed: AgreedSignature, wishes: Mapping[str, tuple[int, int]], choices: list[str]
) -> tuple[dict[str, Axis], tuple[str, ...]]:
    unknown = sorted(set(wishes) - set(agreed.axes))
    if unknown:
        raise BuildError(f"--axis {unknown[0]}: not an axis (axes: {', '.join(agreed.axes) or 'none'})")
    of_inputs = {entry for spec in agreed.inputs for entry in spec.shape}
    first = {spec.shape[0] for spec in agreed.inputs if spec.shape}
    axes, open_axes = {}, []
    for name, (least, most) in agreed.axes.items():
        if name in wishes:
            axes[name] = Axis(*wishes[name])
        elif most is not None:
            axes[name] = Axis(least, most)
            choices.append(f"axis {name}: {least} to {most}, by the artefacts")
        elif name not in of_inputs:
            axes[name] = Axis(0)  # an output's own axis, such as how many objects were found
        else:
            axes[name] = Axis(least, max(least, OPEN_BATCH if name in first else OPEN_LENGTH))
            open_axes.append(name)
    return axes, tuple(open_axes)


def _cost(inputs: Sequence[TensorSpec], choices: list[str]) -> Cost:
    ids = next((spec for spec in inputs if spec.datatype in _INTEGERS and len(spec.shape) == 2), None)
    image = next((spec for spec in inputs if len(spec.shape) == 4), None)
    if ids is not None:
        cost = Cost("tokens", ids.name)
    elif image is not None:
        cost = Cost("pixels", image.name)
    else:
        cost = Cost("items", inputs[0].name)
    choices.append(f"cost: {cost.feature} of {cost.input} (--cost {cost.feature}:{cost.input})")
    return cost


def _most_rows(inputs: Sequence[TensorSpec], axes: Mapping[str, Axis]) -> int:
    """How many rows a batch may have: 1 where an input's first dimension is fixed, since nothing can be joined then."""
    firsts = {spec.shape[0] if spec.shape else 1 for spec in inputs}
    if len(firsts) != 1:
        return 1
    (first,) = firsts
    return axes[first].max if isinstance(first, str) else 1


def _text(manifest: Manifest, tokenizer: str, choices: list[str]) -> Text:
    axis, mask = row_axis(manifest), mask_of(manifest)
    output = next((spec for spec in manifest.outputs if len(spec.shape) == 2), None)
    if axis is None or mask is None or output is None:
        raise BuildError(
            "--tokenizer: the model has no text input: it needs ids and a mask of [batch, sequence] with the cost "
            "counted in tokens of the ids, and an output of [batch, size]"
        )
    choices.append(f"text: {manifest.cost.input} and {mask.name} from the tokenizer, answered with {output.name}")
    return Text(tokenizer, manifest.axes[axis].max, manifest.cost.input, mask.name, output.name)


def _span(bounds: Bounds) -> str:
    return f"{bounds.min:g} to {bounds.max:g}"


def _names(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(spec.name for spec in specs)
