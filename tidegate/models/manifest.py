"""The manifest of one model version: `model.yaml`, the single place that says what a model takes, gives and costs.

Every process reads it, so that none has to guess: the gateway checks requests against its shapes and bounds (so that a
bad tensor never reaches batch-mates) and prices them by its cost feature; edge and pool pick the variant they may run
and find its artefact.

Axes are named once and used in shapes, so `[batch, sequence]` on two inputs means that both must agree. Work is
counted in the unit of `cost.feature`; a variant's `max_tokens` bounds the longest row (last axis of the cost input)
and its `max_batch` the rows, because those are what a small device runs out of.

A classifier may say how sure it has to be (`confidence`): a less sure answer of a variant that another one outdoes is
taken to that one while there is time. Which one is better is read from the measured qualities.

A generating model has a `generative` section, and each of its variants a `generation` one (`generative.py`). A model
that may be cut between layers has a `split` section, and each of its halves a key `half` (`split/layer_split.py`).

A model with a `pipeline` takes and gives other tensors than its artefacts do: `inputs`, `outputs` and `cost` are what
callers see, and every check and price holds against them. What the artefacts see is inside of the section, and
`of_model` is the manifest from their side.
"""

from __future__ import annotations

from hashlib import sha256
from math import inf, nextafter
from typing import Final, Literal

import msgspec

from tidegate.models.generative import GenerationCost, Generative
from tidegate.models.split.layer_split import LayerSplit, SplitHalf
from tidegate.models.steps import ImageDecodeStep, Step, StepWithFile, TokenizeStep, WasmStep
from tidegate.placement_pin import Pin
from tidegate.types import Datatype

Where = Literal["edge", "pool"]
Feature = Literal["tokens", "pixels", "items", "bytes"]
EngineName = Literal[
    "onnx", "torch-export", "torchscript", "torch-packed", "tensorrt", "paced", "onnxruntime-genai", "transformers"
]
TimeoutAction = Literal["REJECT", "DELAY"]
BatchingPolicy = Literal["deadline", "adaptive", "window", "eager", "none"]
Unsure = Literal["accept", "reject", "defer"]
Measure = Literal["margin", "entropy", "top1"]
TARGET_BATCH_S: Final = 0.05  # as long as the window with which the policy `adaptive` begins
Modality = Literal["text", "image", "sound", "generation", "other"]


