"""Turns token ids into text as they come, without ever giving out a part of a character.

What a token means depends on its neighbours: a character may take four tokens, and some decoders leave out the space
before the first word. So the text of new tokens is what decoding them *behind the tokens before* adds to decoding those
alone. Text that ends in U+FFFD may be a character of which tokens are missing, and waits for them. No character needs
more than four tokens, so the last three are all that can wait for a fourth: a model that writes no text at all is
decoded in windows of a few tokens, and each token costs the same. Most tokens of a byte-level vocabulary are whole
characters, which mean the same everywhere: those are looked up (`fixed_text`).

Source: the windows are those of text-generation-inference and vLLM; the bound on them is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

_BROKEN: Final = "\ufffd"
_CONTEXT: Final = 4  # tokens of the prompt that the first ones are decoded behind
_WAITING: Final = 3  # tokens of an unfinished character: UTF-8 takes four bytes at most
_MOST: Final = 8  # tokens that end in no text until all but the last three are given up


class Decoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, ids: Sequence[int]) -> str:
        """Their text, without special tokens."""
        ...

    def fixed_text(self, id: int) -> str | None:
        """What a token adds wherever it stands; None where that depends on its neighbours."""
        ...


class Detokenizer:
    """The text of one answer.

    Args:
        prompt: the ids before the answer; only the last few count.
    """

    __slots__ = ("_before", "_before_text", "_decoder", "_new")

    def __init__(self, decoder: Decoder, prompt: Sequence[int] = ()) -> None:
        self._decoder = decoder
        self._before = list(prompt[-_CONTEXT:])
        self._before_text = self._decode(self._before)
        self._new: list[int] = []  # those whose text has not been given out

    def push(self, id: int) -> str:
        """The text that is certain now; "" while a character is unfinished."""
        if not self._new and (fixed := self._decoder.fixed_text(id)) is not None:
            self._before, self._before_text = [id], fixed
            return fixed
        self._new.append(id)
        text = self._decode(self._before + self._new)
        if text.endswith(_BROKEN):
            return self._give_up() if len(self._new) >= _MOST else ""
        return self._take(self._new, text)

    def flush(self) -> str:
        """What is left at the end: a character that will not be finished is U+FFFD."""
        return self._take(self._new, self._decode(self._before + self._new)) if self._new else ""

    def _give_up(self) -> str:
        """Give out all but the last tokens as they are: they are no text."""
        old, waiting = self._new[:-_WAITING], self._new[-_WAITING:]
        text = self._take(old, self._decode(self._before + old))
        self._new = waiting
        return text

    def _take(self, ids: list[int], text: str) -> str:
        added = text[len(self._before_text) :]
        self._before, self._before_text, self._new = ids, self._decode(ids), []
        return added

    def _decode(self, ids: list[int]) -> str:
        return self._decoder.decode(ids) if ids else ""

    def __repr__(self) -> str:
        return f"<Detokenizer {len(self._new)} tokens waiting>"
