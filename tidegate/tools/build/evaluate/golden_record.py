"""Golden answers beside a variant: recorded where it was made, run again by `verify` and by devices it is shipped to.

    golden-int4.msgpack     `tidegate/rollout/golden_prompts.py`; the manifest has its digest (`golden` of the variant)

The quality of a variant is told against the reference, the one with the model's own weights: at how many positions of
the reference's answers, each behind the reference's tokens, the likeliest token is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from tidegate.generate.teacher_forcing import KnownAnswer, TokenAgreement, total
from tidegate.models.digest import sha256_of
from tidegate.models.generative import Generative
from tidegate.models.manifest import ArtefactFile, Manifest, Quality, Variant
from tidegate.models.repository import RepositoryError, read_text_file
from tidegate.rollout.golden_prompts import BadGoldenPrompts, GoldenPrompts, decode_prompts, encode_prompts
from tidegate.storage.atomic_file import write_atomically
from tidegate.tools.build.errors import BuildError
from tidegate.tools.build.evaluate.greedy import variant_worker
from tidegate.tools.build.evaluate.prompts import PROMPTS, prompt_ids
from tidegate.tools.build.progress import Progress

MAX_TOKENS: Final = 24  # of an answer: eight of them tell a share to some percent, in seconds
REFERENCE_ENGINE: Final = "transformers"  # which runs the weights as they are


def golden_name(variant: str) -> str:
    return f"golden-{variant}.msgpack"


def read_golden(folder: Path, generative: Generative, variant: Variant) -> tuple[KnownAnswer, ...]:
    """The recorded answers; none where none are recorded. Raises BuildError."""
    if (file := variant.golden) is None:
        return ()
    try:
        raw = read_text_file(folder / file.name, "the golden answers", file.sha256)
        return decode_prompts(raw, generative).answers
    except (RepositoryError, BadGoldenPrompts) as error:
        words = str(error)
        raise BuildError(words if file.name in words else f"{folder / file.name}: {words}") from error


async def recorded(
    folder: Path,
    manifest: Manifest,
    progress: Progress,
    *,
    only: str = "",
    prompts: Sequence[str] = PROMPTS,
    max_tokens: int = MAX_TOKENS,
) -> Manifest:
    """The manifest with golden answers of its generating variants, which are written into `folder`, and qualities.

    Args:
        only: of this variant alone; "": of all.

    Raises:
        BuildError: a variant does not run, or no prompt fits.
    """
    generative = manifest.generative
    assert generative is not None
    ids = await prompt_ids(folder, manifest, prompts, max_tokens=max_tokens)
    reference = reference_of(manifest)
    known = read_golden(folder, generative, reference) if reference is not None and only else ()
    variants: dict[str, Variant] = {}
    for variant in sorted(manifest.variants, key=lambda one: one is not reference):  # the reference comes first
        if variant.generation is None or only not in ("", variant.name):
            continue
        progress(f"recording golden answers of {variant.name}", len(variants) / len(manifest.variants))
        async with variant_worker(folder, manifest, variant) as worker:
            answers = await worker.answers(ids, max_tokens)
            golden = write_golden(folder / golden_name(variant.name), generative, variant.name, answers)
            quality = variant.quality
            if variant is reference:
                known = answers
                quality = Quality("top1", 1.0, _positions(answers), "it is the reference")
            elif reference is not None and known:
                progress(f"comparing {variant.name} with {reference.name}", len(variants) / len(manifest.variants))
                quality = quality_of(total(await worker.agreement(known, score=True)), reference.name)
        variants[variant.name] = replace(variant, golden=golden, quality=quality)
    return replace(manifest, variants=tuple(variants.get(one.name, one) for one in manifest.variants))


def write_golden(path: Path, model: Generative, made_by: str, answers: Sequence[KnownAnswer]) -> ArtefactFile:
    """Raises BuildError: a device would not take them."""
    raw = encode_prompts(GoldenPrompts(model.vocabulary, made_by, tuple(answers)))
    try:
        decode_prompts(raw, model)
    except BadGoldenPrompts as error:
        raise BuildError(f"{path}: {error}") from error
    write_atomically(path, raw, mode=0o644)
    return ArtefactFile(path.name, sha256_of(path), len(raw))


def reference_of(manifest: Manifest) -> Variant | None:
    """The variant with the model's own weights."""
    return next((one for one in manifest.variants if one.engine == REFERENCE_ENGINE), None)


def quality_of(found: TokenAgreement, reference: str) -> Quality:
    """Of a variant that agrees so far with the reference."""
    words = [
        f"greedy tokens equal to those of {reference}, each behind its text, in {found.answers} answers",
        f"{found.leading / max(1, found.answers):.1f} tokens before the first difference",
    ]
    if found.perplexity is not None:
        words.append(f"perplexity of that text {found.perplexity:.2f}")
    return Quality("top1", round(found.share, 5), found.positions, "; ".join(words))


def _positions(answers: Sequence[KnownAnswer]) -> int:
    return sum(one.positions for one in answers)
