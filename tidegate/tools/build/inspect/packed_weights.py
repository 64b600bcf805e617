"""The signature of packed weights: the inputs of every packed encoder, with what its tables hold as bounds.

It is the signature that callers see, with plain rows: the engine packs. The one output has no name in the file.
"""

from __future__ import annotations

from pathlib import Path

import safetensors

from tidegate.engines.encoder.torch_packed import IDS, MASK, describe
from tidegate.engines.errors import EngineError
from tidegate.models.manifest import Bounds
from tidegate.tools.build.errors import BuildError
from tidegate.tools.build.inspect.signature import ModelSignature, SignaturePort
from tidegate.types import Datatype

_PRECISIONS = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
_ROWS = ("batch", "sequence")


def inspect_packed(path: Path) -> ModelSignature:
    """Raises BuildError: the file is none of ours, or lacks a table."""
    try:
        describe(path)
        with safetensors.safe_open(str(path), framework="np") as file:
            words = file.get_slice("embeddings.word_embeddings.weight")
            vocabulary, hidden = words.get_shape()
            most, _ = file.get_slice("embeddings.position_embeddings.weight").get_shape()
            precision = _PRECISIONS.get(words.get_dtype(), "fp32")
    except EngineError as error:
        raise BuildError(str(error)) from error
    except (safetensors.SafetensorError, ValueError) as error:
        raise BuildError(f"{path}: lacks a table of a BERT: {error}") from error
    return ModelSignature(
        source=path.name,
        inputs=(
            SignaturePort(IDS, Datatype.INT64, _ROWS, Bounds(0, vocabulary - 1)),
            SignaturePort(MASK, Datatype.INT64, _ROWS, Bounds(0, 1)),
        ),
        outputs=(SignaturePort("", Datatype.FP32, ("batch", hidden)),),
        precision=precision,
        ranges={"batch": (1, None), "sequence": (1, most)},
    )
