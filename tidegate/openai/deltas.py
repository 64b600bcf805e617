"""Puts together what a chat's events have beside its text: the calls of tools, a refusal, a model's reasoning.

OpenAI gives each of them in parts: texts are joined, and the calls of tools are lists whose entries say by `index`
which call they are a part of.

Pure. What is joined has been bounded by the target that read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def merged_deltas(deltas: Iterable[Mapping[str, Any] | None]) -> dict[str, Any]:
    """By name; a call of a tool has no `index` any more."""
    texts: dict[str, list[str]] = {}
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for name, value in (delta or {}).items():
            if isinstance(value, str):
                texts.setdefault(name, []).append(value)
            elif name == "tool_calls":
                for at, part in enumerate(value):
                    _add(calls, at, part)
    found: dict[str, Any] = {name: "".join(parts) for name, parts in texts.items()}
    return {**found, "tool_calls": [calls[index] for index in sorted(calls)]} if calls else found


def _add(calls: dict[int, dict[str, Any]], at: int, part: dict[str, Any]) -> None:
    call = calls.setdefault(part.get("index", at), {"id": "", "type": "function", "function": {}})
    for key in ("id", "type"):
        call[key] = part.get(key) or call[key]
    function = part.get("function") or {}
    call["function"] = {
        "name": call["function"].get("name", "") + (function.get("name") or ""),
        "arguments": call["function"].get("arguments", "") + (function.get("arguments") or ""),
    }
