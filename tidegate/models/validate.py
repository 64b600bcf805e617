"""Validates a manifest beyond the types of its keys: every name that it mentions exists, every range is a range.

Types are checked when the YAML is read (`repository.py`). What is left are the mistakes that types cannot see and that
would otherwise surface far away, as a request that no target takes: an axis that is not declared, a cost input that is
no input, text fields that name no tensor, an artefact that points outside of its folder.

All problems are found in one go, each as one sentence that starts with the key and holds the value, so that an author
fixes a manifest once. An empty result is a valid manifest. Pure: the repository checks whether the files exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from math import isfinite
from typing import Any, Final, get_args

import msgspec

from tidegate.models.generative import generation_cost_problems, generative_problems
from tidegate.models.manifest import (
    TARGET_BATCH_S,
    Batching,
    BatchingPolicy,
    Bounds,
    EngineName,
    Manifest,
    Packed,
    QueuePolicy,
    TensorSpec,
    TimeoutAction,
    Variant,
)
from tidegate.models.pipeline_check import pipeline_problems
from tidegate.models.split.layer_split import UNCUT, split_problems
from tidegate.priority import LAST_LEVEL
from tidegate.types import Datatype

# Names travel in URLs, MQTT topics, header values and folder names, so they keep to what is plain in all four.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_GENERATING: tuple[EngineName, ...] = ("onnxruntime-genai", "transformers")
_COMPILED: tuple[EngineName, ...] = ("torch-export",)
MOST_WARMUP: Final = 64
LARGEST_INTEGER: Final = 2**53  # up to which a float is exact: limits are compared with costs and predicted memory
_SHA256 = re.compile(r"[0-9a-f]{64}")
_INTEGER_RANGE = {
    Datatype.UINT8: (0, 2**8 - 1), Datatype.UINT16: (0, 2**16 - 1), Datatype.UINT32: (0, 2**32 - 1),
    Datatype.UINT64: (0, 2**64 - 1), Datatype.INT8: (-(2**7), 2**7 - 1), Datatype.INT16: (-(2**15), 2**15 - 1),
    Datatype.INT32: (-(2**31), 2**31 - 1), Datatype.INT64: (-(2**63), 2**63 - 1),
}  # fmt: skip


def problems(manifest: Manifest) -> tuple[str, ...]:
    """Everything that is wrong with `manifest`, as `key: what is wrong with which value`; empty when it is valid."""
    if too_large := tuple(_integers("", manifest)):
        return too_large  # alone: nothing else may calculate with them, or spell them
    artefacts = manifest.of_model  # what batches, packing and limits are about
    return (
        *_names(manifest),
        *_axes(manifest),
        *_tensors("inputs", manifest.inputs, manifest),
        *_tensors("outputs", manifest.outputs, manifest),
        *_variants(artefacts),
        *_cost(manifest),
        *_limits(artefacts),
        *_pipeline(manifest),
        *_text(manifest),
        *_confidence(manifest),
        *_sequence(manifest),
        *_generative(manifest),
        *_warmup(manifest),
        *_split(manifest),
    )


def _integers(key: str, value: Any) -> Iterator[str]:
    """The integers of a manifest that are too large, whatever they count. Bounds are floats, however spelled."""
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        yield f"{key}: an integer of {value.bit_length()} bits; at most 2^53 ({LARGEST_INTEGER}) is possible"
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            yield from _integers(f"{key}[{index}]", entry)
    elif isinstance(value, dict):
        for name, entry in value.items():
            yield from _integers(key, name)
            yield from _integers(f"{key}.{name}", entry)
    elif isinstance(value, msgspec.Struct) and not isinstance(value, Bounds):
        for field, name in zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True):
            yield from _integers(f"{key}.{name}".lstrip("."), getattr(value, field))


def _pipeline(manifest: Manifest) -> Iterator[str]:
    pipeline = manifest.pipeline
    if pipeline is None:
        return
    for key in ("inputs", "outputs", "tensors"):
        specs: tuple[TensorSpec, ...] = getattr(pipeline, key)
        if specs or key != "tensors":
            yield from _tensors(f"pipeline.{key}", specs, manifest)
    if pipeline.cost.input not in _tensor_names(pipeline.inputs):
        yield f"pipeline.cost.input: {_no_tensor(pipeline.cost.input, 'input', pipeline.inputs)}"
    for one in pipeline.files:
        if problem := file_name_problem(one.name):
            yield f"pipeline: a step's file: {problem}"
        if not _SHA256.fullmatch(one.sha256):
            yield f"pipeline: {one.name!r}: sha256 {one.sha256!r} must be 64 lower-case hexadecimal digits"
        if any(one.name == variant.artefact for variant in manifest.variants):
            yield f"pipeline: {one.name!r} is an artefact, and cannot be a step's file as well"
    yield from pipeline_problems(manifest, pipeline)


def _split(manifest: Manifest) -> Iterator[str]:
    if manifest.half is not None and (problem := name_problem(manifest.half.of)):
        yield f"half.of: {problem}"
    if manifest.split is None:
        return
    yield from (f"split.{problem}" for problem in split_problems(manifest.name, manifest.split))
    for index, cut in enumerate(manifest.split.cuts):
        for role, name in (("head", cut.head), ("tail", cut.tail)):
            if problem := name_problem(name):
                yield f"split.cuts[{index}].{role}: {problem}"
    for key in UNCUT:
        if getattr(manifest, key) is not None:
            yield f"split: a model with the key {key!r} is not cut; leave one of them out"


def _warmup(manifest: Manifest) -> Iterator[str]:
    yield from _duplicates("warmup", manifest.warmup)
    if len(manifest.warmup) > MOST_WARMUP:
        yield f"warmup: {len(manifest.warmup)} files of samples, but at most {MOST_WARMUP} are run"
    if manifest.warmup and manifest.generative is not None:
        yield "warmup: a model that generates is warmed by generating; leave the key out"
    for name in manifest.warmup:
        if problem := file_name_problem(name):
            yield f"warmup: {problem}"
        elif not name.endswith(".npz"):
            yield f"warmup: {name!r} must be an .npz file with an array for each input"


def file_name_problem(name: str) -> str | None:
    """Why `name` may not name a file of a version's folder; None when it may."""
    if not name or name in {".", ".."} or "/" in name or "\\" in name or "\0" in name:
        return f"{name!r} must be a plain file name inside the version's folder"
    if name == "model.yaml":
        return f"{name!r} is the manifest itself"
    return None


