"""What a server is to serve, and which limits hold then: of the variant, its config.json, and the pool's keys."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from cloud_pool.vllm.command_line import ServerPlan, max_context
from cloud_pool.vllm.hugging_face_config import CONFIG, read_hugging_face_config
from cloud_pool.vllm.vllm_config import VllmConfig
from tidegate.engines.generation.limits import GenerationLimits
from tidegate.models.array_files import UnsafeArrayFile, check_safetensors
from tidegate.outcome import InternalError
from tidegate.workers.process import EngineSpec

DEFAULT_SLOTS: Final = 16
_MAX_SOCKET_BYTES: Final = 107  # of a path, on Linux


def plan_server(
    spec: EngineSpec, config: VllmConfig, folder: Path, *, cache_bytes: float, token_bytes: int
) -> tuple[ServerPlan, GenerationLimits]:
    """The server of a variant, and the limits of each of its answers. Links the model's files into `folder`. Blocks.

    Args:
        folder: the server's own.
        cache_bytes: of all attention caches; infinite: as vLLM likes.
        token_bytes: that one token's cache takes; 0: not known.

    Raises:
        InternalError: naming what does not fit, and the way out.
    """
    assert spec.generation is not None, "only what generates is served by vLLM"
    said, model = spec.generation, read_hugging_face_config(spec.artefact.parent)
    slots = config.slots or said.slots or DEFAULT_SLOTS
    context = max_context(said.context, of_model=model.context, cache_bytes=cache_bytes, token_bytes=token_bytes)
    vocabularies = [one for one in (said.vocabulary_size, model.vocabulary_size) if one]
    if context < 2 or not vocabularies:
        raise InternalError(
            f"{spec.key}: there is room for {context} tokens of context, and a vocabulary of "
            f"{max(vocabularies, default=0)}: raise generation_cache_bytes, or see the model's {CONFIG}"
        )
    plan = ServerPlan(
        folder / "model",
        folder / "http.sock",
        context=context,
        slots=slots,
        cache_bytes=cache_bytes,
        token_bytes=token_bytes,
        device=spec.device,
        threads=spec.threads,
        gpu_memory_ratio=config.gpu_memory_ratio,
        arguments=config.arguments,
        batch_invariant=said.batch_invariant,
    )
    if len(os.fsencode(plan.socket)) > _MAX_SOCKET_BYTES:
        raise InternalError(f"{plan.socket}: the path is too long for a socket: set TMPDIR to a shorter folder")
    _link_files(spec.artefact, plan.folder)
    stop_tokens = said.stop_tokens or model.stop_tokens
    return plan, GenerationLimits(
        slots=slots, context=context, stop_tokens=stop_tokens, vocabulary_size=min(vocabularies)
    )


def _link_files(artefact: Path, served: Path) -> None:
    """The checked files alone: vLLM would read all weights, and all settings, that a model's folder has."""
    try:
        check_safetensors(artefact)
    except UnsafeArrayFile as error:
        raise InternalError(str(error)) from error
    served.mkdir()
    for path in (artefact, artefact.parent / CONFIG):
        (served / path.name).symlink_to(path.resolve())
