"""The rejection rate is the share of arrivals to refuse so that the admitted requests are served in time.

Of the requests that were let in, some are lost to queues all the same. To be rid of a loss of m, a share m of them
has to be refused as well, so every tick of 50 ms closes a part of that gap:

    loss above TARGET    rate += (1 − rate) · (loss − TARGET) · TICK_S / ATTACK_S
    else                 rate *= 1 − TICK_S / RELEASE_S

`loss` is predicted, not awaited: the mean over recent placements of the chance that a queue makes them late. Outcomes
would come as much as a whole budget later, and a controller that acts on old news swings. When the load is gone the
queues are empty, the loss is 0 and the rate has halved in well under a second.

Invariants: 0 <= rate <= MOST; with no loss the rate falls; nothing is refused before something would be lost. O(1).
TARGET is above the few percent that bursts cost anyway: at 3 %, shedding cost up to 2 points at 0.9 load (simulated).

It can be wrong where chances are badly calibrated: then some more or fewer are refused than need be, but the cut still
takes the least important first.
Source: Cinnamon's rejection ratio (a controller per 50 ms tick); Clockwork's admission by predicted latency.
"""

from __future__ import annotations

from typing import Final

TICK_S: Final = 0.05
TARGET: Final = 0.08
MOST: Final = 0.95  # some requests have to pass, or nothing would be learned any more
_ATTACK_S: Final = 0.3
_RELEASE_S: Final = 0.3
_KEEP: Final = 0.8  # of what was seen of losses, per tick: a memory of a quarter of a second
_LEAST: Final = 1e-3


class RejectionRate:
    """Mutable: `placed` with each request that was let in, `tick` every TICK_S; `rate` is the share to refuse."""

    __slots__ = ("_lost", "_seen", "rate")

    def __init__(self) -> None:
        self.rate = 0.0
        self._seen = 0.0
        self._lost = 0.0

    def placed(self, loss: float) -> None:
        """A request was placed; a queue makes it late with this chance."""
        self._seen += 1.0
        self._lost += loss

    @property
    def loss(self) -> float:
        """The mean chance of being late for a queue, of requests lately let in."""
        return self._lost / self._seen if self._seen >= 1.0 else 0.0

    def tick(self, *, active: bool) -> None:
        """One tick has passed; the rate moves only while shedding is active."""
        self._seen, self._lost = _KEEP * self._seen, _KEEP * self._lost
        if active:
            self._correct()

    def _correct(self) -> None:
        excess = self.loss - TARGET
        if excess > 0.0:
            # of the share that is still let in, the excess is to be refused too: a part of it in each tick
            self.rate = min(MOST, self.rate + (1.0 - self.rate) * excess * TICK_S / _ATTACK_S)
        else:
            self.rate *= 1.0 - TICK_S / _RELEASE_S
        if self.rate < _LEAST:
            self.rate = 0.0

    def begin(self) -> None:
        """Shedding begins: at once with what would be lost, since there is no rate yet to correct."""
        self.rate = min(MOST, max(0.0, self.loss - TARGET))

    def end(self) -> None:
        """The overload is over."""
        self.rate = 0.0

    def __repr__(self) -> str:
        return f"<RejectionRate {self.rate:.1%} for a loss of {self.loss:.1%}>"