def name_problem(name: str) -> str | None:
    """Why `name` may not name a model, a version or a variant; None when it may."""
    if _NAME.fullmatch(name):
        return None
    return f"{name!r} must be 1 to 128 letters, digits, '.', '_' or '-', and start with a letter or a digit"


def _names(manifest: Manifest) -> Iterator[str]:
    for key, name in (("name", manifest.name), ("version", manifest.version)):
        if problem := name_problem(name):
            yield f"{key}: {problem}"


def _axes(manifest: Manifest) -> Iterator[str]:
    for name, axis in manifest.axes.items():
        if axis.min < 0 or axis.min > axis.max:
            yield f"axes.{name}: must have 0 <= min <= max, not min {axis.min} and max {axis.max}"


def _tensors(key: str, tensors: Sequence[TensorSpec], manifest: Manifest) -> Iterator[str]:
    if not tensors:
        yield f"{key}: must name at least one tensor"
    yield from _duplicates(f"{key}.name", (tensor.name for tensor in tensors))
    for index, tensor in enumerate(tensors):
        yield from _shape(f"{key}[{index}] ({tensor.name}).shape", tensor, manifest)
        if tensor.bounds is not None:
            yield from _bounds(f"{key}[{index}] ({tensor.name}).bounds", tensor.datatype, tensor.bounds)


def _shape(key: str, tensor: TensorSpec, manifest: Manifest) -> Iterator[str]:
    for entry in tensor.shape:
        if isinstance(entry, str) and entry not in manifest.axes:
            known = ", ".join(sorted(manifest.axes)) or "none"
            yield f"{key}: {entry!r} is not a declared axis (declared: {known})"
        elif isinstance(entry, int) and entry < 1:
            yield f"{key}: {entry} is not a length; name an axis for a dimension that varies"


