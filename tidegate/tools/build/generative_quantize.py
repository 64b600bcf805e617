"""A variant for edges is made from a generating model's own weights, compared with them, and kept if it is near enough.

The weights are those of the variant that pools run. The new variant goes into the same version or into a new one; the
other files are linked, not copied. A version changes whole or not at all, and not at all where the new variant agrees
with the weights at fewer positions than wanted.

    smollm2, 167 positions of 8 answers       int4 0.71, 86 MB       int8 0.97, 267 MB
"""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from tidegate.models.generative import Generative
from tidegate.models.manifest import Manifest, Variant
from tidegate.models.repository import Repository, save_manifest
from tidegate.tools.build.convert.gguf import TOKENIZER_CONFIG
from tidegate.tools.build.errors import BuildError
from tidegate.tools.build.evaluate.golden_record import MAX_TOKENS, recorded, reference_of
from tidegate.tools.build.evaluate.prompts import PROMPTS
from tidegate.tools.build.generative_build import GENAI_ENGINE, EdgePrecision, check_genai_packages, edge_variant
from tidegate.tools.build.progress import Progress, part_of
from tidegate.tools.build.staging import model_lock, staged_version


@dataclass(frozen=True, slots=True)
class QuantizeRequest:
    """The options of `tidegate model quantize NAME`."""

    name: str
    version: str = ""  # "": the highest
    precision: EdgePrecision = "int4"
    as_version: str = ""  # "": into the same version
    agreement_min: float = 0.5
    prompts: tuple[str, ...] = PROMPTS
    max_tokens: int = MAX_TOKENS


def quantize_generative(request: QuantizeRequest, root: Path, progress: Progress, *, force: bool) -> Manifest:
    """The manifest with the new variant, which is in the repository at `root`.

    Raises:
        BuildError: the model has no weights to quantize, the variant or version exists and `force` is not set, a
            package, memory or disk is missing, or the new variant agrees too little.
        RepositoryError, ModelNotFound: there is no such version, or its files are not as its manifest says.
    """
    models = Repository(root)
    manifest = models.manifest(request.name, request.version)
    reference = _reference(manifest)
    _check_free(manifest, request, root, force=force)
    check_genai_packages(f"converting to {request.precision}")
    models.verify(manifest, reference)
    models.verify_tokenizer(manifest)
    generative, version = manifest.generative, request.as_version or manifest.version
    assert generative is not None  # `_reference` has looked
    kept = tuple(one for one in manifest.variants if one.engine != GENAI_ENGINE)
    with model_lock(root, request.name):
        # Another may have made it meanwhile: `models` has read the repository before.
        _check_free(Repository(root).manifest(manifest.name, manifest.version), request, root, force=force)
        with staged_version(root, request.name, version) as folder:
            link_files(models.folder(manifest), folder, generative, kept)
            made = edge_variant(folder, generative, request.precision, part_of(progress, 0.0, 0.5))
            whole = replace(manifest, version=version, variants=(*kept, made))
            known = reference.golden is not None and request.prompts == PROMPTS
            rest, only = part_of(progress, 0.5, 1.0), made.name if known else ""
            recording = recorded(folder, whole, rest, only=only, prompts=request.prompts, max_tokens=request.max_tokens)
            whole = asyncio.run(recording)
            _check_near(whole, made.name, reference.name, request.agreement_min)
            save_manifest(folder, whole)
    return whole


def link_files(source: Path, folder: Path, generative: Generative, variants: tuple[Variant, ...]) -> None:
    """Give a version under construction the text side and these variants' files of another one."""
    names = [generative.tokenizer, *([generative.chat_template] if generative.chat_template else [])]
    names += [TOKENIZER_CONFIG] if (source / TOKENIZER_CONFIG).is_file() else []  # a variant that is left out had it
    for variant in variants:
        names += [variant.artefact, *(one.name for one in variant.files)]
        names += [variant.golden.name] if variant.golden is not None else []
    for name in dict.fromkeys(names):
        try:
            os.link(source / name, folder / name)
        except OSError:  # a file system without links
            shutil.copyfile(source / name, folder / name)


def _reference(manifest: Manifest) -> Variant:
    which = f"{manifest.name}:{manifest.version}"
    if manifest.generative is None:
        raise BuildError(f"{which} does not generate: give files, `tidegate model quantize IN.onnx OUT.onnx`")
    found = reference_of(manifest)
    if found is None:
        raise BuildError(
            f"{which} has no variant with the model's own weights to quantize; add it again from its folder: "
            f"`tidegate model add {manifest.name} --generative FOLDER --version OTHER`"
        )
    return found


def _check_free(manifest: Manifest, request: QuantizeRequest, root: Path, *, force: bool) -> None:
    if force:
        return
    if request.as_version:
        if (place := root / manifest.name / request.as_version).exists():
            raise BuildError(f"{place} exists; give another --as-version, or --force to replace it")
        return
    there = next((one.name for one in manifest.variants if one.engine == GENAI_ENGINE), "")
    if there:
        raise BuildError(
            f"{manifest.name}:{manifest.version} has a variant for edges, {there}, already; --as-version NEW makes a "
            "version beside it, --force replaces it"
        )


def _check_near(manifest: Manifest, made: str, reference: str, least: float) -> None:
    variant = manifest.variant(made)
    quality = variant.quality if variant is not None else None
    if quality is not None and quality.value < least:
        raise BuildError(
            f"{made} agrees with {reference} at {quality.value:.4f} of {quality.samples} positions, below "
            f"--agreement-min {least:g}: nothing was changed. Quantize less (--precision int8), or ask for less"
        )
