"""Whether something that a device sends again was taken already, from a memory that is bounded in time and in room.

Everything has an id that its device never gives out again, and everything that was taken is remembered for WINDOW_S.
That settles most of it: known is a duplicate, unknown is new. What is left is what the memory cannot know, because it
forgets: things older than the window, and, where the room did not last for the window, older than what was forgotten
last. Such a thing is refused by its own age instead of being taken twice:

    age + MARGIN_S < reach   unknown means new      reach = min(WINDOW_S, now - when the last was forgotten early)
    older                    unknown means nothing  refused for good; the device lists it as a dead letter

Ages are the devices' own and count the time that they were on, so the rule can be wrong where a device was off for
longer than the window between sending a thing and sending it again; then it is taken twice.

Source: docs/design/edge-state.md, "Duplicates and expiry"; EMQX #14462 (expired messages delivered, since only the
sender looked at their age).
"""

from __future__ import annotations

from typing import Final, Literal

WINDOW_S: Final = 7 * 86_400.0
MARGIN_S: Final = 60.0  # an age is of when the thing was sent, in whole milliseconds; then a broker had it

Verdict = Literal["new", "duplicate", "too-old"]


def dedup_horizon_s(now_s: float, forgotten_at_s: float | None) -> float:
    """How far back "unknown" means "new".

    Args:
        forgotten_at_s: when the newest one was taken that room made forget; None: none was.
    """
    return WINDOW_S if forgotten_at_s is None else min(WINDOW_S, max(0.0, now_s - forgotten_at_s))


def classify_duplicate(*, known: bool, age_s: float, reach_s: float) -> Verdict:
    if known:
        return "duplicate"
    return "new" if age_s + MARGIN_S < reach_s else "too-old"