def _bounds(key: str, datatype: Datatype, bounds: Bounds) -> Iterator[str]:
    if not (isfinite(bounds.min) and isfinite(bounds.max) and bounds.min <= bounds.max):
        yield f"{key}: must be finite with min <= max, not min {bounds.min:g} and max {bounds.max:g}"
        return
    if datatype in {Datatype.BYTES, Datatype.BOOL}:
        yield f"{key}: {datatype.value} elements have no bounds"
    lowest, highest = _INTEGER_RANGE.get(datatype, (bounds.min, bounds.max))
    if bounds.min < lowest or bounds.max > float(highest):  # a bound is a float: 2**64 - 1 reads as 2**64
        yield f"{key}: {bounds.min:g} to {bounds.max:g} does not fit into {datatype.value}"


def _variants(manifest: Manifest) -> Iterator[str]:
    if not manifest.variants:
        yield "variants: must name at least one variant"
    yield from _duplicates("variants.name", (variant.name for variant in manifest.variants))
    for index, variant in enumerate(manifest.variants):
        for problem in (*_variant(variant), *_packed(variant, manifest)):
            yield f"variants[{index}] ({variant.name}).{problem}"
    digests: dict[str, str] = {}
    for variant in manifest.variants:
        for name, digest in [(variant.artefact, variant.sha256), *((one.name, one.sha256) for one in variant.files)]:
            if digests.setdefault(name, digest) != digest:
                yield f"variants.sha256: the artefact {name!r} has two different digests"


def _variant(variant: Variant) -> Iterator[str]:
    if problem := name_problem(variant.name):
        yield f"name: {problem}"
    if problem := file_name_problem(variant.artefact):
        yield f"artefact: {problem}"
    if not _SHA256.fullmatch(variant.sha256):
        yield f"sha256: {variant.sha256!r} must be 64 lower-case hexadecimal digits"
    if variant.size_bytes < 0:
        yield f"size_bytes: {variant.size_bytes} must not be negative"
    yield from _files(variant)
    if len(set(variant.where)) != len(variant.where):
        yield f"where: {list(variant.where)} names a place twice"
    for key, limit in (("max_batch", variant.max_batch), ("max_tokens", variant.max_tokens)):
        if limit is not None and limit < 1:
            yield f"{key}: {limit} must be at least 1; leave the key out for no limit"
    yield from _quality(variant)


def _files(variant: Variant) -> Iterator[str]:
    yield from _duplicates("files.name", (variant.artefact, *(one.name for one in variant.files)))
    named = [(f"files[{index}]", one) for index, one in enumerate(variant.files)]
    for key, one in (*named, *([("golden", variant.golden)] if variant.golden is not None else [])):
        if problem := file_name_problem(one.name):
            yield f"{key}.name: {problem}"
        if not _SHA256.fullmatch(one.sha256):
            yield f"{key}.sha256: {one.sha256!r} must be 64 lower-case hexadecimal digits"
        if one.size_bytes < 0:
            yield f"{key}.size_bytes: {one.size_bytes} must not be negative"


def _packed(variant: Variant, manifest: Manifest) -> Iterator[str]:
    if variant.compile and variant.engine not in _COMPILED:
        yield f"compile: the engine {variant.engine} does not compile; {', '.join(_COMPILED)} does"
    packed = variant.packed
    if variant.engine == "torch-packed" and packed is None:
        yield "packed: the engine torch-packed takes nothing else; say which axis is packed"
    if packed is None:
        return
    inputs = [spec for spec in manifest.inputs if packed.axis in spec.shape]
    if not inputs:
        yield f"packed.axis: {packed.axis!r} is not an axis of any input"
    for spec in (*inputs, *(spec for spec in manifest.outputs if packed.axis in spec.shape)):
        if spec.shape[1:2] != (packed.axis,) or spec.shape.count(packed.axis) > 1:
            yield f"packed.axis: {packed.axis!r} must be the second axis of {spec.name}, not {list(spec.shape)}"
    firsts = {spec.shape[:1] for spec in (*manifest.inputs, *manifest.outputs)}
    if len(firsts) > 1 or not all(isinstance(entry, str) for first in firsts for entry in first):
        yield "packed: the first axis of every input and output must be the same named one, which counts the rows"
    yield from _packed_names(packed, inputs, manifest)


def _packed_names(packed: Packed, inputs: Sequence[TensorSpec], manifest: Manifest) -> Iterator[str]:
    if not packed.lengths or packed.lengths in _tensor_names(manifest.inputs):
        yield f"packed.lengths: {packed.lengths!r} must be the name of an input that the model does not have otherwise"
    if packed.mask and packed.mask not in _tensor_names(inputs):
        yield f"packed.mask: {_no_tensor(packed.mask, 'input', inputs)} with the axis {packed.axis!r}"


