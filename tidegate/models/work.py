"""Computes the work of a request (cost feature, rows, longest row, answer size) from shapes alone.

No tensor is decoded: the gateway prices a request it only passes on.

The work of a generation is counted in tokens of its answer, of which it has `max_tokens` at most; a token of its prompt
counts as much as the manifest's first variant says (`GenerationCost.prompt_weight`), whichever variant answers, so that
all sides count alike. An answer that a stop token ends is less work than was counted: what is learned from it is
learned from the tokens that it had (`generated_units`). Targets reserve memory for the most that an answer can be;
gateways place it by what it is expected to be (`gateway/core/estimate/output_length.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Final, NamedTuple

from numpy.typing import NDArray

from tidegate.arrays import array_to_tensor
from tidegate.models.generative import MAX_TOKENS, PROMPT_INPUT, Generative
from tidegate.models.manifest import Feature, Manifest
from tidegate.types import Buffer, Datatype, InferRequest, Tensor

_TEXT_BYTES: Final = 16  # of one BYTES element, whose length is not known in advance
_TOKEN_BYTES: Final = 4  # of text, about, in one token
_PREFIX_BYTES: Final = 4  # before each BYTES element: its length
_STREAMED_BYTES: Final = 32  # of one token on its way, in a frame of its own


class Work(NamedTuple):
    """`units` in the manifest's cost feature; `rows` is the first axis of the cost input and `longest_row` its last."""

    units: float
    rows: int
    longest_row: int


def work_of(manifest: Manifest, request: InferRequest) -> Work:
    """The work of a request that was checked against `manifest`; a missing cost input counts as one unit.

    Of a generation `longest_row` is the context that it may need: the tokens of the prompt and of the answer.
    """
    if manifest.generative is not None:
        prompt, answer = generation_tokens(manifest.generative, request)
        return Work(generated_units(manifest, prompt, answer), 1, prompt + answer)
    cost = manifest.cost
    for tensor in request.inputs:
        if tensor.name == cost.input:
            shape = tensor.shape or (1,)
            if tensor.datatype is Datatype.BYTES and cost.feature == "tokens":
                return _work_of_text(manifest, tensor, shape[0])
            if tensor.datatype is Datatype.BYTES and cost.feature == "pixels":
                return _work_of_images(manifest, tensor, shape[0])
            return Work(float(_units(cost.feature, tensor, shape)), shape[0], shape[-1] if len(shape) > 1 else 1)
    return Work(units=1.0, rows=1, longest_row=1)


def work_of_arrays(manifest: Manifest, arrays: Mapping[str, NDArray[Any]]) -> Work:
    """The same of inputs as arrays, of which only the cost input is looked at."""
    spec = next((one for one in manifest.inputs if one.name == manifest.cost.input), None)
    if spec is None or spec.name not in arrays:
        return work_of(manifest, InferRequest(manifest.name, ()))
    tensor = array_to_tensor(spec.name, arrays[spec.name], spec.datatype)
    return work_of(manifest, InferRequest(manifest.name, (tensor,)))


def _work_of_text(manifest: Manifest, tensor: Tensor, rows: int) -> Work:
    """Of texts that a pipeline makes tokens of, where the model runs: by their bytes, and no more than it keeps.

    Rows are taken for equally long, since finding out would be reading them.
    """
    elements = max(1, tensor.elements)
    text_bytes = len(tensor.raw) - _PREFIX_BYTES * elements
    tokens = max(1, -(-text_bytes // (_TOKEN_BYTES * elements)))
    step = None if manifest.pipeline is None else manifest.pipeline.tokenizing(tensor.name)
    if step is not None:
        tokens = min(tokens, step.max_tokens)
    return Work(float(tokens * elements), rows, tokens)


def _work_of_images(manifest: Manifest, tensor: Tensor, rows: int) -> Work:
    """Of files of images that a pipeline decodes, where the model runs: by the pixels that the model gets of them.

    What decoding takes grows with the pixels that are sent. Those are not looked for: they have another price than
    the model's, and one slope for both would charge a large photograph as some hundred rows.
    """
    step = None if manifest.pipeline is None else manifest.pipeline.decoding(tensor.name)
    if step is None:
        return Work(float(tensor.elements), rows, 1)
    return Work(float(rows * step.height * step.width), rows, step.width)


def _units(feature: Feature, tensor: Tensor, shape: tuple[int, ...]) -> int:
    if feature == "bytes":
        return len(tensor.raw)
    return shape[0] if feature == "items" else prod(shape)


def generated_units(manifest: Manifest, prompt_tokens: float, answer_tokens: float) -> float:
    """The work of a generation, in tokens of an answer. Tokens of the prompt that a cache had are no work."""
    costs = manifest.variants[0].generation if manifest.variants else None
    return answer_tokens + prompt_tokens * (0.0 if costs is None else costs.prompt_weight)


def generation_tokens(generative: Generative, request: InferRequest) -> tuple[int, int]:
    """Tokens of the prompt and, at most, of the answer. A request that was not checked yet may say anything."""
    tensor = next((one for one in request.inputs if one.name == PROMPT_INPUT), None)
    if tensor is not None:
        prompt = tensor.elements
    elif request.text is not None:
        prompt = request.text.about_tokens
    else:
        prompt = sum([len(one.raw) for one in request.inputs]) // _TOKEN_BYTES
    said = request.parameters.get(MAX_TOKENS)
    if isinstance(said, int) and not isinstance(said, bool) and 0 < said <= generative.context:
        return prompt, said
    return prompt, generative.max_tokens_after(prompt)


def prompt_ids(request: InferRequest) -> Buffer | None:
    """The prompt's token ids as they travel, INT32; None of a prompt in words."""
    return next((one.raw for one in request.inputs if one.name == PROMPT_INPUT), None)


def answer_bytes(manifest: Manifest, request: InferRequest, answer_tokens: float = 0.0) -> int:
    """The size of the answer, as far as the manifest and the request's axes fix it; an axis of its own counts once.

    Args:
        answer_tokens: how many are expected of a generation; 0: the most that it may have.
    """
    if manifest.generative is not None:
        return int(_STREAMED_BYTES * (answer_tokens or generation_tokens(manifest.generative, request)[1]))
    lengths: dict[str, int] = {}
    shapes = {tensor.name: tensor.shape for tensor in request.inputs}
    for spec in manifest.inputs:
        for entry, length in zip(spec.shape, shapes.get(spec.name, ()), strict=False):
            if isinstance(entry, str):
                lengths[entry] = length
    wanted = {output.name for output in request.outputs}
    return sum(
        (spec.datatype.itemsize or _TEXT_BYTES)
        * prod(entry if isinstance(entry, int) else lengths.get(entry, 1) for entry in spec.shape)
        for spec in manifest.outputs
        if not wanted or spec.name in wanted
    )


def fits(work: Work, *, max_batch: int | None, max_tokens: int | None) -> bool:
    """Whether a variant with these limits takes the work; None means no limit."""
    return (max_batch is None or work.rows <= max_batch) and (max_tokens is None or work.longest_row <= max_tokens)
