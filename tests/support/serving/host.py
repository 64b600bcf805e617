"""A model host with no model behind it: answers are arithmetic on what came, so that a test can tell them apart.

Stands in for the gateway, an edge agent or the pool wherever only the wire in front of them is under test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from tidegate.arrays import array_to_tensor, tensor_to_array
from tidegate.models.manifest import Axis, Bounds, Cost, Manifest, TensorSpec, Text, Variant
from tidegate.oip.host import ModelStatistics
from tidegate.outcome import ModelNotFound
from tidegate.types import Call, Datatype, InferResponse, Reply, Route, Tensor


def variant(name: str) -> Variant:
    return Variant(
        name=name,
        artefact=f"{name}.onnx",
        engine="onnx",
        precision=name,
        where=("edge", "pool"),
        sha256="0" * 64,
        size_bytes=1,
    )


def minilm() -> Manifest:
    """Shaped and bounded like the demo's embedding model."""
    return Manifest(
        name="minilm",
        version="1",
        inputs=(
            TensorSpec("input_ids", Datatype.INT64, ("batch", "sequence"), Bounds(0, 30521)),
            TensorSpec("attention_mask", Datatype.INT64, ("batch", "sequence"), Bounds(0, 1)),
        ),
        outputs=(TensorSpec("sentence_embedding", Datatype.FP32, ("batch", 384)),),
        variants=(variant("int8"), variant("fp32")),
        cost=Cost("tokens", "input_ids"),
        axes={"batch": Axis(1, 64), "sequence": Axis(1, 256)},
        text=Text("tokenizer.json", 256, "input_ids", "attention_mask", "sentence_embedding"),
    )


def digits() -> Manifest:
    """Shaped and bounded like the demo's image model."""
    return Manifest(
        name="digits",
        version="1",
        inputs=(TensorSpec("image", Datatype.FP32, ("batch", 1, 8, 8), Bounds(0, 1)),),
        outputs=(TensorSpec("probabilities", Datatype.FP32, ("batch", 10)),),
        variants=(variant("int8"), variant("fp32")),
        cost=Cost("pixels", "image"),
        axes={"batch": Axis(1, 64)},
    )


def mirror() -> Manifest:
    """One unbounded input and output of every datatype, of any length from zero up: each output is its input."""
    return Manifest(
        name="mirror",
        version="3",
        inputs=tuple(TensorSpec(f"in_{kind.value}", kind, ("n",), optional=True) for kind in Datatype),
        outputs=tuple(TensorSpec(f"out_{kind.value}", kind, ("n",)) for kind in Datatype),
        variants=(variant("fp32"),),
        cost=Cost("items", "in_FP32"),
        axes={"n": Axis(min=0)},
    )


class FakeHost:
    """Keeps every call it was given; `answer` may be replaced to answer otherwise, or to raise."""

    def __init__(self, *manifests: Manifest) -> None:
        self._manifests = manifests or (minilm(), digits(), mirror())
        self.calls: list[Call] = []
        self.arrived = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.is_ready = True
        self.answer: Callable[[Call], Reply] = self.computed
        self.hold: asyncio.Event | None = None  # set it and calls wait for it
        self._statistics = {
            (manifest.name, manifest.version): ModelStatistics(manifest.name, manifest.version)
            for manifest in self._manifests
        }

    def __repr__(self) -> str:
        return f"<FakeHost {len(self.calls)} calls>"

    @property
    def server_name(self) -> str:
        return "tidegate"

    def ready(self) -> bool:
        return self.is_ready

    def manifests(self) -> Sequence[Manifest]:
        return self._manifests

    def manifest(self, name: str, version: str = "") -> Manifest:
        for manifest in self._manifests:
            if manifest.name == name and version in ("", manifest.version):
                return manifest
        raise ModelNotFound(f"Request for unknown model: '{name[:80]}' is not found")

    def model_ready(self, name: str, version: str = "") -> bool:
        return self.is_ready and any(m.name == name and version in ("", m.version) for m in self._manifests)

    def statistics(self, name: str = "", version: str = "") -> Sequence[ModelStatistics]:
        chosen = [self.manifest(name, version)] if name else list(self._manifests)
        return [self._statistics[manifest.name, manifest.version] for manifest in chosen]

    async def infer(self, call: Call) -> Reply:
        self.calls.append(call)
        self.arrived.set()
        if self.hold is not None:
            try:
                await self.hold.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        reply = self.answer(call)
        self._count(call)
        return reply

    def _count(self, call: Call) -> None:
        """What perf_analyzer reads: it gives up on a model whose counts stand still."""
        model = self._statistics[call.request.model_name, self.manifest(call.request.model_name).version]
        model.inference_count += 1
        model.execution_count += 1
        for tally in (model.success, model.queue, model.compute_infer):
            tally.add(0.001)

    def computed(self, call: Call) -> Reply:
        """The arithmetic answer, said to be from an edge that had two seconds left."""
        request = call.request
        manifest = self.manifest(request.model_name)
        wanted = [output.name for output in request.outputs] or _default_outputs(call, manifest)
        return Reply(
            InferResponse(
                model_name=manifest.name,
                model_version=manifest.version,
                outputs=tuple(_output(name, call) for name in wanted),
                id=request.id,
            ),
            stages={"queue": 0.001, "compute": 0.004},
            route=Route(served_by="edge/attic", reason="cheapest", variant="int8"),
            budget_left_s=1.8742,
            variant="int8",
        )


def _default_outputs(call: Call, manifest: Manifest) -> list[str]:
    if manifest.name == "mirror":
        return [tensor.name.replace("in_", "out_") for tensor in call.request.inputs]
    return [spec.name for spec in manifest.outputs]


def _output(name: str, call: Call) -> Tensor:
    inputs = {tensor.name: tensor for tensor in call.request.inputs}
    if name.startswith("out_"):
        tensor = inputs[name.replace("out_", "in_")]
        return Tensor(name, tensor.datatype, tensor.shape, tensor.raw)
    if name == "sentence_embedding":
        return array_to_tensor(name, embedding(tensor_to_array(inputs["input_ids"])), Datatype.FP32)
    rows = inputs["image"].shape[0]
    return array_to_tensor(name, np.tile(np.linspace(0, 0.9, 10), (rows, 1)), Datatype.FP32)


def embedding(input_ids: np.ndarray) -> np.ndarray:
    """A row's 384 numbers: its sum of ids, then zeros."""
    rows = np.zeros((input_ids.shape[0], 384))
    rows[:, 0] = input_ids.sum(axis=1)
    return rows
