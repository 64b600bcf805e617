"""Loss as a stream shows it: no byte is missing, but the bytes behind a lost one wait for its retransmission.

`StallStage` loses each sending with some chance (another one in bad weather) and holds it back for a retransmission
timeout that doubles with each further loss. `OutageStage` holds everything back until the link is there again, and a
retransmission's share beyond it: TCP notices a healed path only when its timer next fires.

A blackhole that never heals delivers at infinity: detecting that is left to the ends of the link, as on a real network.
"""

from __future__ import annotations

from tidegate.netsim.links.distributions import Draw
from tidegate.netsim.links.rate import FIRST_RTO_S, LAST_RTO_S
from tidegate.netsim.links.regime import OnOffSchedule

_RETRIES = 15  # Linux gives up after as many; nothing here ends a connection, so the last one gets through


class StallStage:
    """A stage. `chance` and `bad_chance` are of losing one sending."""

    __slots__ = ("_bad", "_bad_chance", "_chance", "_draw", "stalls")

    def __init__(self, chance: float, *, bad: OnOffSchedule | None = None, bad_chance: float = 0.0, draw: Draw) -> None:
        self._chance = chance
        self._bad = bad
        self._bad_chance = bad_chance
        self._draw = draw
        self.stalls = 0

    def leaves_at(self, size_bytes: int, enters_at: float) -> float:
        rto_s = FIRST_RTO_S
        for _ in range(_RETRIES):
            if self._draw() >= self._chance_at(enters_at):
                break
            self.stalls += 1
            enters_at += rto_s
            rto_s = min(2.0 * rto_s, LAST_RTO_S)
        return enters_at

    def _chance_at(self, at: float) -> float:
        return self._bad_chance if self._bad is not None and self._bad.until(at) > at else self._chance

    def __repr__(self) -> str:
        return f"<StallStage {self._chance:.1%}, {self._bad_chance:.1%} in bad weather>"


class OutageStage:
    """A stage. `gone` is when nothing gets through."""

    __slots__ = ("_gone",)

    def __init__(self, gone: OnOffSchedule) -> None:
        self._gone = gone

    def leaves_at(self, size_bytes: int, enters_at: float) -> float:
        until = self._gone.until(enters_at)
        if until == enters_at:
            return enters_at
        # Retransmissions at 0.2, 0.6, 1.4, ... seconds after the first try, then every 6.4 s: the first after healing.
        waited_s, rto_s = FIRST_RTO_S, 2.0 * FIRST_RTO_S
        while enters_at + waited_s < until:
            if until - enters_at > 1e6:
                return until  # for good, or as good as
            waited_s += rto_s
            rto_s = min(2.0 * rto_s, LAST_RTO_S)
        again_at = enters_at + waited_s
        return again_at if self._gone.until(again_at) == again_at else self.leaves_at(size_bytes, again_at)

    def __repr__(self) -> str:
        return f"<OutageStage {self._gone!r}>"
