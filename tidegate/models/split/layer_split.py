"""The section `split` of a manifest: where the model may be cut into a head for the edge and a tail for the pool.

A cut is a tensor through which every way from the model's own input to its outputs leads. The head computes it on an
edge, compressed; the tail takes it, decompresses it, and computes the outputs. Both halves are models of their own,
named here: they are verified, shipped, loaded and priced like any other. What the bytes between them are is a line over
the work of a request, so that a gateway can weigh a cut by the link of the moment without running anything.

    bytes between = rows · bytes_per_row + units · bytes_per_unit

Figures in milliseconds were measured where the model was cut. They are for people: a gateway goes by what each target
measured of the halves when it loaded them.

Source: Kang et al., "Neurosurgeon: Collaborative Intelligence Between the Cloud and Mobile Edge", ASPLOS 2017, for the
cut between layers by predicted latency; Hu et al., "Dynamic Adaptive DNN Surgery for Inference Acceleration on the
Edge" (DADS), INFOCOM 2019, for graphs that are no chains. A cut here is one tensor wide; DADS' are wider.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import Final, Literal

import msgspec

Activation = Literal["fp32", "fp16", "int8"]
MOST_CUTS: Final = 16  # each is weighed for each request
UNCUT: Final = ("generative", "sequence", "pipeline", "half")  # keys of manifests whose models are not cut


class SplitTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Milliseconds of one row on one thread of the machine that cut the model: of the whole and of each half."""

    whole_ms: float
    head_ms: float
    tail_ms: float


class SplitCut(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One place to cut the model at, with the models of its halves in the version of this one."""

    layer: str  # the tensor in the whole model's graph
    head: str  # the model of the edge's half
    tail: str  # and of the pool's
    activation: Activation  # how the tensor travels
    bytes_per_row: float
    bytes_per_unit: float  # in the unit of the whole model's cost
    head_share: float  # of the whole's multiplications
    cosine: float  # of both halves' answers to the whole's, the mean over `samples` rows
    samples: int
    measured: SplitTimes | None = None

    def bytes_between(self, rows: int, units: float) -> int:
        """The size of what travels from the head to the tail."""
        return round(rows * self.bytes_per_row + units * self.bytes_per_unit)


class LayerSplit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every cut of a model, the shortest head first."""

    cuts: tuple[SplitCut, ...]


class SplitHalf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a half says of itself: whose it is, and which. A half is listed nowhere, and answers its whole's callers."""

    of: str
    role: Literal["head", "tail"]


def split_problems(name: str, split: LayerSplit) -> Iterator[str]:
    """What is wrong with the section of the model `name`, as `key: what is wrong with which value`."""
    if not 1 <= len(split.cuts) <= MOST_CUTS:
        yield f"cuts: {len(split.cuts)} of them; a model has 1 to {MOST_CUTS}, or no section `split`"
    taken = {name}
    for index, cut in enumerate(split.cuts):
        key = f"cuts[{index}]"
        if not cut.layer:
            yield f"{key}.layer: must name the tensor that is cut"
        for role, half in (("head", cut.head), ("tail", cut.tail)):
            if half in taken:
                yield f"{key}.{role}: {half!r} is another half's name, or the model's own; each half is a model"
            taken.add(half)
        for field in ("bytes_per_row", "bytes_per_unit"):
            value = getattr(cut, field)
            if not (isfinite(value) and value >= 0.0):
                yield f"{key}.{field}: {value:g} must not be negative"
        if not 0.0 <= cut.head_share <= 1.0:
            yield f"{key}.head_share: {cut.head_share:g} must be from 0 to 1"
        if not -1.0 <= cut.cosine <= 1.0:
            yield f"{key}.cosine: {cut.cosine:g} must be from -1 to 1"
        if cut.samples < 1:
            yield f"{key}.samples: {cut.samples} must be at least 1"
        for what, ms in () if cut.measured is None else msgspec.structs.asdict(cut.measured).items():
            if not (isfinite(ms) and ms >= 0.0):
                yield f"{key}.measured.{what}: {ms:g} must not be negative"
