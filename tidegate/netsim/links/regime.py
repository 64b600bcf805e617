"""Schedules of when a link is bad or gone: stretches of time, laid out by instants and not by frames.

A frame-by-frame coin would give a busy link more changes than an idle one, and would let the policy under test change
the weather. Here the changes are laid out in time from the source's own chance, lazily and in order, so two runs with
one seed have the same weather whatever is sent.

`Weather` alternates between two states for exponential or fixed times: Gilbert and Elliott's model in continuous
time, periodic flapping, and random outages. `Chain` has more than two states: good, bad and dead, say, where one
dies only after it was bad. `Windows` are stretches that were named beforehand: a schedule.

Queries may go back in time a little (two directions share one weather): changes of the last minute are kept.
Source: Gilbert, "Capacity of a burst-noise channel", Bell System Technical Journal 1960; Elliott 1963.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import inf, log
from typing import Protocol

from tidegate.netsim.links.distributions import Draw

_KEPT_S = 60.0


class OnOffSchedule(Protocol):
    """Times that are on or off. `until(t)` is the end of the stretch around `t` that is on; `t` itself when off.
    `next_on(t)` is when the next one begins; `t` itself in the middle of one, `inf` when there is none."""

    def until(self, at: float) -> float: ...
    def next_on(self, at: float) -> float: ...


class Windows:
    """On during each (from, to) that was named; they may touch and overlap."""

    def __init__(self, windows: Sequence[tuple[float, float]]) -> None:
        merged: list[tuple[float, float]] = []
        for start, end in sorted(windows):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        self._windows = merged
        self._starts = [start for start, _ in merged]

    def until(self, at: float) -> float:
        """`inf` for a window that never ends."""
        place = bisect_right(self._starts, at) - 1
        return self._windows[place][1] if place >= 0 and at < self._windows[place][1] else at

    def next_on(self, at: float) -> float:
        place = bisect_right(self._starts, at)
        return at if self.until(at) > at else self._starts[place] if place < len(self._starts) else inf

    def after(self, at: float) -> Sequence[tuple[float, float]]:
        """The windows that have not ended by `at`, in order."""
        if not self._windows:
            return ()
        return [window for window in self._windows if window[1] > at]

    def __repr__(self) -> str:
        return f"<Windows {self._windows}>"


class Weather:
    """Off for `mean_off_s`, then on for `mean_on_s`, and so on, from the instant 0. Mutable: it lays out time lazily.

    Args:
        draw: of its own; no other object may draw from it.
        periodic: the stretches have exactly these lengths; the first still has a random phase.
        steady: the stretches that are on have exactly their length, and only the gaps are random.
    """

    __slots__ = ("_changes", "_draw", "_exact", "_first_on", "_mean_s")

    def __init__(
        self, *, mean_on_s: float, mean_off_s: float, draw: Draw, periodic: bool = False, steady: bool = False
    ) -> None:
        if not (mean_on_s > 0.0 and mean_off_s > 0.0):
            raise ValueError(f"stretches take time: {mean_on_s} s on and {mean_off_s} s off do not")
        self._mean_s = (mean_off_s, mean_on_s)
        self._draw = draw
        self._exact = (periodic, periodic or steady)  # off, on
        # changes[i] begins the stretch number i; which is on is `(i + first_on) % 2`. Starts in the steady state.
        self._first_on = int(draw() < mean_on_s / (mean_on_s + mean_off_s))
        first_s = self._mean_s[self._first_on]
        self._changes = [-inf, first_s * draw() if self._exact[self._first_on] else self._stretch_s(self._first_on)]

    def until(self, at: float) -> float:
        changes = self._changes
        while changes[-1] <= at:
            self._extend(at)
        place = bisect_right(changes, at) - 1
        return changes[place + 1] if (place + self._first_on) % 2 else at

    def next_on(self, at: float) -> float:
        """When the next stretch begins that is on; `at` itself in the middle of one."""
        if self.until(at) > at:
            return at
        return self._changes[bisect_right(self._changes, at)]

    def _extend(self, at: float) -> None:
        changes = self._changes
        on = (len(changes) - 1 + self._first_on) % 2  # of the stretch that begins at the last change
        changes.append(changes[-1] + self._stretch_s(on))
        if len(changes) > 64 and changes[2] < at - _KEPT_S:
            del changes[1:3]  # two at a time, so that the parity stays

    def _stretch_s(self, on: int) -> float:
        mean_s = self._mean_s[on]
        return mean_s if self._exact[on] else -mean_s * log(1.0 - self._draw()) + 1e-9

    def __repr__(self) -> str:
        return f"<Weather on for {self._mean_s[1]:g} s, off for {self._mean_s[0]:g} s>"


class Either:
    """On whenever one of the others is."""

    def __init__(self, *others: OnOffSchedule) -> None:
        self._others = others

    def until(self, at: float) -> float:
        end = at
        while (later := max((other.until(end) for other in self._others), default=end)) > end:
            end = later
        return end

    def next_on(self, at: float) -> float:
        return min((other.next_on(at) for other in self._others), default=inf)

    def __repr__(self) -> str:
        return f"<Either {self._others}>"


class Chain:
    """A Markov chain in continuous time that starts in state 0 at the instant 0. Mutable: it lays out time lazily.

    Args:
        stays_s: mean time in each state, exponential.
        moves: for each state, the chance of each state to come next; rows sum to 1.
        draw: of its own; no other object may draw from it.
    """

    __slots__ = ("_changes", "_draw", "_moves", "_states", "_stays_s")

    def __init__(self, stays_s: Sequence[float], moves: Sequence[Sequence[float]], draw: Draw) -> None:
        if len(moves) != len(stays_s) or any(abs(sum(row) - 1.0) > 1e-9 or len(row) != len(moves) for row in moves):
            raise ValueError("a chain needs one row of chances a state, each with a chance for every state and sum 1")
        if not all(one > 0.0 for one in stays_s):
            raise ValueError(f"stretches take time: {list(stays_s)} do not")
        self._stays_s = stays_s
        self._moves = moves
        self._draw = draw
        self._changes = [0.0]  # changes[i] begins the stretch in states[i]
        self._states = [0]
        self._extend(0.0)

    def during(self, state: int) -> OnOffSchedule:
        """On while the chain is in this state."""
        return _During(self, state)

    def until(self, at: float, state: int) -> float:
        """The end of the stretch around `at` if that is spent in `state`; else `at`."""
        while self._changes[-1] <= at:
            self._extend(at)
        place = bisect_right(self._changes, at) - 1
        return self._changes[place + 1] if self._states[max(0, place)] == state else at

    def next_on(self, at: float, state: int) -> float:
        """When the next stretch in `state` begins; a state that is never come to again is looked for until `inf`."""
        if all(row[state] <= 0.0 for row in self._moves):
            return at if self.until(at, state) > at else inf
        while self.until(at, state) == at:
            at = self._changes[bisect_right(self._changes, at)]
        return at

    def _extend(self, at: float) -> None:
        state = self._states[-1]
        self._changes.append(self._changes[-1] - self._stays_s[state] * log(1.0 - self._draw()) + 1e-9)
        self._states.append(self._next(state))
        if len(self._changes) > 64 and self._changes[2] < at - _KEPT_S:
            del self._changes[0], self._states[0]

    def _next(self, state: int) -> int:
        left = self._draw()
        for following, chance in enumerate(self._moves[state]):
            left -= chance
            if left < 0.0:
                return following
        return len(self._stays_s) - 1  # what rounding left over

    def __repr__(self) -> str:
        return f"<Chain {' · '.join(f'{stay_s:g} s' for stay_s in self._stays_s)}>"


class _During:
    def __init__(self, chain: Chain, state: int) -> None:
        self._chain = chain
        self._state = state

    def until(self, at: float) -> float:
        return self._chain.until(at, self._state)

    def next_on(self, at: float) -> float:
        return self._chain.next_on(at, self._state)

    def __repr__(self) -> str:
        return f"<During {self._state} of {self._chain!r}>"


class Since:
    """The same stretches, counted from an instant: a condition's weather begins when the condition does."""

    def __init__(self, stretches: OnOffSchedule, starts_at: float) -> None:
        self._stretches = stretches
        self._starts_at = starts_at

    def until(self, at: float) -> float:
        inner = at - self._starts_at
        end = self._stretches.until(inner)
        return at if end == inner else end + self._starts_at  # exactly `at`: off is told by equality

    def next_on(self, at: float) -> float:
        return self._starts_at + self._stretches.next_on(max(at, self._starts_at) - self._starts_at)

    def __repr__(self) -> str:
        return f"<Since {self._starts_at:g} s {self._stretches!r}>"
