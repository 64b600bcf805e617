"""Bounds on a link's directions: the earliest arrival at a worker, the latest departure for a deadline.

`usual` is for a policy that predicts instead (`simulator/baselines/clairvoyant.py`): the same, with jitter at its
median, and sent at once.

A link's stages are outage → loss → capacity → delay (`tidegate/netsim/links/profile.py`). What is known beforehand is
taken as it is: outages, partitions, bad weather, the base delay, and the time that a frame's own bytes take on the
wire. What depends on the traffic is taken at its best: jitter at its least, nothing lost, no other bytes in the
queue, a recorded capacity of no limit, and after an outage a retransmission in the very instant of healing. A sender
may also wait for the weather to clear. So nothing real arrives earlier than `earliest`, and nothing that left after
`latest` is in time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import inf

from simulator.world.conditions import WorldConditions
from tidegate.netsim.links.profile import LinkProfile, SharedConditions, worse_by
from tidegate.netsim.links.regime import OnOffSchedule, Windows

Window = tuple[float, float]
_SURELY = 1e-9  # one frame in a billion has less jitter than what is taken for the least


class LinkReach:
    """One direction of one link. Immutable."""

    def __init__(
        self,
        *,
        least_s: float,
        bad_times: float = 1.0,
        bad: Sequence[Window] = (),
        gone: Sequence[Window] = (),
        s_per_byte: float = 0.0,
    ) -> None:
        """Args: least_s: the delay without jitter; `bad_times` as much within `bad`. gone: when nothing is carried."""
        self._least_s = least_s
        self._bad_s = least_s * bad_times
        self._bad = _Laid(bad)
        self._gone = _Laid(gone)
        self._s_per_byte = s_per_byte

    def earliest(self, at: float, size_bytes: int) -> float:
        """No bytes that are sent at `at` or later are at the other end before this."""
        entered = self._gone.end(at) + size_bytes * self._s_per_byte
        clears_at = self._bad.end(entered)
        if clears_at == entered:
            return entered + self._least_s
        return min(entered + self._bad_s, clears_at + self._least_s)

    def arrival(self, at: float, size_bytes: int) -> float:
        """When bytes are there that are sent at `at`, if nothing is lost and no other bytes are in the way."""
        entered = self._gone.end(at) + size_bytes * self._s_per_byte
        return entered + (self._bad_s if self._bad.end(entered) > entered else self._least_s)

    def latest(self, deadline: float, size_bytes: int) -> float:
        """No bytes that are sent after this are at the other end by the deadline."""
        entered = deadline - self._least_s
        began_at = self._bad.start(entered)
        if began_at < entered:
            entered = max(began_at, deadline - self._bad_s)
        return self._gone.start(entered - size_bytes * self._s_per_byte)

    def __repr__(self) -> str:
        return f"<LinkReach {self._least_s * 1e3:g} ms, {self._bad_s * 1e3:g} ms in bad weather>"


def reaches(
    conditions: WorldConditions,
    id: str,
    profile: LinkProfile,
    jitter_times: float,
    until: float,
    *,
    usual: bool = False,
) -> tuple[LinkReach, LinkReach]:
    """Of the link to a worker: the way there and the way back, laid out up to an instant."""
    air = SharedConditions.over(profile, conditions.link_chance(id), None)
    cuts = conditions.partitions(id)
    jitter = profile.jitter.distribution(jitter_times) if profile.jitter else None
    jitter_s = jitter.quantile_s(0.5 if usual else _SURELY) if jitter else 0.0
    delay_s = profile.delay_ms * 1e-3 + jitter_s
    bad_times = worse_by(air, jitter_times)
    if bad_times < 1.0:  # weather that makes a link faster is taken as if it were always so
        delay_s, bad_times = delay_s * bad_times, 1.0

    def reach(cut: Sequence[Window], mbit: float | None) -> LinkReach:
        return LinkReach(
            least_s=delay_s,
            bad_times=bad_times,
            bad=laid_out(air.bad, until),
            gone=[*laid_out(air.gone, until), *cut],
            s_per_byte=1.0 / (mbit * 125e3) if mbit is not None else 0.0,
        )

    return reach(cuts.to_target, profile.to_mbit), reach(cuts.from_target, profile.from_mbit)


def laid_out(stretches: OnOffSchedule | None, until: float) -> list[Window]:
    """The stretches of a schedule that begin before `until`, in order."""
    found: list[Window] = []
    at = 0.0
    while stretches is not None and (start := stretches.next_on(at)) < until:
        at = stretches.until(start)
        found.append((start, at))
    return found


class _Laid:
    """Windows in order, merged; where the one around an instant begins and ends."""

    def __init__(self, windows: Sequence[Window]) -> None:
        self._ends: OnOffSchedule = Windows(windows)
        merged: list[Window] = list(Windows(windows).after(-inf))
        self._starts = [start for start, _ in merged]
        self._stops = [stop for _, stop in merged]

    def end(self, at: float) -> float:
        """The end of the window around `at`; `at` itself outside of any."""
        return self._ends.until(at)

    def start(self, at: float) -> float:
        """The start of the window around `at`; `at` itself outside of any."""
        place = bisect_right(self._starts, at) - 1
        return self._starts[place] if place >= 0 and at < self._stops[place] else at
