"""How many tokens a generation may have: what its model, its caller and the operator's limits leave.

Pure.
"""

from __future__ import annotations

from typing import Final

from tidegate.generate.text.text_side import check_room
from tidegate.models.generative import Generative
from tidegate.models.manifest import Manifest
from tidegate.oip.content_limits import ContentLimits
from tidegate.outcome import InvalidRequest, NotSupported
from tidegate.text_prompt import TextPrompt

_SURELY: Final = 4


def generative_of(manifest: Manifest) -> Generative:
    """The part of a generating model. Raises NotSupported for another model."""
    if manifest.generative is None:
        raise NotSupported(f"model {manifest.name!r} generates no text")
    return manifest.generative


def prompt_room(model: Generative, limits: ContentLimits) -> int:
    """The most tokens of a prompt: one of the context is for the answer."""
    return min(model.context - 1, limits.max_prompt_tokens)


def check_words(words: TextPrompt, model: Generative, limits: ContentLimits) -> None:
    """Raises PromptTooLong for a text that has more tokens than there is room for, however it is cut into them.

    Nobody here knows how: four characters are usual for a token, and a text of four times as many is surely too long.
    """
    check_room(words.about_tokens // _SURELY, prompt_room(model, limits), at_least=True)


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
