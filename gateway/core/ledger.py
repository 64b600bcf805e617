"""How long a request would wait at a target: what we have there ourselves, and what the target said last.

A load report is as old as its way here; our own launches are known at once. Without the local count every gateway
sends all it has to whoever looked idle last, which costs 7 to 24 points of attainment (routing.md B3): the local
truth is a floor under what reports say.

    wait = max(own work ahead, what is left of the reported delay + own work launched since that report)

The reported delay runs down as time passes and also loses credit: after `_STALE_S` it counts for nothing, since the
others' work in it is long done. `share` is how much one more request adds to the wait of the next: 1 where requests
are computed one after another (an edge), less where those that wait together are computed together (a pool).

Reports come by several roads (answers and link frames, MQTT), each with sequences of its own: within an epoch a road's
older report is ignored, and an older epoch is always ignored. `launch` and `finish` are called once each per attempt.

Invariants: waits are never negative; with nothing in flight and no fresh report the wait is 0. All O(1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from gateway.core.harm import Place
from tidegate.types import LoadReport

_STALE_S: Final = 1.5  # routing.md B3: reported background decays linearly over 1.5 s


@dataclass(slots=True)
class _Entry:
    work_s: float
    launched_at: float
    report: int  # which report was the latest when it was launched
    place: Place | None  # None: its deadline is not known here


class Ledger:
    """Mutable: one target's own in-flight attempts and its latest load report."""

    __slots__ = (
        "_entries", "_finished_at", "_heard", "_own_s", "_report_delay_s", "_reports",
        "_since_s", "load", "reported_at", "share",
    )  # fmt: skip

    def __init__(self, *, share: float = 1.0) -> None:
        self.load: LoadReport | None = None
        self.share = share
        self._entries: dict[int, _Entry] = {}  # by attempt, in order of launch
        self._own_s = 0.0  # work of all entries
        self._since_s = 0.0  # work of those launched since the latest report
        self._finished_at = 0.0
        self._reports = 0
        self.reported_at = 0.0
        self._report_delay_s = 0.0
        self._heard: dict[str, tuple[int, int]] = {}  # road → (epoch, sequence)

    @property
    def in_flight(self) -> int:
        return len(self._entries)

    def launch(self, attempt: int, compute_s: float, now: float, place: Place | None = None) -> None:
        """Note an attempt that was just sent, with its predicted compute time and its place in the queue there."""
        work_s = compute_s * self.share
        self._entries[attempt] = _Entry(work_s, now, self._reports, place)
        self._own_s += work_s
        self._since_s += work_s

    def finish(self, attempt: int, now: float) -> None:
        """Note that the attempt ended, however it did."""
        entry = self._entries.pop(attempt)
        self._finished_at = now
        if not self._entries:
            self._own_s = self._since_s = 0.0  # sums of floats drift; an empty ledger is exactly empty
            return
        self._own_s -= entry.work_s
        if entry.report == self._reports:
            self._since_s -= entry.work_s

    def report(self, load: LoadReport, road: str, now: float) -> bool:
        """Take in a load report; returns whether it was news."""
        epoch = self.load.epoch if self.load else 0
        if load.epoch < epoch or (load.epoch, load.sequence) <= self._heard.get(road, (-1, -1)):
            return False
        self._heard[road] = (load.epoch, load.sequence)
        self.load = load
        self._reports += 1
        self.reported_at, self._report_delay_s = now, max(0.0, load.queue_delay_s)
        self._since_s = 0.0
        return True

    def queue(self) -> Iterator[tuple[float, Place | None]]:
        """(work, place) of what we have under way there, in order of launch."""
        return ((entry.work_s, entry.place) for entry in self._entries.values())

    def wait_s(self, now: float) -> float:
        """How long a request that arrives there now would wait before its compute begins."""
        own_s, reported_s = self._own_ahead_s(now), self._reported_s(now)
        return max(own_s, reported_s + self._since_s) if reported_s else own_s

    def _own_ahead_s(self, now: float) -> float:
        if not self._entries:
            return 0.0
        head = next(iter(self._entries.values()))
        # The head has been computing since it was sent or since the one before it came back. It may be overdue: the
        # rest then waits for it no longer than predicted, because nothing is known of how much is still to come.
        done_s = min(head.work_s, now - max(head.launched_at, self._finished_at))
        return max(0.0, self._own_s - done_s)

    def _reported_s(self, now: float) -> float:
        age_s = now - self.reported_at
        if age_s >= _STALE_S or not self._report_delay_s:
            return 0.0
        return max(0.0, self._report_delay_s - age_s) * (1.0 - age_s / _STALE_S)

    def __repr__(self) -> str:
        return f"<Ledger {len(self._entries)} in flight, {self._own_s * 1e3:.1f} ms of own work, last {self.load}>"