def _quality(variant: Variant) -> Iterator[str]:
    quality = variant.quality
    if quality is None:
        return
    lowest = -1.0 if quality.metric == "cosine" else 0.0
    if not lowest <= quality.value <= 1.0:
        yield f"quality.value: {quality.value:g} is not a {quality.metric} between {lowest:g} and 1"
    if quality.samples < 1:
        yield f"quality.samples: {quality.samples} must be at least 1"


def _cost(manifest: Manifest) -> Iterator[str]:
    if manifest.cost.input not in _tensor_names(manifest.inputs):
        yield f"cost.input: {_no_tensor(manifest.cost.input, 'input', manifest.inputs)}"


def _limits(manifest: Manifest) -> Iterator[str]:
    batching = manifest.batching
    if not (isfinite(manifest.default_budget_s) and manifest.default_budget_s > 0):
        yield f"default_budget_s: {manifest.default_budget_s:g} must be a positive number of seconds"
    if not 0.0 <= manifest.min_quality <= 1.0:
        yield f"min_quality: {manifest.min_quality:g} must be from 0 to 1"
    if manifest.max_batch_size < 0:
        yield f"max_batch_size: {manifest.max_batch_size} must not be negative"
    if not (isfinite(batching.max_queue_delay_s) and batching.max_queue_delay_s >= 0):
        yield f"batching.max_queue_delay_s: {batching.max_queue_delay_s:g} must not be negative"
    for key in ("max_batch_size", "max_work", "max_queue_size"):
        limit = getattr(batching, key)
        if limit is not None and limit < 1:
            yield f"batching.{key}: {limit} must be at least 1"
    yield from _batching_policy(batching)
    yield from _queue_policies(batching)
    padded = {entry for tensor in manifest.inputs for entry in tensor.shape}
    if batching.pad_axis is not None and batching.pad_axis not in padded:
        yield f"batching.pad_axis: {batching.pad_axis!r} is not an axis of any input"


def _batching_policy(batching: Batching) -> Iterator[str]:
    if batching.policy not in get_args(BatchingPolicy):
        yield f"batching.policy: {batching.policy!r} must be one of {', '.join(get_args(BatchingPolicy))}"
    if batching.max_queue_delay_s > 0 and batching.policy not in ("deadline", "window"):
        yield f"batching.max_queue_delay_s: the policy {batching.policy} takes none; use window, or leave it out"
    if batching.policy == "window" and not batching.max_queue_delay_s > 0:
        yield "batching.max_queue_delay_s: the policy window needs one above 0; with none at all use eager"
    if not (isfinite(batching.target_batch_s) and batching.target_batch_s > 0):
        yield f"batching.target_batch_s: {batching.target_batch_s:g} must be a positive number of seconds"
    if batching.target_batch_s != TARGET_BATCH_S and batching.policy != "adaptive":
        yield f"batching.target_batch_s: the policy {batching.policy} takes none; use adaptive, or leave it out"
    if batching.preferred_batch_size and batching.policy != "window":
        yield f"batching.preferred_batch_size: the policy {batching.policy} takes none; use window, or leave it out"
    for size in batching.preferred_batch_size:
        if not 1 <= size <= batching.max_batch_size:
            yield f"batching.preferred_batch_size: {size} must be from 1 to max_batch_size, {batching.max_batch_size}"


def _queue_policies(batching: Batching) -> Iterator[str]:
    for level in batching.priority_queue_policy:
        if not 1 <= level <= LAST_LEVEL:
            yield f"batching.priority_queue_policy: there is no level {level}; levels are 1 (highest) to {LAST_LEVEL}"
    named = {f"priority_queue_policy.{level}": policy for level, policy in batching.priority_queue_policy.items()}
    for key, policy in {"default_queue_policy": batching.default_queue_policy, **named}.items():
        for problem in _queue_policy(policy):
            yield f"batching.{key}.{problem}"


