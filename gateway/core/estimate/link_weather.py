"""The weather of a link: whether it is foul, and what the next round trip is like after the last one.

**Foul or fair** is found by a cumulative sum instead of a threshold on one sample (`RttRegime`). One slow round trip
says nothing on a jittering link, and an average moves too late. A CUSUM adds up how much slower each round trip was
than the calm link (the logarithm of the ratio to the windowed minimum, less what is usual) and alarms once the sum is
out of reach of chance:

    S ← clamp(S + log((rtt + c) / (calm + c)) − k, 0, h)        foul when S reaches h, fair again when it is back at 0

The sum is capped at h, so that a long storm is over as soon as a short one. A lasting change of the path stops being
foul by itself, when the windowed minimum has forgotten the old path. `c` is a timer's worth: on loopback a round trip
of 0.6 ms instead of 0.2 ms is scheduling, not weather.

**The next one** (`RttWeather`) is a Markov chain over kinds of round trips: half octaves above the shortest one. After
each kind it is counted which came next, so two links with the very same round trips are told apart: where slow ones
come one by one, the next after a slow one is as quick as ever; where they come in spells, it is slow. The first needs
the whole sample, and the second must not wait until a sample has filled: at an onset five to ten requests are sent into
a spell of two seconds before a CUSUM alarms or slow ones are a good part of the last 32, and all of them are late.

    P(next = j | last = i) = (n(i → j) + a · [½ (i = j) + ½ P(j)]) / (n(i) + a)

with `a` times the prior: half that the weather lasts, half that it does not. The chain is asked only where it has
foretold better than the plain shares: `gain`, the mean of log P(next | last) − log P(next) as it was before each round
trip came (prequential, Dawid 1984). Where round trips do not hang together it is below 0 and the chain is not asked.
A silence counts as well: a kind that would have spoken by now is less likely by as much.

Counts forget by count: each row the last `_ROW` of its kind, all shares the last `_ALL`. A chain that was last seen
long ago fades to the shares. Of each kind the newest `_KEPT` round trips stand for it, however long ago they were: a
link that is used once a second knows bad weather again that it saw a minute ago.

It can be wrong on a link whose usual jitter is above k: that is foul all the time, and rightly believed only lately;
and for an attempt that waits itself: its own silence is in the sample and in what is asked of the sample.
Invariants: shares are above 0 and sum to 1; memory is bounded; everything but `sample` is O(1).
Source: docs/design/routing.md, "Link regime" (k = 0.5, h = 5); Page, "Continuous Inspection Schemes", Biometrika 1954;
Dawid, "Statistical theory: the prequential approach", JRSS A 1984.
"""

from __future__ import annotations

from math import exp, log
from typing import Final

from gateway.core.estimate.cusum import Cusum

_USUAL: Final = 0.5  # k, in natural logarithms: a round trip of 1.65 × the calm one is usual
_ALARM: Final = 5.0  # h: some five round trips of 4.5 × the calm one
_TIMER_S: Final = 0.001
_KINDS: Final = 10  # the last one is of all from 22 times the shortest on
_PER_OCTAVE: Final = 2.0 / log(2.0)
_KEPT: Final = 4
_ROW: Final = 24.0
_ALL: Final = 200.0
_PRIOR: Final = 4.0  # a
_LEAST: Final = 16  # round trips before a chain says anything
_GAIN: Final = 0.02  # nats: less is as well foretold by the shares
_GAIN_OVER: Final = 100  # round trips
_UNSEEN: Final = 0.5  # of each kind, in the shares
_RISING: Final = 0.01  # a second, of the shortest round trip: a path that got longer is known again in a minute
_FADES_S: Final = 2.0
_STILL: Final = 0.1  # of a round trip: what is longer than the longest that was kept
_HIGHEST: Final = 1e12


class RttRegime:
    """Mutable: `record` each round trip; `foul` is the verdict."""

    __slots__ = ("_cusum",)

    def __init__(self) -> None:
        self._cusum = Cusum(slack=_USUAL, level=_ALARM)

    @property
    def is_degraded(self) -> bool:
        return self._cusum.on

    def record(self, rtt_s: float, calm_s: float) -> bool:
        """Weigh one round trip against the calm link's; returns whether the verdict changed."""
        return self._cusum.record(log((rtt_s + _TIMER_S) / (calm_s + _TIMER_S)))

    def __repr__(self) -> str:
        return f"<RttRegime {'foul' if self.is_degraded else 'fair'} {self._cusum.sum:.1f} of {_ALARM:.1f}>"


