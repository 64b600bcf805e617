"""Verification checks that fetched files are the planned model: the manifest first, then each artefact by engine.

The bytes are right by then (every digest is signed). Verification checks that they fit together: the manifest is of
this model and version, its edge variants with all their files are among the files with the digests it names, what
reads and writes its text too, and their engines are ones that may run here. ONNX files are opened in a process of their
own, with little memory and time and no way to look at other files (`tidegate/engines/onnx_check.py`): a file that
crashes the runtime must not do so inside the agent.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from typing import Final

from edge_agent.delivery.failures import WorkFailed
from edge_agent.delivery.model_store import ModelStore
from tidegate.models.manifest import ArtefactFile, EngineName, Manifest, Variant
from tidegate.models.repository import RepositoryError, parse_manifest
from tidegate.models.trust import check_engine
from tidegate.rollout.golden import BadGolden, decode_golden
from tidegate.rollout.golden_prompts import BadGoldenPrompts, decode_prompts
from tidegate.rollout.plan import ModelPlan
from tidegate.runtime.process import StartError
from tidegate.runtime.spawned_process import output_of

CHECK_TIMEOUT_S: Final = 120.0
_MAX_WORDS: Final = 200


async def verify(model: str, plan: ModelPlan, store: ModelStore, allowed: tuple[EngineName, ...]) -> None:
    """Raises WorkFailed with the problem."""
    manifest = await asyncio.to_thread(_manifest, model, plan, store, allowed)
    for variant in manifest.variants_for("edge"):
        if variant.engine == "onnx":
            await _check_onnx(variant, plan, store)


def _manifest(model: str, plan: ModelPlan, store: ModelStore, allowed: tuple[EngineName, ...]) -> Manifest:
    path = store.path(plan.manifest)
    try:
        manifest = parse_manifest(path.read_text(encoding="utf-8"), path)
    except (RepositoryError, UnicodeError) as error:
        raise WorkFailed(f"manifest: {str(error).replace(str(path), 'model.yaml')}") from error
    if (manifest.name, manifest.version) != (model, plan.version):
        raise WorkFailed(f"manifest: it is {manifest.name}:{manifest.version}, and the plan {model}:{plan.version}")
    files = {file.path: file for file in plan.files}
    variants = manifest.variants_for("edge")
    if not variants:
        raise WorkFailed("manifest: no variant may run on an edge")
    for variant in variants:
        own = ArtefactFile(variant.artefact, variant.sha256, variant.size_bytes)
        for needed in (own, *variant.files, *manifest.step_files):
            file = files.get(needed.name)
            if file is None or (file.sha256, file.size_bytes) != (needed.sha256, needed.size_bytes):
                raise WorkFailed(f"manifest: the plan has no file {needed.name!r} with the size and digest it names")
        try:
            check_engine(manifest, variant, allowed)
        except (StartError, RepositoryError) as error:
            raise WorkFailed(f"engine: {error}") from error
    if manifest.text is not None and manifest.text.tokenizer not in files:
        raise WorkFailed(f"manifest: the plan has no file {manifest.text.tokenizer!r}, its tokenizer")
    for name, sha256 in _text_files(manifest):
        if name not in files or files[name].sha256 != sha256:
            raise WorkFailed(f"manifest: the plan has no file {name!r} with the digest it names")
    if plan.probe.golden is not None:
        raw = store.path(plan.probe.golden.sha256).read_bytes()
        try:
            if manifest.generative is not None:
                decode_prompts(raw, manifest.generative)
            else:
                decode_golden(raw)
        except (BadGolden, BadGoldenPrompts) as error:
            raise WorkFailed(f"golden: {error}") from error
    return manifest


def _text_files(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """What reads and writes the text of a model that generates: names and digests."""
    generative = manifest.generative
    if generative is not None:
        yield generative.tokenizer, generative.tokenizer_sha256
        if generative.chat_template is not None and generative.chat_template_sha256 is not None:
            yield generative.chat_template, generative.chat_template_sha256


async def _check_onnx(variant: Variant, plan: ModelPlan, store: ModelStore) -> None:
    check = (sys.executable, "-P", "-m", "tidegate.engines.onnx_check")
    of = (str(store.path(variant.sha256)), str(store.path(plan.manifest)), variant.name, str(os.getpid()))
    try:
        said = await output_of([*check, *of], within_s=CHECK_TIMEOUT_S)
    except TimeoutError:
        raise WorkFailed(f"onnx: {variant.artefact} could not be checked within {CHECK_TIMEOUT_S:g} s") from None
    try:
        problem = str(json.loads(said.output)["problem"])
    except (ValueError, KeyError, TypeError):
        problem = f"the check ended with code {said.status} and no word"
    if problem:
        raise WorkFailed(f"onnx: {variant.artefact}: {problem[:_MAX_WORDS]}")
