"""The kinds of steps that a pipeline is made of: what turns a caller's tensors into a model's, and its outputs back.

A step takes tensors by name and gives others. What a tensor's name stands for is declared in the manifest
(`Pipeline` in `manifest.py`), and never guessed. A step that reads a file names its digest and size, as a variant does
of its artefact. What the kinds compute is in `tidegate/pipeline`; which tensors each of them takes, in
`pipeline_check.py`.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

import msgspec

MOST_STEPS: Final = 32
Pooling = Literal["mean", "first", "max"]
Layout = Literal["nchw", "nhwc"]
Fit = Literal["resize", "crop", "pad"]
Channels = Literal["RGB", "L"]


class PipelineStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="step"):
    """What all kinds have: the names of the tensors that the step takes and gives."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class StepWithFile(PipelineStep, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="step"):
    """A step that reads a file of the version's folder."""

    file: str
    sha256: str
    size_bytes: int


class TokenizeStep(StepWithFile, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="tokenize"):
    """Texts to token ids, by a tokenizer.json; with a second output also the mask that says what is padding."""

    max_tokens: int


class ImageDecodeStep(PipelineStep, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="image_decode"):
    """Files of JPEG or PNG to pixels of one size, as the model takes them; the output's datatype says of what kind.

    Bounds hold for all images of a request together, `max_pixels` for what their headers say, before any is decoded.
    """

    height: int
    width: int
    fit: Fit = "resize"  # of other shapes: stretched, cut at the longer side, or black where nothing is
    channels: Channels = "RGB"  # L: grey
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    scale: float = 1.0
    layout: Layout = "nhwc"
    max_pixels: int = 1 << 24
    max_bytes: int = 8 << 20


class ResizeStep(PipelineStep, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="resize"):
    """Images [rows, height, width, channels] to one size, by linear interpolation between the centres of pixels."""

    height: int
    width: int


class NormaliseStep(PipelineStep, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="normalise"):
    """`(x * scale - mean) / std` by channel of images [rows, height, width, channels]."""

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    scale: float = 1.0
    layout: Layout = "nhwc"  # of the output


class PoolingStep(PipelineStep, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="pool"):
    """One vector of each row's token vectors [rows, tokens, size], without those that the mask leaves out."""

    how: Pooling = "mean"
    unit_length: bool = False  # whether each vector is divided by its length


class SoftmaxStep(PipelineStep, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="softmax"):
    """Scores to probabilities, along the last axis."""


class TopKStep(PipelineStep, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="top_k"):
    """The `k` largest of the last axis, largest first: their values, and with a second output their places."""

    k: int


class LabelsStep(StepWithFile, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="labels"):
    """Places to names: line number n of the file, from 0, is the name of place n."""


class WasmStep(StepWithFile, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="wasm"):
    """A WebAssembly module of the author's own, run in a sandbox (docs/pipelines.md)."""


Step = (
    TokenizeStep
    | ImageDecodeStep
    | ResizeStep
    | NormaliseStep
    | PoolingStep
    | SoftmaxStep
    | TopKStep
    | LabelsStep
    | WasmStep
)

KINDS: Final = tuple(str(one.__struct_config__.tag) for one in get_args(Step))


def kind_of(step: Step) -> str:
    """The word that names the kind in a manifest."""
    return str(step.__struct_config__.tag)
