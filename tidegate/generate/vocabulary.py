"""What a model's token ids mean, as one digest: variants with the same may go on with each other's answers.

How text is cut into tokens is not part of it: an answer is handed on as ids.
"""

from __future__ import annotations

import hashlib
from typing import Any


def vocabulary_digest(tokenizer: Any) -> str:
    """The SHA-256 over every id with its token, added ones included, in the order of ids.

    Args:
        tokenizer: a `tokenizers.Tokenizer`.
    """
    digest = hashlib.sha256()
    by_id = sorted((id, token) for token, id in tokenizer.get_vocab(with_added_tokens=True).items())
    for id, token in by_id:
        raw = token.encode("utf-8", "surrogatepass")
        digest.update(b"%d %d " % (id, len(raw)) + raw)
    return digest.hexdigest()