class _RecentKinds:
    """How often each kind came lately, in units of `newest`: one that is `memory` older counts 1 / e of it."""

    __slots__ = ("_growth", "counts", "newest", "total")

    def __init__(self, memory: float) -> None:
        self.counts = [0.0] * _KINDS
        self.total = 0.0
        self.newest = 1.0  # grows instead of all others shrinking
        self._growth = 1.0 / (1.0 - 1.0 / memory)

    def add(self, kind: int) -> None:
        self.newest = newest = self.newest * self._growth
        self.counts[kind] += newest
        self.total += newest
        if newest > _HIGHEST:
            self.counts = [one / newest for one in self.counts]
            self.total, self.newest = self.total / newest, 1.0


class RttWeather:
    """Mutable: `record` each round trip. While `tells`, `sample` foretells the next one better than the shares do."""

    __slots__ = ("_at", "_floor_s", "_gap_s", "_kept", "_last", "_rows", "_seen", "_shares", "gain", "tells")

    def __init__(self) -> None:
        self.gain = 0.0  # nats a round trip, of the chain over the shares
        self.tells = False
        self._seen = 0
        self._floor_s = 0.0
        self._at = 0.0
        self._gap_s = 0.0  # between two round trips, usually
        self._last = 0  # its kind
        self._shares = _RecentKinds(_ALL)
        self._rows: list[_RecentKinds | None] = [None] * _KINDS  # what came after each kind
        self._kept: list[list[float]] = [[] for _ in range(_KINDS)]

    # Both run for each request, so what is short is spelled out: a call for each kind cost as much as all else here.

    def record(self, rtt_s: float, now: float) -> None:
        """Learn from one round trip, in seconds."""
        seen, since_s = self._seen, now - self._at
        risen_s = self._floor_s * (1.0 + _RISING * since_s)
        self._floor_s = floor_s = rtt_s if rtt_s < risen_s or not seen else risen_s
        kind = int(_PER_OCTAVE * log((rtt_s + _TIMER_S) / (floor_s + _TIMER_S)))
        if kind >= _KINDS:
            kind = _KINDS - 1
        if seen:
            self._follow(kind, seen)
            self._gap_s += (0.1 if seen > 1 else 1.0) * (since_s - self._gap_s)
        self._shares.add(kind)
        self._last, self._at = kind, now
        self._seen = seen + 1
        kept = self._kept[kind]
        kept.append(rtt_s)
        if len(kept) > _KEPT:
            del kept[0]

    def _follow(self, kind: int, seen: int) -> None:
        """One of this kind came after the last one."""
        last, shares, row = self._last, self._shares, self._rows[self._last]
        share = (shares.counts[kind] / shares.newest + _UNSEEN) / (shares.total / shares.newest + _UNSEEN * _KINDS)
        prior = 0.5 * ((kind == last) + share)
        if row is None:
            foretold = prior
            row = self._rows[last] = _RecentKinds(_ROW)
        else:
            foretold = (row.counts[kind] / row.newest + _PRIOR * prior) / (row.total / row.newest + _PRIOR)
        self.gain += (log(foretold / share) - self.gain) / (seen if seen < _GAIN_OVER else _GAIN_OVER)
        self.tells = self.gain > _GAIN and seen >= _LEAST
        row.add(kind)

    def sample(self, now: float, silence_s: float = 0.0) -> tuple[list[float], list[float]]:
        """What the next round trip may be, shortest first, and the share of each.

        Args:
            silence_s: for which an answer has been due, and nothing came.
        """
        last, shares, row = self._last, self._shares, self._rows[self._last]
        late_s = now - self._at - 2.0 * self._gap_s
        sure = exp(-late_s / _FADES_S) if late_s > 0.0 else 1.0
        all_shares = shares.total / shares.newest + _UNSEEN * _KINDS
        in_row = _PRIOR if row is None else row.total / row.newest + _PRIOR
        found: list[tuple[float, float]] = []
        total = 0.0
        for kind, kept in enumerate(self._kept):
            if not kept:
                continue
            share = (shares.counts[kind] / shares.newest + _UNSEEN) / all_shares
            after = _PRIOR * 0.5 * ((kind == last) + share)
            if row is not None:
                after += row.counts[kind] / row.newest
            share += sure * (after / in_row - share)
            if silence_s > 0.0:
                longer = 0
                for one in kept:
                    longer += one > silence_s
                share *= (longer + _STILL) / (len(kept) + _STILL)
            total += share
            share /= len(kept)
            for one in kept:
                found.append((one, share))  # a comprehension is a call
        found.sort()
        return [one for one, _ in found], [share / total for _, share in found]

    def __repr__(self) -> str:
        return f"<RttWeather {'tells' if self.tells else 'does not tell'}, {self.gain:.2f} nats of {self._seen}>"
