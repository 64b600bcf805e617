"""Canonical JSON: one spelling for one content, with sorted keys, no spaces and no key twice.

Signatures are over bytes, and "the same revision with other content" is decided by comparing digests; so a document
has exactly one spelling, and a receiver refuses any other. Keys that it does not know are kept in what is compared:
`is_canonical` works on the JSON itself and not on our types.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import msgspec


def canonical(value: Any) -> bytes:
    """The bytes of a struct or of plain JSON values."""
    return msgspec.json.encode(value, order="sorted")


def is_canonical(raw: bytes) -> bool:
    """Whether these bytes are JSON in its one spelling."""
    try:
        return canonical(msgspec.json.decode(raw)) == raw
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return False


def digest_of(raw: bytes) -> str:
    """SHA-256 as 64 hexadecimal digits, which is how everything is named in a rollout."""
    return sha256(raw).hexdigest()
