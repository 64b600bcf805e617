"""Error texts for scenario files: msgspec's message, with the key that it is about."""

from __future__ import annotations

import re


def explained(message: str) -> str:
    """msgspec's "… - at `$.edges[0].slow`" as "key 'edges[0].slow': …"."""
    match = re.fullmatch(r"(.*?)(?: - at `\$\.?(.*)`)?", message, re.DOTALL)
    assert match is not None
    what, where = match[1], match[2] or ""
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", what)
    if unknown:
        return f"key {'.'.join(filter(None, (where, unknown[1])))!r}: there is no such key"
    missing = re.fullmatch(r"Object missing required field `(.*)`", what)
    if missing:
        return f"key {'.'.join(filter(None, (where, missing[1])))!r} is missing"
    return f"key {where!r}: {what}" if where else what