class Axis(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A named dimension and the lengths it may have."""

    min: int = 1
    max: int = 2**31 - 1


class Bounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Smallest and largest element value that the model is defined for; NaN and infinity are outside of any bounds."""

    min: float
    max: float


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One input or output. A shape's entry is a length or the name of an axis."""

    name: str
    datatype: Datatype
    shape: tuple[int | str, ...]
    bounds: Bounds | None = None
    optional: bool = False


class Quality(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A measured quality: `cosine` to the reference (mean), or `top1` accuracy on a held-out split.

    Of a variant that generates `top1` is the share of the reference's greedy tokens that are its likeliest as well.
    """

    metric: Literal["cosine", "top1"]
    value: float
    samples: int
    how: str = ""  # it was measured, for people


class Packed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The artefact takes its rows one after another, without padding (`packing.py`)."""

    axis: str  # the axis along which rows are unequal; inputs and outputs that have it come without it and the rows'
    lengths: str = "lengths"  # the added input: INT64, how long each row is
    mask: str = ""  # the input whose zeros at the end of a row are padding, which is left out; "": all is real


class ArtefactFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file that an artefact needs beside itself: weights that it refers to, or its runtime's configuration."""

    name: str  # inside the version's folder
    sha256: str
    size_bytes: int


class Variant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One artefact of the model: a precision, an engine to run it, and where it may run."""

    name: str
    artefact: str  # a file name inside the version's folder
    engine: EngineName
    precision: str  # fp32, bf16, int8
    where: tuple[Where, ...]
    sha256: str
    size_bytes: int
    files: tuple[ArtefactFile, ...] = ()
    quality: Quality | None = None
    max_batch: int | None = None
    max_tokens: int | None = None
    packed: Packed | None = None
    generation: GenerationCost | None = None  # of a generating model
    golden: ArtefactFile | None = None  # of a generating model: greedy answers that it gave where it was made
    compile: bool = False  # torch: by torch.compile when it is loaded, where there is a compiler

    @property
    def paced(self) -> bool:
        """Whether nothing is computed: the engine only takes the time (`engines/paced.py`)."""
        return self.engine == "paced"

    @property
    def reads_texts(self) -> bool:
        """Whether elements of BYTES have to be UTF-8: its engine knows texts and no other bytes."""
        return self.engine == "onnx"

    @property
    def follows_schemas(self) -> bool:
        """Whether its generations can be held to a JSON schema."""
        return self.generation is not None and self.engine in ("onnxruntime-genai", "paced")


class Cost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How work is counted: tokens and pixels by the elements of `input`, items by its first axis, bytes by its size."""

    feature: Feature
    input: str


class QueuePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The queue policy of one priority level, as in Triton. See docs/models.md."""

    max_queue_size: int = 0  # how many of them may wait; 0: only the limit of the whole queue counts
    timeout_action: TimeoutAction = "REJECT"
    default_timeout_microseconds: int = 0  # how long they may wait; 0: until their deadlines
    demote_when_full: bool = False  # whether a request that finds the level full waits at the next lower one with room
    allow_timeout_override: bool = True  # a caller's own timeout is its deadline, which always counts


class Batching(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Limits of one batch in the pool. Work is in the cost feature's unit, padding included."""

    max_batch_size: int = 32
    max_work: int | None = None
    max_queue_delay_s: float = 0.0
    max_queue_size: int = 256
    policy: BatchingPolicy = "deadline"  # how batches are formed; see docs/models.md
    preferred_batch_size: tuple[int, ...] = ()  # rows of batches that the policy `window` does not hold back
    target_batch_s: float = TARGET_BATCH_S  # what a batch should take to compute; the policy `adaptive` keeps near it
    default_queue_policy: QueuePolicy = QueuePolicy()
    priority_queue_policy: dict[int, QueuePolicy] = {}  # by level, 1 to 4, instead of the default
    coalesce: bool = False  # whether equal inputs that are there at once are computed once; for models without chance
    pad_axis: str | None = None  # the axis along which requests of unequal length may be padded together


class Text(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How text becomes this model's input, for the OpenAI routes."""

    tokenizer: str  # a file name inside the version's folder
    max_tokens: int
    input_ids: str
    attention_mask: str
    output: str
    sha256: str | None = None  # of the tokenizer; left out: not recorded, and not checked


class Confidence(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How sure an answer must be; `tidegate model calibrate` finds the threshold. See `confidence.py`."""

    output: str  # its last axis is the classes
    measure: Measure
    threshold: float  # above 0, up to 1; what is below it is escalated
    softmax: bool = False  # whether the output holds scores that are no probabilities yet
    max_share: float = 0.5  # of the answers, at most so many are escalated in the long run: the others are provisional
    unsure: Unsure = "accept"  # what a device does for its local callers, which have no better target: docs/offline.md


class Pipeline(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Steps before and after the model, run where it runs. See docs/pipelines.md.

    A tensor comes into being once: as an input of the request, as an output of a step or of the model.
    """

    inputs: tuple[TensorSpec, ...]  # the artefacts' own
    outputs: tuple[TensorSpec, ...]  # the artefacts' own
    cost: Cost  # how batches of the model are counted; `input` is one of its own
    before: tuple[Step, ...] = ()
    after: tuple[Step, ...] = ()
    tensors: tuple[TensorSpec, ...] = ()  # between two steps: neither callers nor the model see them

    @property
    def steps(self) -> tuple[Step, ...]:
        return (*self.before, *self.after)

    @property
    def files(self) -> tuple[ArtefactFile, ...]:
        """What the steps read, each file once."""
        found = {
            step.file: ArtefactFile(step.file, step.sha256, step.size_bytes)
            for step in self.steps
            if isinstance(step, StepWithFile)
        }
        return tuple(found.values())

    @property
    def modules(self) -> tuple[WasmStep, ...]:
        """The steps that are WebAssembly."""
        return tuple(step for step in self.steps if isinstance(step, WasmStep))

    def tokenizing(self, text: str) -> TokenizeStep | None:
        """The step that makes tokens of the input called `text`, or of what steps before it made of that."""
        texts = {text}
        for step in self.before:
            if texts.isdisjoint(step.inputs):
                continue
            if isinstance(step, TokenizeStep):
                return step
            texts.update(step.outputs)
        return None

    def decoding(self, images: str) -> ImageDecodeStep | None:
        """The step that decodes the input called `images`."""
        return next((one for one in self.before if isinstance(one, ImageDecodeStep) and images in one.inputs), None)


class Stateful(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A stateful model: what it leaves in an output is the next request's input, within a sequence of the OIP.

    The state inputs are optional ones; the first request of a sequence gets zeros.
    """

    state_inputs: dict[str, str]  # input → the output that is its next value
    ttl_s: float = 60.0
    max_sequences: int = 1024


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    version: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    variants: tuple[Variant, ...]
    cost: Cost
    schema: Literal[1] = 1
    summary: str = ""
    axes: dict[str, Axis] = {}
    default_budget_s: float = 2.0
    max_batch_size: int = 0  # what /config tells clients; 0: shapes are taken as they are, batch axis included
    batching: Batching = Batching()
    text: Text | None = None
    pin: Pin = "any"  # how far a request may go; a caller may ask for less, never for more
    min_quality: float = 0.0  # of the variant that answers; a caller may ask for more, never for less
    require: Literal["attested"] | None = None  # which targets may see its requests; a caller may ask for more
    confidence: Confidence | None = None
    sequence: Stateful | None = None
    generative: Generative | None = None  # the model gives its answer token by token
    warm: Literal["demand", "always"] = "demand"  # always: stays in memory where models are loaded on demand
    warmup: tuple[str, ...] = ()  # files of samples (.npz) in the version's folder that are run when it is loaded
    fallback_model: str = ""  # answers, declared, where no target answers this one in time; "": none does
    cacheable: bool = True  # false: no gateway keeps its answers, whatever its section `cache` says
    pipeline: Pipeline | None = None  # steps before and after the model, which callers do not see
    split: LayerSplit | None = None  # where it may be cut: its head on an edge, its tail in a pool
    half: SplitHalf | None = None  # of a model that is a half of another one
    modality: Modality | None = None  # under which models share a device; by default derived from the cost's feature

    def variant(self, name: str) -> Variant | None:
        return next((variant for variant in self.variants if variant.name == name), None)

    def variants_for(self, where: Where) -> tuple[Variant, ...]:
        return tuple(variant for variant in self.variants if where in variant.where)

    def better_than(self, variant: str) -> float:
        """The least quality above this variant's; 0 where none is known to be better."""
        one = self.variant(variant)
        if one is None or one.quality is None or variant not in self.improvable:
            return 0.0
        return nextafter(one.quality.value, inf)

    @property
    def of_model(self) -> Manifest:
        """The manifest as its artefacts see it, without the pipeline around them; itself where there is none."""
        inner = self.pipeline
        if inner is None:
            return self
        return msgspec.structs.replace(
            self, inputs=inner.inputs, outputs=inner.outputs, cost=inner.cost, pipeline=None, confidence=None
        )

    def digest_of(self, variant: Variant) -> str:
        """What a variant's answers come from, as one SHA-256: its artefact, and the pipeline with its files."""
        if self.pipeline is None:
            return variant.sha256
        return sha256(variant.sha256.encode() + msgspec.msgpack.encode(self.pipeline)).hexdigest()

    @property
    def step_files(self) -> tuple[ArtefactFile, ...]:
        """What the steps of its pipeline read."""
        return () if self.pipeline is None else self.pipeline.files

    @property
    def improvable(self) -> frozenset[str]:
        """Names of the variants that another one outdoes, in the same measured quality."""
        best: dict[str, float] = {}
        measured = [(variant.name, variant.quality) for variant in self.variants if variant.quality is not None]
        for _, quality in measured:
            best[quality.metric] = max(quality.value, best.get(quality.metric, quality.value))
        return frozenset(name for name, quality in measured if quality.value < best[quality.metric])

    @property
    def kind(self) -> Modality:
        """The modality: as configured, or derived from how its work is counted."""
        if self.generative is not None and self.modality is None:
            return "generation"
        by_feature: dict[Feature, Modality] = {"tokens": "text", "pixels": "image"}
        return self.modality or by_feature.get(self.cost.feature, "other")

    @property
    def platform(self) -> str:
        return f"tidegate_{self.variants[0].engine}" if self.variants else "tidegate"
