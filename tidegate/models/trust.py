"""The engines that an operator allows: a model file is a program, and some formats can do what any program can.

`onnx`, `onnxruntime-genai`, `torch-packed` (safetensors), `transformers` (safetensors; code beside the weights is never
run) and `paced` hold data; `torch-export` a graph of torch's own operators, whose
pickles, compiled code and evaluated texts are refused (`engines/archive.py`, `engines/program_grammar.py`). TorchScript
is a language with access to files, in an archive that is read by an unpickler, and a TensorRT plan is machine code:
both need the key `allowed_engines`.
"""

from __future__ import annotations

from typing import Final

from tidegate.models.manifest import EngineName, Manifest, Variant
from tidegate.models.repository import RepositoryError

TRUSTED: Final[tuple[EngineName, ...]] = (
    "onnx",
    "torch-export",
    "torch-packed",
    "onnxruntime-genai",
    "transformers",
    "paced",
)


def check_engine(manifest: Manifest, variant: Variant, allowed: tuple[EngineName, ...]) -> None:
    """Raises RepositoryError for a variant whose engine may not run here."""
    if variant.engine not in allowed:
        raise RepositoryError(
            f"model {manifest.name!r} version {manifest.version}: variant {variant.name!r} needs the engine "
            f"{variant.engine}, whose files can run code; allowed are {', '.join(allowed)}: add it to the key "
            "'allowed_engines' if you trust whoever made the file"
        )
