"""The manifest of a generating model, read from a folder as Hugging Face's tools write it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tidegate.generate.vocabulary import vocabulary_digest
from tidegate.models.digest import sha256_of
from tidegate.models.generative import GenerationCost, Generative
from tidegate.models.manifest import ArtefactFile, Axis, Cost, EngineName, Manifest, TensorSpec, Variant, Where
from tidegate.tools.build.convert.gguf import CHAT_TEMPLATE, CONFIG, TOKENIZER
from tidegate.tools.build.convert.huggingface import read_json
from tidegate.tools.build.errors import BuildError
from tidegate.types import Datatype

DEFAULT_BUDGET_S: Final = 60.0  # an answer of some hundred tokens, on a small device
_DEFAULT_MAX_TOKENS: Final = 256
_CONTEXT_KEYS: Final = ("max_position_embeddings", "n_positions", "n_ctx")


def generating_manifest(
    name: str, version: str, generative: Generative, variants: Sequence[Variant], *, summary: str = ""
) -> Manifest:
    return Manifest(
        name=name,
        version=version,
        summary=summary,
        inputs=(
            TensorSpec("input_ids", Datatype.INT32, ("prompt",), optional=True),
            TensorSpec("text_input", Datatype.BYTES, (1,), optional=True),
        ),
        outputs=(
            TensorSpec("output_ids", Datatype.INT32, ("answer",)),
            TensorSpec("text_output", Datatype.BYTES, (1,)),
        ),
        axes={"prompt": Axis(1, generative.context), "answer": Axis(0, generative.context)},
        variants=tuple(variants),
        cost=Cost("tokens", "input_ids"),
        default_budget_s=DEFAULT_BUDGET_S,
        generative=generative,
    )


def generating_variant(
    name: str,
    engine: EngineName,
    precision: str,
    where: tuple[Where, ...],
    files: Sequence[Path],
    cost: GenerationCost,
) -> Variant:
    """One variant: its artefact is the first of `files`, and the others lie beside it."""
    artefact, *others = files
    return Variant(
        name=name,
        artefact=artefact.name,
        engine=engine,
        precision=precision,
        where=where,
        sha256=sha256_of(artefact),
        size_bytes=artefact.stat().st_size,
        files=tuple(ArtefactFile(one.name, sha256_of(one), one.stat().st_size) for one in others),
        generation=cost,
    )


def vocabulary_of(path: Path) -> str:
    """The digest of a tokenizer's vocabulary. Raises BuildError."""
    return vocabulary_digest(_tokenizer(path))


def _tokenizer(path: Path) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise BuildError(f"{path}: is no tokenizer that can be read: {error}") from error


def read_generative(folder: Path) -> Generative:
    """What the folder's tokenizer, template and configuration say. Raises BuildError."""
    path = folder / TOKENIZER
    tokenizer = _tokenizer(path)
    config = read_json(folder / CONFIG)
    template = folder / CHAT_TEMPLATE
    has_template = template.is_file()
    size = config.get("vocab_size")
    if not isinstance(size, int) or size < tokenizer.get_vocab_size():
        raise BuildError(f"{folder / CONFIG}: vocab_size is {size!r}, and the tokenizer has more")
    context = next((config[key] for key in _CONTEXT_KEYS if isinstance(config.get(key), int)), None)
    if context is None:
        raise BuildError(f"{folder / CONFIG}: does not say how long a context is ({', '.join(_CONTEXT_KEYS)})")
    return Generative(
        context=context,
        vocabulary=vocabulary_digest(tokenizer),
        vocabulary_size=size,
        tokenizer=TOKENIZER,
        tokenizer_sha256=sha256_of(path),
        stop_tokens=_stop_tokens(folder, config),
        chat_template=CHAT_TEMPLATE if has_template else None,
        chat_template_sha256=sha256_of(template) if has_template else None,
        default_max_tokens=min(_DEFAULT_MAX_TOKENS, context),
    )


def _stop_tokens(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Those of the generation's configuration where there is one, else the model's."""
    path = folder / "generation_config.json"
    said = read_json(path).get("eos_token_id") if path.is_file() else None
    said = config.get("eos_token_id") if said is None else said
    ids = said if isinstance(said, list) else [said]
    return tuple(sorted({id for id in ids if isinstance(id, int)}))
