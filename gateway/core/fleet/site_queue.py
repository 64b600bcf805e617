"""A site's queue estimate predicts the wait at a whole site, whose places compute side by side.

An edge computes one request after another, and a pool in batches; what is behind a site gateway does neither. With
`places` places, as many requests wait for nothing, and each one beyond adds its part of a place's time:

    own     = (attempts under way − places)⁺ · mean compute / places      a floor, known at once
    left    = reported wait · credit + (own attempts since that report − places that were free in it)⁺ · mean / places
    wait    = max(own, left)

The reported wait is that of the site's soonest place (`site_summary.py`). It comes with each answer and once a second,
and does not run down as time passes, since a site's callers go on calling; it loses credit instead, until it is
`STALE_S` old.

An accept-ack says when one answer is due, at the place that this request got: a slow one for a request with time to
spare. That is no news of the site's queue, so that acks change nothing here.

It can be wrong where a site serves several models and only one of them has a queue: `VariantOffer.wait_s` says what
waits for each variant beyond the soonest, and is a second old.
Invariants: waits are finite and never negative; with nothing in flight and no fresh report the wait is 0. O(1).
"""

from __future__ import annotations

from typing import Final

from gateway.core.fleet.queue_estimate import QueueEstimate

STALE_S: Final = 3.0  # three summaries that did not come


class SiteQueueEstimate(QueueEstimate):
    """Mutable: our own attempts under way at one site, and its latest report."""

    __slots__ = ("places",)

    def __init__(self) -> None:
        super().__init__(batches=True)  # what others compute there is not known here, as in a pool
        self.places = 1.0

    def apply_ack(self, by_s: float, now: float) -> None:
        """Nothing: see above."""

    def wait_s(self, now: float) -> float:
        under_way, wait_s = len(self._entries), 0.0
        # Work in the ledger is divided by the places already (`added_work_s` in `gateway/core/placement/placer.py`).
        each_s = self._own_s / under_way if under_way else 0.0
        if under_way > self.places:
            wait_s = (under_way - self.places) * each_s
        load, age_s = self.load, now - self.reported_at
        if load is None or age_s >= STALE_S:
            return wait_s
        free = self.places - load.in_flight - load.queued
        left_s = self._reported_delay_s * (1.0 - age_s / STALE_S)
        beyond_s = self._since_s - free * each_s if free > 0.0 else self._since_s
        if beyond_s > 0.0:
            left_s += beyond_s
        return left_s if left_s > wait_s else wait_s

    def __repr__(self) -> str:
        return f"<SiteQueueEstimate {self.in_flight} in flight on {self.places:.0f} places, last {self.load}>"
