"""Duplicate detection decides whether an item was taken before, with a memory bounded in time and in size.

Each item has an id that its device never reuses, and each id that was taken is remembered for WINDOW_S. Within that
memory the answer is exact: a known id is a duplicate, an unknown one is new. Beyond it, an unknown id proves nothing:
the item is older than the window or, if the memory was full before the window was over, older than the id that was
forgotten last. Such an item is refused by its age instead of being taken twice. When the memory is full, the device
that holds most of it forgets (`device_shares.py`), so only that device's horizon comes nearer:

    age + MARGIN_S < reach   unknown means new      reach = min(WINDOW_S, now - when the last was forgotten early)
    older                    unknown means nothing  refused for good; the device lists it as a dead letter

Ages are the devices' own and count the time in which they were switched on, so the rule is wrong for a device that was
off for longer than the window between two sendings of one item; then the item is taken twice.

Source: docs/design/edge-state.md, "Duplicates and expiry"; EMQX #14462 (expired messages delivered, since only the
sender looked at their age).
"""

from __future__ import annotations

from typing import Final, Literal

WINDOW_S: Final = 7 * 86_400.0
MARGIN_S: Final = 60.0  # an age is of the instant of sending, in whole milliseconds; the broker adds to it

Verdict = Literal["new", "duplicate", "too-old"]


def dedup_horizon_s(now_s: float, forgotten_at_s: float | None) -> float:
    """Return how far back an unknown id means a new item.

    Args:
        forgotten_at_s: when the newest of the ids was taken that were forgotten for lack of room; None: none was.
    """
    return WINDOW_S if forgotten_at_s is None else min(WINDOW_S, max(0.0, now_s - forgotten_at_s))


def classify_duplicate(*, known: bool, age_s: float, reach_s: float) -> Verdict:
    """Return the verdict on an item of this age, whose id is or is not remembered."""
    if known:
        return "duplicate"
    return "new" if age_s + MARGIN_S < reach_s else "too-old"
