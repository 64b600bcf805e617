"""A model with a whole pipeline: text in, the name of a class out, with a WebAssembly step on each side of the model.

    text ─ redact.wasm ─▶ clean ─ tokenize ─▶ input_ids, attention_mask ─ MODEL ─▶ token_scores ─ pool ─▶ scores
      ─ clip.wasm ─▶ clipped ─ softmax ─▶ probabilities ─ top_k ─▶ best, place ─ labels ─▶ label

The model is a table of scores by token, in ONNX, for edges and pools. `wat_of_the_docs` has the modules of
docs/pipelines.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from msgspec.structs import replace
from numpy.typing import NDArray
from onnx import TensorProto, helper
from tokenizers import Tokenizer, models, pre_tokenizers

from tidegate.models.digest import sha256_of
from tidegate.models.manifest import Axis, Batching, Bounds, Cost, Manifest, Pipeline, TensorSpec, Variant
from tidegate.models.repository import save_manifest
from tidegate.models.steps import LabelsStep, PoolingStep, SoftmaxStep, TokenizeStep, TopKStep, WasmStep
from tidegate.types import Datatype

DOCS: Final = Path(__file__).parents[3] / "docs" / "pipelines.md"
VOCABULARY: Final = {"[UNK]": 0, "calm": 1, "storm": 2, "tide": 3, "the": 4, "*": 5}
LABELS: Final = ("smooth", "rough", "even")
TABLE: Final = np.array(
    [[0.0, 0.0, 0.1], [3.0, 0.0, 0.0], [0.0, 5.0, 0.0], [0.1, 0.1, 0.3], [0.0, 0.0, 0.0], [0.0, 9.0, 0.0]],
    np.float32,
)
_BATCH, _SEQUENCE = "batch", "sequence"
_INT64, _FP32, _BYTES = Datatype.INT64, Datatype.FP32, Datatype.BYTES


def wat_of_the_docs() -> dict[str, str]:
    """The example modules of the docs, by name, in WebAssembly's text format."""
    found = re.findall(r"```wat\n;; (\w+): .*?\n(.*?)```", DOCS.read_text(), re.DOTALL)
    return dict(found)


def weather_repository(root: Path, modules: Mapping[str, bytes], **keys: Any) -> Manifest:
    """Put the model `weather` into the repository, with these modules as redact.wasm and clip.wasm."""
    folder = root / "weather" / "1"
    folder.mkdir(parents=True)
    tokenizer: Any = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "labels.txt").write_text("\n".join(LABELS) + "\n")
    onnx.save(_graph(), folder / "model.onnx")
    for name, module in modules.items():
        (folder / f"{name}.wasm").write_bytes(module)
    manifest = weather_manifest(folder, **keys)
    save_manifest(folder, manifest)
    return manifest


def weather_manifest(folder: Path, **keys: Any) -> Manifest:
    """The manifest of what is in the folder."""

    def file(name: str) -> dict[str, Any]:
        path = folder / name
        return {"file": name, "sha256": sha256_of(path), "size_bytes": path.stat().st_size}

    text = TensorSpec("text", _BYTES, (_BATCH,))
    tokens = tuple(
        TensorSpec(name, _INT64, (_BATCH, _SEQUENCE), Bounds(0, most))
        for name, most in (("input_ids", len(TABLE) - 1), ("attention_mask", 1))
    )
    scores = (_BATCH, len(LABELS))
    pipeline = Pipeline(
        before=(
            WasmStep(("text",), ("clean",), **file("redact.wasm")),
            TokenizeStep(("clean",), ("input_ids", "attention_mask"), max_tokens=32, **file("tokenizer.json")),
        ),
        inputs=tokens,
        outputs=(TensorSpec("token_scores", _FP32, (_BATCH, _SEQUENCE, len(LABELS))),),
        cost=Cost("tokens", "input_ids"),
        after=(
            PoolingStep(("token_scores", "attention_mask"), ("scores",)),
            WasmStep(("scores",), ("clipped",), **file("clip.wasm")),
            SoftmaxStep(("clipped",), ("probabilities",)),
            TopKStep(("probabilities",), ("best", "place"), k=1),
            LabelsStep(("place",), ("label",), **file("labels.txt")),
        ),
        tensors=(
            TensorSpec("clean", _BYTES, (_BATCH,)),
            TensorSpec("scores", _FP32, scores),
            TensorSpec("clipped", _FP32, scores),
            TensorSpec("place", _INT64, (_BATCH, 1)),
        ),
    )
    model = file("model.onnx")
    artefact = Variant("int8", "model.onnx", "onnx", "int8", ("edge",), model["sha256"], model["size_bytes"])
    variants = (artefact, replace(artefact, name="fp32", precision="fp32", where=("pool",)))
    manifest = Manifest(
        name="weather",
        version="1",
        inputs=(text,),
        outputs=(
            TensorSpec("label", _BYTES, (_BATCH, 1)),
            TensorSpec("best", _FP32, (_BATCH, 1)),
            TensorSpec("probabilities", _FP32, scores),
        ),
        variants=variants,
        cost=Cost("tokens", "text"),
        axes={_BATCH: Axis(1, 8), _SEQUENCE: Axis(1, 32)},
        batching=Batching(max_batch_size=8, pad_axis=_SEQUENCE),
        pipeline=pipeline,
    )
    return replace(manifest, **keys)


def expected_probabilities(*texts: str) -> NDArray[np.float32]:
    """What the pipeline of the docs' modules gives, computed here: digits are stars, scores are within -1 and 1."""
    rows = []
    for text in texts:
        words = re.findall(r"\w+|[^\w\s]+", re.sub(r"\d", "*", text))
        scores = np.clip(np.mean([TABLE[VOCABULARY.get(word, 0)] for word in words], axis=0), -1.0, 1.0)
        powers = np.exp(scores - scores.max())
        rows.append(powers / powers.sum())
    return np.asarray(rows, np.float32)


def _graph() -> onnx.ModelProto:
    """Scores of each token, zero where the mask is."""
    ids, mask = (
        helper.make_tensor_value_info(name, TensorProto.INT64, [_BATCH, _SEQUENCE])
        for name in ("input_ids", "attention_mask")
    )
    scores = helper.make_tensor_value_info("token_scores", TensorProto.FLOAT, [_BATCH, _SEQUENCE, len(LABELS)])
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["table", "input_ids"], ["found"]),
            helper.make_node("Cast", ["attention_mask"], ["real"], to=TensorProto.FLOAT),
            helper.make_node("Unsqueeze", ["real", "last"], ["kept"]),
            helper.make_node("Mul", ["found", "kept"], ["token_scores"]),
        ],
        "weather",
        [ids, mask],
        [scores],
        [
            helper.make_tensor("table", TensorProto.FLOAT, TABLE.shape, TABLE.flatten().tolist()),
            helper.make_tensor("last", TensorProto.INT64, [1], [-1]),
        ],
    )
    model = helper.make_model(graph, ir_version=9, opset_imports=[helper.make_opsetid("", 17)])
    onnx.checker.check_model(model)
    return model
