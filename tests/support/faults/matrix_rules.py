"""What must hold of every row of the fault matrix, whatever breaks and however busy the machine is."""

from __future__ import annotations

from typing import Final

from tests.support.faults.matrix_seen import Seen

FAR_TOO_LATE_S: Final = 1.0  # after its deadline: a busy machine is late too, a request that nobody ends is later
MOST_LOST: Final = 0.5  # of what was sent while it was broken: a black hole takes more


def holds_whatever_breaks(seen: Seen, *, least: int = 50) -> None:
    """Every request ended once, in bounded time and as documented; few were lost, and the log said each change once."""
    assert len(seen.answers) > least
    assert seen.unaccounted == 0, f"{seen.counted} of {len(seen.answers)} arrivals"
    assert not seen.undocumented, seen.undocumented
    assert max(seen.overrun_s) < FAR_TOO_LATE_S
    assert not seen.repeated_lines, "an operator hears of each change once"
    lost = [one for one in seen.during.answers if one.status != 200]
    assert len(lost) <= MOST_LOST * len(seen.during), seen.during.statuses()
    assert seen.after.served(), "and afterwards requests are served again"
