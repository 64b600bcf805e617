"""What a token is by itself: its bytes, and how they are spelled where a text is wanted.

A token may hold a part of a character; an emoji takes up to four. Decoded alone it is U+FFFD, from which no caller can
join anything, so its bytes are read from the vocabulary. That spells them in one of two ways: a byte-level vocabulary
has a printable character for each byte, and one of SentencePiece with byte fallback has tokens such as `<0xE2>`. Which
one it is, the decoder shows by what it makes of "€" spelled either way; its type does not, since decoders come in
sequences. In any other vocabulary a token's bytes are those of its text.

Some decoders leave out the space before a text's first word, so a token is decoded behind itself: what it adds there
is what it adds within a text.

Pure. Source: the table of a byte-level vocabulary is `bytes_to_unicode` of GPT-2.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

_BROKEN: Final = "\ufffd"
_FALLBACK: Final = re.compile(r"<0x([0-9A-F]{2})>")
_PRINTABLE: Final = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS: Final = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF: Final = {
    **{chr(byte): byte for byte in _PRINTABLE},
    **{chr(0x100 + index): byte for index, byte in enumerate(_OTHERS)},
}


class TokenText(NamedTuple):
    """A token by itself."""

    raw: bytes

    @property
    def is_whole(self) -> bool:
        """Whether it holds no part of a character."""
        try:
            self.raw.decode()
        except UnicodeDecodeError:
            return False
        return True

    @property
    def spelled(self) -> str:
        r"""Its text, with the bytes of unfinished characters as OpenAI spells them: `\xf0\x9f`."""
        return self.raw.decode(errors="backslashreplace")


class TokenTexts:
    """The tokens of one tokenizer.

    Args:
        tokenizer: one of the library `tokenizers`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._bytes_of = _spelling_of(tokenizer.decoder)

    def of(self, id: int) -> TokenText:
        """One token, special ones included."""
        text = self._text(id)
        if _BROKEN in text and (raw := self._bytes_of(self._tokenizer.id_to_token(id) or "")) is not None:
            return TokenText(raw)
        return TokenText(text.encode())

    def _text(self, id: int) -> str:
        alone: str = self._tokenizer.decode([id], skip_special_tokens=False)
        if self._bytes_of is _byte_level:
            return alone  # nothing is left out there
        twice: str = self._tokenizer.decode([id, id], skip_special_tokens=False)
        return twice[len(alone) :] if twice.startswith(alone) else alone

    def __repr__(self) -> str:
        return f"<TokenTexts {self._bytes_of.__name__.strip('_')}>"


def _byte_level(token: str) -> bytes | None:
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return None  # one that was added as it is


def _byte_fallback(token: str) -> bytes | None:
    found = _FALLBACK.fullmatch(token)
    return None if found is None else bytes([int(found[1], 16)])


def _unknown(token: str) -> bytes | None:
    return None


def _spelling_of(decoder: Any) -> Callable[[str], bytes | None]:
    if decoder is None:
        return _unknown
    if decoder.decode(["âĤ¬"]) == "€":
        return _byte_level
    return _byte_fallback if decoder.decode(["<0xE2>", "<0x82>", "<0xAC>"]) == "€" else _unknown
