"""Texts to at most so many tokens each, without reading more of a long text than matters.

A text far beyond the model's length is read only as far as it matters: a megabyte takes over a second, its beginning a
few milliseconds. The beginning's tokens are the text's own wherever at least as many again follow them, since where a
text is cut can only disturb the tokens next to the cut; if fewer do, the whole text is read.

Each text is a batch of its own. The library spreads a batch of two texts or more over threads that a process has once,
so that the caller of such a batch waits for all that others have asked of those threads before: an event loop with two
short texts would stand still behind somebody's thousand long ones. A batch of one is encoded in the caller's thread.
`TOKENIZERS_PARALLELISM` does the same, but for the whole process, which may be somebody else's.

A tokenizer.json may carry its author's padding and truncation; both are replaced: rows stay as long as they are, and
are cut where the manifest says that the model ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tokenizers import Tokenizer

HEAD_CHARACTERS_PER_TOKEN: Final = 32  # English has 4 to 5; a head is then some seven times what the model takes


def truncating_tokenizer(content: bytes, max_tokens: int) -> Any:
    """The tokenizer of a tokenizer.json. Raises Exception, of which the library raises nothing narrower."""
    tokenizer = Tokenizer.from_buffer(content)
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length=max_tokens)
    return tokenizer


def encode_truncated(tokenizer: Any, texts: Sequence[str]) -> list[Any]:
    """The encoding of each text. Blocks; the library lets go of Python's lock meanwhile."""
    head = HEAD_CHARACTERS_PER_TOKEN * tokenizer.truncation["max_length"]
    return [_encode_one(tokenizer, text, head) for text in texts]


def _encode_one(tokenizer: Any, text: str, head: int) -> Any:
    # Not `encode`: before version 0.21 of the library it keeps Python's lock.
    encoding = tokenizer.encode_batch([text[:head]])[0]
    # One overflow is up to another full length: two prove that a full length lies between what is kept and the cut.
    if len(text) > head and len(encoding.overflowing) < 2:
        encoding = tokenizer.encode_batch([text])[0]
    return encoding