def _queue_policy(policy: QueuePolicy) -> Iterator[str]:
    if policy.max_queue_size < 0:
        yield f"max_queue_size: {policy.max_queue_size} must not be negative; 0 is no limit"
    if policy.default_timeout_microseconds < 0:
        yield f"default_timeout_microseconds: {policy.default_timeout_microseconds} must not be negative; 0 is none"
    if policy.timeout_action not in get_args(TimeoutAction):
        yield f"timeout_action: {policy.timeout_action!r} must be one of {', '.join(get_args(TimeoutAction))}"
    if policy.timeout_action == "DELAY" and not policy.default_timeout_microseconds:
        yield "timeout_action: DELAY without default_timeout_microseconds would never happen; set one, or leave it out"
    if policy.demote_when_full and not policy.max_queue_size:
        yield "demote_when_full: without max_queue_size the level is never full; set one, or leave it out"
    if not policy.allow_timeout_override:
        yield "allow_timeout_override: false is not possible, a caller's timeout is its deadline; leave it out"


def _text(manifest: Manifest) -> Iterator[str]:
    text = manifest.text
    if text is None:
        return
    if problem := file_name_problem(text.tokenizer):
        yield f"text.tokenizer: {problem}"
    if text.sha256 is not None and not _SHA256.fullmatch(text.sha256):
        yield f"text.sha256: {text.sha256!r} must be 64 lower-case hexadecimal digits, or left out"
    for key, name, kind, tensors in (
        ("input_ids", text.input_ids, "input", manifest.inputs),
        ("attention_mask", text.attention_mask, "input", manifest.inputs),
        ("output", text.output, "output", manifest.outputs),
    ):
        if name not in _tensor_names(tensors):
            yield f"text.{key}: {_no_tensor(name, kind, tensors)}"
    longest = _longest_row(manifest, text.input_ids)
    if text.max_tokens < 1 or (longest is not None and text.max_tokens > longest):
        yield f"text.max_tokens: {text.max_tokens} must be from 1 to {longest if longest else 'any'}, the longest row"


def _sequence(manifest: Manifest) -> Iterator[str]:
    kept = manifest.sequence
    if kept is None:
        return
    if not kept.state_inputs:
        yield "sequence.state_inputs: must name at least one input; leave the section out for a model without memory"
    if not 0.0 < kept.ttl_s <= 86_400.0:
        yield f"sequence.ttl_s: {kept.ttl_s:g} must be above 0 and at most a day"
    if kept.max_sequences < 1:
        yield f"sequence.max_sequences: {kept.max_sequences} must be at least 1"
    inputs = {spec.name: spec for spec in manifest.inputs}
    outputs = {spec.name: spec for spec in manifest.outputs}
    for name, output in kept.state_inputs.items():
        into, out = inputs.get(name), outputs.get(output)
        if into is None:
            yield f"sequence.state_inputs: {_no_tensor(name, 'input', manifest.inputs)}"
        elif not into.optional:
            yield f"sequence.state_inputs: the input {name!r} must be optional, for callers do not send it"
        if out is None:
            yield f"sequence.state_inputs: {_no_tensor(output, 'output', manifest.outputs)}"
        elif into is not None and (out.datatype, out.shape) != (into.datatype, into.shape):
            yield f"sequence.state_inputs: {name!r} and {output!r} must have one datatype and shape"
    if manifest.cost.input in kept.state_inputs:
        yield f"cost.input: {manifest.cost.input!r} is a state, which not every request brings"
    for index, variant in enumerate(manifest.variants):
        if "edge" in variant.where:  # each step would be the first there
            key = f"variants[{index}] ({variant.name}).where"
            yield f"{key}: pools alone keep the state of sequences; leave out edge, or the section 'sequence'"


def _confidence(manifest: Manifest) -> Iterator[str]:
    how = manifest.confidence
    if how is None:
        return
    yield from _classes(how.output, manifest)
    if not 0.0 < how.threshold <= 1.0:
        yield f"confidence.threshold: {how.threshold:g} must be above 0 and at most 1; leave the section out for none"
    if not 0.0 < how.max_share <= 1.0:
        yield f"confidence.max_share: {how.max_share:g} must be above 0 and at most 1"
    yield from _nothing_to_improve("confidence", manifest)


def _nothing_to_improve(key: str, manifest: Manifest) -> Iterator[str]:
    if not any("edge" in variant.where and variant.name in manifest.improvable for variant in manifest.variants):
        qualities = ", ".join(
            f"{one.name} {f'{one.quality.metric} {one.quality.value:g}' if one.quality else 'not measured'}"
            for one in manifest.variants
        )
        yield f"{key}: no variant of the edge is outdone by another in measured quality ({qualities or 'none'})"


