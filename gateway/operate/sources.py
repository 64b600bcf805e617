"""The sources of discovery for operators: what each says, when it was heard, and which source a target is from."""

from __future__ import annotations

from typing import Any

from gateway.core.fleet.found_targets import STATIC, FoundTargets


def source_of(found: FoundTargets, target_id: str) -> str:
    """The source that the target is from; `mqtt` for a device that reports itself."""
    one = found.targets.get(target_id)
    return "mqtt" if one is None else one.source


def sources_json(found: FoundTargets, now: float) -> list[dict[str, Any]]:
    """Each source but the configuration's own list: its targets, when it was heard, and why it is away."""
    return [
        {
            "name": source.name,
            "targets": len(source.claims),
            "heard_s_ago": None if source.heard_at is None else round(now - source.heard_at, 1),
            "away": source.why,
            "warning": source.warning,
        }
        for source in found.sources.values()
        if source.name != STATIC
    ]
