"""How many tokens a generation may have: what its model, its caller and the operator's limits leave.

Pure.
"""

from __future__ import annotations

from tidegate.models.generative import Generative
from tidegate.models.manifest import Manifest
from tidegate.oip.content_limits import ContentLimits
from tidegate.outcome import InvalidRequest, NotSupported


def generative_of(manifest: Manifest) -> Generative:
    """The part of a generating model. Raises NotSupported for another model."""
    if manifest.generative is None:
        raise NotSupported(f"model {manifest.name!r} generates no text")
    return manifest.generative


def prompt_room(model: Generative, limits: ContentLimits) -> int:
    """The most tokens of a prompt: one of the context is for the answer."""
    return min(model.context - 1, limits.max_prompt_tokens)


def output_tokens(model: Generative, prompt_tokens: int, asked: int | None, limits: ContentLimits) -> int:
    """The most tokens of an answer.

    Args:
        asked: by the caller; None leaves it to the model.

    Raises:
        InvalidRequest: names the numbers; the caller asked for more than there is.
    """
    left = model.context - prompt_tokens
    if asked is None:
        return min(model.default_max_tokens, left, limits.max_output_tokens)
    if asked > limits.max_output_tokens:
        raise InvalidRequest(
            f"{asked} tokens are asked for; at most {limits.max_output_tokens} may be (max_output_tokens)"
        )
    if asked > left:
        raise InvalidRequest(
            f"the prompt has {prompt_tokens} tokens and {asked} are asked for, {prompt_tokens + asked} together; "
            f"the model's context has {model.context}"
        )
    return asked
