"""What no generating engine computes, whatever its runtime: a prompt without room for an answer, or of other tokens."""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.engines.errors import EngineError


def check_prompt(
    artefact: str, prompt: Sequence[int], *, free_slots: int, slots: int, context: int, vocabulary_size: int
) -> None:
    """Raises EngineError, which names `artefact`.

    Args:
        free_slots: of `slots`.
        context: tokens of prompt and answer together.
        vocabulary_size: ids are below it.
    """
    if free_slots <= 0:
        raise EngineError(f"{artefact} has {slots} slots, and all are taken")
    if not prompt:
        raise EngineError("the prompt has no tokens")
    if len(prompt) >= context:
        raise EngineError(
            f"the prompt has {len(prompt)} tokens, which leaves none for the answer: "
            f"{artefact} has a context of {context}"
        )
    if min(prompt) < 0 or max(prompt) >= vocabulary_size:
        raise EngineError(f"the prompt has tokens that are not from 0 to {vocabulary_size - 1}")