def _generative(manifest: Manifest) -> Iterator[str]:
    one = manifest.generative
    for index, variant in enumerate(manifest.variants):
        key = f"variants[{index}] ({variant.name}).generation"
        if one is None and (variant.generation is not None or variant.engine in _GENERATING):
            yield f"{key}: the model has no section `generative`, which says what its tokens are"
        if variant.generation is not None:
            yield from (f"{key}.{problem}" for problem in generation_cost_problems(variant.generation))
        elif one is not None:
            yield f"{key}: must be there, for the model generates"
    if one is None:
        return
    yield from (f"generative.{problem}" for problem in generative_problems(one))
    if one.commit_window is not None:
        yield from _nothing_to_improve("generative.commit_window", manifest)
    for name_key, digest_key in (("tokenizer", "tokenizer_sha256"), ("chat_template", "chat_template_sha256")):
        name, digest = getattr(one, name_key), getattr(one, digest_key)
        if name is not None and (problem := file_name_problem(name)):
            yield f"generative.{name_key}: {problem}"
        if digest is not None and not _SHA256.fullmatch(digest):
            yield f"generative.{digest_key}: {digest!r} must be 64 lower-case hexadecimal digits"
    if not _SHA256.fullmatch(one.vocabulary):
        yield f"generative.vocabulary: {one.vocabulary!r} must be 64 lower-case hexadecimal digits"
    yield from _generative_tensors(manifest)


def _generative_tensors(manifest: Manifest) -> Iterator[str]:
    """The names are fixed: every front and every target speaks of the same ones."""
    for key, tensors, wanted in (
        ("inputs", manifest.inputs, {"input_ids": Datatype.INT32, "text_input": Datatype.BYTES}),
        ("outputs", manifest.outputs, {"output_ids": Datatype.INT32, "text_output": Datatype.BYTES}),
    ):
        there = {spec.name: spec.datatype for spec in tensors}
        if there != wanted:
            words = ", ".join(f"{name} {datatype.value}" for name, datatype in wanted.items())
            yield f"{key}: a generating model has {words}, not {', '.join(there) or 'none'}"
    if not all(spec.optional for spec in manifest.inputs):
        yield "inputs: those of a generating model must be optional, for a request has one of them"
    if (manifest.cost.feature, manifest.cost.input) != ("tokens", "input_ids"):
        counted = f"{manifest.cost.feature} of {manifest.cost.input}"
        yield f"cost: a generating model counts tokens of input_ids, not {counted}"


def _classes(name: str, manifest: Manifest) -> Iterator[str]:
    spec = next((spec for spec in manifest.outputs if spec.name == name), None)
    if spec is None:
        yield f"confidence.output: {_no_tensor(name, 'output', manifest.outputs)}"
        return
    if spec.datatype not in {Datatype.FP16, Datatype.FP32, Datatype.FP64}:
        yield f"confidence.output: {name!r} is {spec.datatype.value}; class probabilities are FP16, FP32 or FP64"
    last = spec.shape[-1] if spec.shape else 1
    axis = manifest.axes.get(last) if isinstance(last, str) else None  # one that is not declared was named already
    if (axis is not None and axis.max < 2) or (isinstance(last, int) and last < 2):
        yield f"confidence.output: {name!r} of shape {list(spec.shape)} has no last axis of two classes or more"


def _longest_row(manifest: Manifest, name: str) -> int | None:
    """The most elements that a row of input `name` may have; None without a bound."""
    for tensor in manifest.inputs:
        if tensor.name == name and tensor.shape:
            last = tensor.shape[-1]
            axis = manifest.axes.get(last) if isinstance(last, str) else None
            return axis.max if axis else (last if isinstance(last, int) else None)
    return None


def _duplicates(key: str, names: Iterable[str]) -> Iterator[str]:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            yield f"{key}: {name!r} is there twice"
        seen.add(name)


def _tensor_names(tensors: Sequence[TensorSpec]) -> set[str]:
    return {tensor.name for tensor in tensors}


def _no_tensor(name: str, kind: str, tensors: Sequence[TensorSpec]) -> str:
    return f"{name!r} is not an {kind} ({kind}s: {', '.join(tensor.name for tensor in tensors) or 'none'})"
