"""Targets and the links to them, read from the fleet view at each scrape.

So many targets have series of their own, the troubled first and then those that were asked last; `rest` is the worst
value among all others, so that an alert on it fires for any of ten thousand (`bounded_labels.py`). How many
there are in each state is counted over all of them.

`tidegate_link_state` is the console's and `tidegate top`'s word for a link (`gateway/core/fleet/link_health.py`) as a
number, 0 well and worse with each step, so that every view shows the same link as sick. "Usually" needs the
timelines that the console keeps: without a console a link is slow only while its estimate says so, some ten seconds.

`tidegate_link_loss_ratio` is what can be seen of loss above TCP: the share of round trips lately that took longer than
the calm link by TCP's least retransmission timeout (`gateway/core/estimate/link_estimate.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from typing import Final, get_args

from prometheus_client.metrics_core import Metric

from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_health import WORST_FIRST, Health, RttTimeline, link_state
from gateway.core.fleet.pricing import Tier
from gateway.core.fleet.target import TargetState, TargetView
from gateway.observe.metrics.bounded_labels import REST, worth_showing
from tidegate.metrics.families import gauge

TimelineOf = Callable[[str], RttTimeline | None]
Read = Callable[[TargetView, float], float]
SEVERITY: Final[dict[Health, int]] = {health: place for place, health in enumerate(reversed(WORST_FIRST))}
_TABLE: Final[tuple[tuple[str, str, Read, Callable[..., float]], ...]] = (
    ("tidegate_target_up", "Whether requests can be sent there.", lambda one, _: one.up, min),
    ("tidegate_target_in_flight", "Attempts under way there.", lambda one, _: one.queue_estimate.in_flight, max),
    ("tidegate_target_queued", "Requests that wait there, by its last report.", lambda one, _: _queued(one), max),
    ("tidegate_queue_wait_seconds", "Predicted wait there now.", lambda one, now: one.wait_s(now), max),
    ("tidegate_breaker_state", "0 closed, 1 open, 2 half open.", lambda one, _: one.breaker.state, max),
    ("tidegate_path_breaker_state", "The same of the way to it.", lambda one, _: one.path_breaker.state, max),
    ("tidegate_link_rtt_seconds", "Smoothed round trip.", lambda one, _: one.link.rtt_s, max),
    ("tidegate_link_jitter_seconds", "Mean deviation of it.", lambda one, _: one.link.jitter_s, max),
    ("tidegate_link_loss_ratio", "Share of late round trips, as loss shows.", lambda one, _: one.link.loss_ratio, max),
)


def target_families(fleet: Fleet, timeline_of: TimelineOf, most: int, now: float) -> Iterator[Metric]:
    """Args: most: targets that have series of their own."""
    severity = {one.id: _severity(one, timeline_of(one.id), now) for one in fleet.targets.values()}
    rank = lambda one: _rank(one, severity[one.id])  # noqa: E731
    shown, others = worth_showing(fleet.targets.values(), most, rank)
    link: tuple[str, str, Read, Callable[..., float]] = (
        "tidegate_link_state", "0 well, 1 slow, 2 silent, 3 suspect, 4 down.", lambda one, _: severity[one.id], max
    )  # fmt: skip
    for name, text, read, worst in (link, *_TABLE):
        rows = [((one.id,), float(read(one, now))) for one in shown]
        if others:
            rows.append(((REST,), float(worst(read(one, now) for one in others))))
        yield gauge(name, text, ("target",), rows)
    yield gauge("tidegate_edge_state_age_seconds", "Since its last load report.", ("agent",), _ages(shown, others, now))
    # Also the states that no target is in: an alert on 0 ready targets never fires on a series that is not there.
    counts = Counter(dict.fromkeys(product(get_args(Tier), get_args(TargetState)), 0))
    counts.update((one.spec.tier, one.state(now)[0]) for one in fleet.targets.values())
    yield gauge("tidegate_targets", "Targets that are known, by state.", ("tier", "state"), counts.items())


def _severity(target: TargetView, timeline: RttTimeline | None, now: float) -> int:
    return SEVERITY[link_state(target, timeline, now).health]


def _rank(target: TargetView, severity: int) -> tuple[float, ...]:
    """The troubled among those in use first: one that has been down for long is no news."""
    return (target.up and severity > 0, target.asked_at, target.since)


def _ages(shown: list[TargetView], others: list[TargetView], now: float) -> list[tuple[tuple[str], float]]:
    rows = [((one.id,), now - one.queue_estimate.reported_at) for one in shown if _reports(one)]
    if rest := [now - one.queue_estimate.reported_at for one in others if _reports(one)]:
        rows.append(((REST,), max(rest)))
    return rows


def _reports(target: TargetView) -> bool:
    return target.spec.tier == "edge" and target.queue_estimate.load is not None


def _queued(target: TargetView) -> float:
    load = target.queue_estimate.load
    return load.queued if load is not None else 0
