"""Hostile bytes: valid examples that were damaged, and structures that were never valid. Hypothesis strategies.

Damage keeps most of an example as it was, so that it passes the first checks and reaches what lies behind them: bits
are flipped, ends are cut, pieces are repeated, taken from other examples, or replaced by what parsers are known to
stumble over (huge numbers, deep nesting, odd unicode, what means something to a shell, a path or a protobuf).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

NUMBERS = (
    0,
    -1,
    2**31 - 1,
    2**31,
    2**32,
    2**53,
    2**63 - 1,
    2**63,
    2**64 - 1,
    2**64,
    10**30,
    10**400,
    -(2**63) - 1,
    1e308,
    -0.0,
    5e-324,
)
TEXTS = (
    "",
    "\x00",
    "a\x00b",
    "\ud800",
    "é",
    "\u202e",
    "\U0001f4a9" * 9,
    "../" * 20,
    "%00",
    "true",
    "NaN",
    "-1",
    "1e999",
    "x" * 5000,
    "'; --",
    "${jndi:x}",
    "{{7*7}}",
    "\r\nx-evil: 1",
    "tidegate-",
    "0",
    "\uffff",
    "١٢٣",
    "1_000",
    " 1",
    "0x10",
    "+5",
    "ab" * 100,
)
SPLICES = (
    b"",
    b"\x00",
    b"\xff" * 10,
    b"\x80" * 11,
    b"[" * 2000,
    b'{"a":' * 2000,
    b"]" * 50,
    b"1e999",
    b"9" * 5000,
    b"-9223372036854775809",
    b"NaN",
    b"null",
    b'"\\ud800"',
    b"\xed\xa0\x80",
    b"\xf4\x90\x80\x80",
    b"\xef\xbb\xbf",
    b'"":',
    b",,",
    b"\\u0000",
    b"- &a [*a, *a]\n",
    b"\x0a\xff\xff\xff\xff\x0f",
    b"\x12\x80\x80\x80\x80\x10",
    b"true",
    b"<<: *a\n",
    b"? [a]\n: b\n",
    b"2024-13-99",
    b"!!python/object:os.x ",
)


def damaged(examples: Sequence[bytes], *, most_bytes: int = 64 * 1024) -> st.SearchStrategy[bytes]:
    """One of the examples with one to six pieces of damage."""

    @st.composite
    def build(draw: st.DrawFn) -> bytes:
        text = draw(st.sampled_from(examples))
        for _ in range(draw(st.integers(1, 6))):
            text = _hurt(draw, text, examples)[:most_bytes]
        return text

    return build()


def _hurt(draw: st.DrawFn, text: bytes, examples: Sequence[bytes]) -> bytes:
    start = draw(st.integers(0, len(text)))
    end = min(len(text), start + draw(st.sampled_from((0, 1, 2, 4, 8, 30))))
    match draw(st.sampled_from(("flip", "cut", "splice", "repeat", "other", "bytes", "number"))):
        case "flip" if start < len(text):
            return text[:start] + bytes([text[start] ^ 1 << draw(st.integers(0, 7))]) + text[start + 1 :]
        case "cut":
            return text[:start] if draw(st.booleans()) else text[:start] + text[end:]
        case "splice":
            return text[:start] + draw(st.sampled_from(SPLICES)) + text[end:]
        case "repeat":
            return text[:end] + text[start:end] * draw(st.sampled_from((1, 2, 100))) + text[end:]
        case "other":
            other = draw(st.sampled_from(examples))
            return text[:start] + other[draw(st.integers(0, len(other))) :]
        case "number":
            return text[:start] + str(draw(st.sampled_from(NUMBERS))).encode() + text[end:]
    return text[:start] + draw(st.binary(max_size=8)) + text[end:]


def values(*, depth: int = 3) -> st.SearchStrategy[Any]:
    """Anything that JSON can say."""
    plain = st.none() | st.booleans() | st.sampled_from(NUMBERS) | st.sampled_from(TEXTS) | st.integers(-4, 300)
    held = plain
    for _ in range(depth):
        held = plain | st.lists(held, max_size=4) | st.dictionaries(st.sampled_from(TEXTS), held, max_size=3)
    return held


def bent(example: Mapping[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """The example with one to four of its values, anywhere, replaced, dropped or joined by unknown ones."""

    @st.composite
    def build(draw: st.DrawFn) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(json.dumps(example))
        for _ in range(draw(st.integers(1, 4))):
            _bend(draw, found)
        return found

    return build()


def _bend(draw: st.DrawFn, root: Any) -> None:
    node = root
    while node:
        key = draw(st.sampled_from(list(node) if isinstance(node, dict) else range(len(node))))
        if not isinstance(node[key], dict | list) or not node[key] or draw(st.integers(0, 3)) == 0:
            break
        node = node[key]
    else:
        return
    if draw(st.integers(0, 5)) == 0:
        del node[key]
    elif isinstance(node, dict) and draw(st.integers(0, 5)) == 0:
        node[draw(st.sampled_from(TEXTS))] = draw(values())
    else:
        node[key] = draw(values())


def as_json(value: Any) -> bytes:
    """As a careless client would write it: halves of surrogates and all."""
    return json.dumps(value, ensure_ascii=True).encode()
