"""When to launch a second attempt beside a silent first one: as late as it can still help.

Insurance is bought only when it is needed. The alternative is launched at the last instant at which it can still make
the deadline, not after a fixed delay: until then the first attempt may answer and the second would have been waste.
Where that instant comes before the first attempt is even expected back, it is pushed to when the first is overdue, as
long as the alternative's median answer would then still be in time; where not even that holds, there is no hedge.

An accepted attempt with a promise is not silent: while its promised finish is ahead and within the deadline, the
promise is better evidence than the clock.

The crossing of the two chances (routing.md B4) replaces `fallback_at` once chances are calibrated; the shape stays.
"""

from __future__ import annotations

from gateway.core.placement import Candidate


def fallback_at(now: float, deadline: float, primary: Candidate, alternative: Candidate) -> float | None:
    """The instant at which to launch `alternative` if `primary` has not answered; None where it could not help."""
    latest = deadline - alternative.finish_s - alternative.margin_s
    overdue = now + primary.finish_s + primary.margin_s
    if latest >= overdue:
        return latest
    return overdue if overdue + alternative.finish_s <= deadline else None


def is_silent(promised_at: float | None, now: float, deadline: float) -> bool:
    """Whether an attempt gives no reason to wait. `promised_at`: when its target said the answer would be here."""
    return promised_at is None or not now < promised_at <= deadline
