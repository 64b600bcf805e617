"""What a front needs of a generating model's text side; `text_models.py` is the real one.

Servers that may run where no tokenizer is installed, such as a pool's, know it by these interfaces only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tidegate.generate.text.detokenizer import Detokenizer
from tidegate.models.generative import Generative
from tidegate.models.manifest import Manifest
from tidegate.outcome import InvalidRequest


class PromptTooLong(InvalidRequest):
    """A prompt that leaves no room for an answer. It travels as `invalid_request`."""


class TextSide(Protocol):
    """One model version's."""

    @property
    def generative(self) -> Generative: ...

    async def encode(self, text: str, *, room: int, special: bool = True) -> tuple[int, ...]:
        """The ids of a text. Raises PromptTooLong for more than `room` of them.

        Args:
            special: whether the tokens that every text begins or ends with are put there.
        """
        ...

    def detokenizer(self, prompt: Sequence[int]) -> Detokenizer:
        """What turns the answer to this prompt into text."""
        ...


class TextSides(Protocol):
    """Those of all models."""

    async def of(self, manifest: Manifest) -> TextSide:
        """The text side of a generating model. Raises NotSupported for a model that has none here."""
        ...


def check_room(tokens: int, room: int, *, at_least: bool = False) -> None:
    """Raises PromptTooLong for a prompt of more than `room` tokens."""
    if tokens > room:
        count = f"at least {tokens}" if at_least else f"{tokens}"
        raise PromptTooLong(f"the prompt has {count} tokens; at most {room} may come, so that an answer has room")
