"""The queue estimate predicts the wait at a target, from our own attempts there and its last report.

A load report is as old as its way here; our own launches are known at once. Without the local count every gateway sends
all it has to the target that looked idle last, which costs 7 to 24 points of attainment (docs/design/routing.md, "Queue
waits and the local ledger"): the local truth is a floor under what reports say.

    wait = max(own work ahead, what is left of the reported delay + own work that no report speaks of yet)

Work is what an attempt adds to the wait of requests behind it: all of its compute where requests are computed one after
another (an edge), and only what it adds to a call where waiting requests are computed together (`batches`: a pool);
there half of a call's fixed part is added once, for the call that is running. Counting a pool's work as an edge's
makes a batcher look ten times as busy as it is.

A report speaks of an attempt if the target had acknowledged it before, since frames keep their order; a report that is
one link delay old says nothing of what was still on its way. The reported delay runs down as time passes and also
loses credit: after `_STALE_S` it counts for nothing, since the others' work in it is long done. An accept-ack is the
freshest report of all: it says when the answer is due, and by how much that differs from what was expected here, so
much more is ahead there than was thought, or less (`apply_ack`).

Where requests are computed one after another, the one that is computed is the *head*: none can pass it. A target takes
the first in order of `order_key` each time that it is free, which is when an answer comes from it. The oldest was taken
for the head before: then a long request at work was thought to be passed by each urgent one behind it, whose waits were
foretold a fifth too short at busy devices. A server with an order of its own (`in_order`) takes the oldest.

Reports come by several paths (answers and link frames, MQTT), each with sequences of its own: within an epoch a path's
older report is ignored, and an older epoch is always ignored. `launch` is called once per attempt, and then one of
`finish` and `abandon`: an attempt that is given up while it is computed still takes its time, since no engine stops.

Invariants: waits are finite and never negative; with nothing in flight and no fresh report the wait is 0. All O(1), a
report amortized: each attempt is looked at by one; the end of one where others wait O(those).
"""

from __future__ import annotations

from collections.abc import Iterator, KeysView, Mapping
from dataclasses import dataclass
from math import inf
from typing import Final

from gateway.core.estimate.queue_externality import QueuePosition
from gateway.core.estimate.shadow_price import ShadowPrice
from gateway.core.estimate.wait_error import WaitError
from tidegate.types import LoadReport

# docs/design/routing.md, "Queue waits and the local ledger": reported background decays linearly over 1.5 s
_STALE_S: Final = 1.5
_OTHERS_S: Final = 3.0  # others' generations last for seconds, and so does what a report has of them
_LONGEST_S: Final = 60.0  # the most that an ack may add: it comes from the network


@dataclass(slots=True)
class QueuedAttempt:
    """One attempt of ours that is under way at the target."""

    work_s: float
    launched_at: float
    place: QueuePosition | None  # None: its deadline is not known here
    accepted: bool = False  # the target said that it has it
    reported: bool = False  # a report came after that: it is in there


class QueueEstimate:
    """Mutable: one target's own in-flight attempts and its latest load report."""

    __slots__ = (
        "_accepted",
        "_call_s",
        "_entries",
        "_head",
        "_head_s",
        "_head_since",
        "_heard",
        "_own_s",
        "_reported_at",
        "_reported_delay_s",
        "_since_s",
        "batches",
        "congestion",
        "error",
        "in_order",
        "last_key",
        "load",
        "reported_at",
    )  # fmt: skip

    def __init__(self, *, batches: bool = False, in_order: bool = True) -> None:
        """Args: in_order: whether what waits is computed in the order of `order_key`; else as it came."""
        self.load: LoadReport | None = None
        self.batches = batches
        self.in_order = in_order
        self.error = WaitError()
        self.congestion = ShadowPrice()
        self.last_key = -inf  # no attempt under way is ordered behind this: a later one passes none of them
        self._call_s = 0.0  # the fixed part of the latest call, where there are batches
        self._accepted: dict[int, QueuedAttempt] = {}  # attempts that the next report covers
        self._entries: dict[int, QueuedAttempt] = {}  # by attempt, in order of launch
        self._own_s = 0.0  # work of all entries
        self._since_s = 0.0  # work of the attempts that no report covers yet
        self._head: int | None = None  # the attempt that is taken to be computed; None: none of those that are left
        self._head_s = 0.0  # its work
        self._head_since = 0.0  # when its compute began: it was sent, or one before it came back
        self.reported_at = 0.0
        self._reported_delay_s = 0.0  # the wait by the target's latest report or ack ...
        self._reported_at = 0.0  # ... and when that came
        self._heard: dict[str, tuple[int, int]] = {}  # by path: (epoch, sequence)

    @property
    def in_flight(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> Mapping[int, QueuedAttempt]:
        """Our own attempts under way there, by attempt, in order of launch."""
        return self._entries

    @property
    def awaiting_report(self) -> KeysView[int]:
        """The attempts that the target has accepted and no report covers yet."""
        return self._accepted.keys()

    @property
    def own_work_s(self) -> float:
        """The work of all our own attempts there, in seconds."""
        return self._own_s

    @property
    def unreported_work_s(self) -> float:
        """The work of our own attempts that no report covers yet, in seconds."""
        return self._since_s

    def others(self, now: float) -> float:
        """How many attempts, waiting or running, its last report has beyond all of ours; 0 once it is too old."""
        if self.load is None or now - self.reported_at > _OTHERS_S:
            return 0.0
        return max(0.0, self.load.in_flight + self.load.queued - len(self._entries))

    @property
    def report_paths(self) -> KeysView[str]:
        """The paths by which load reports have come."""
        return self._heard.keys()

    def launch(
        self, attempt: int, work_s: float, now: float, place: QueuePosition | None = None, *, call_s: float = 0.0
    ) -> None:
        """Note an attempt that was just sent, with its place in the queue there.

        Args:
            work_s: what it adds to the wait of those behind it.
            call_s: the fixed part of its call, where there are batches.
        """
        self._call_s = call_s
        if not (self._entries and self._head_s):
            self._head, self._head_s, self._head_since = attempt, work_s, now
        if place is not None and place.key > self.last_key:
            self.last_key = place.key
        self._entries[attempt] = QueuedAttempt(work_s, now, place)
        self.congestion.sent(work_s, now)
        self._own_s += work_s
        self._since_s += work_s

    def finish(self, attempt: int, now: float, *, computed: bool = False) -> None:
        """Note that the attempt ended, however it did. Args: computed: its answer came, so that the next one begins."""
        entry = self._entries.pop(attempt)
        self._accepted.pop(attempt, None)
        if not self._entries:
            self._own_s = self._since_s = 0.0  # sums of floats drift; an empty ledger is exactly empty
            self.last_key = -inf
            return
        if computed or attempt == self._head:
            self._head = self._next() if self.in_order and not self.batches else next(iter(self._entries))
            self._head_s, self._head_since = self._entries[self._head].work_s, now
        self._own_s -= entry.work_s
        if not entry.reported:
            self._since_s -= entry.work_s

    def abandon(self, attempt: int, now: float) -> None:
        """Note that we gave it up: its queue position is free, but an attempt at the head is computed to its end."""
        entry = self._entries[attempt]
        left_s = entry.work_s - (now - self._head_since) if attempt == self._head and entry.accepted else 0.0
        self.finish(attempt, now)
        if left_s > 0.0:
            self.apply_ack(left_s, now)

    def accepted(self, attempt: int) -> None:
        """The target has the attempt in its queue: its next report speaks of it."""
        entry = self._entries.get(attempt)
        if entry is not None and not entry.accepted:
            entry.accepted = True
            self._accepted[attempt] = entry

    def report(self, load: LoadReport, path: str, now: float) -> bool:
        """Take in a load report; returns whether it was news."""
        epoch = self.load.epoch if self.load else 0
        if load.epoch < epoch or (load.epoch, load.sequence) <= self._heard.get(path, (-1, -1)):
            return False
        self._heard[path] = (load.epoch, load.sequence)
        self.load = load
        self.reported_at = self._reported_at = now
        self._reported_delay_s = max(0.0, load.queue_delay_s)
        for entry in self._accepted.values():
            entry.reported = True
            self._since_s -= entry.work_s
        self._accepted.clear()
        return True

    def new_process(self, epoch: int) -> None:
        """Another process answers there, and says so itself: a report that calls itself younger is of one before it.

        Epochs are instants, and a clock may have been set back.
        """
        if self.load is not None and self.load.epoch > epoch:
            self.load = None
            self._heard.clear()

    def apply_ack(self, by_s: float, now: float) -> None:
        """Take in an ack that differs from what was expected by `by_s`: so much more is ahead there, or less."""
        wait_s = max(0.0, min(_LONGEST_S, self._queued_s(now) + by_s))
        self._reported_delay_s, self._reported_at = max(0.0, wait_s - self._since_s), now

    def queue(self) -> Iterator[tuple[float, QueuePosition | None]]:
        """(work, place) of what we have under way there, the head first and the others in order of launch."""
        head = self._head
        if head in self._entries:
            yield self._head_s, self._entries[head].place
        for attempt, entry in self._entries.items():
            if attempt != head:
                yield entry.work_s, entry.place

    def _next(self) -> int:
        """The attempt that is computed next; first the oldest of those whose order is not known.

        Those that add nothing to the wait, as generations, are in no queue.
        """
        first, first_key = -1, inf
        for attempt, entry in self._entries.items():
            key = inf if not entry.work_s else -inf if entry.place is None else entry.place.key
            if first < 0 or key < first_key:
                first, first_key = attempt, key
        return first

    def wait_s(self, now: float) -> float:
        """How long a request that arrives there now would wait before its compute begins."""
        wait_s = self._queued_s(now)
        # on average half of the running call is left
        return wait_s + 0.5 * self._call_s if self.batches and self._entries else wait_s

    def _queued_s(self, now: float) -> float:
        # One straight run, not a call for each term: every decision reads it of every target.
        queued_s = 0.0
        if self._entries:
            # own work ahead = all own work − what is done of the head. The head may be overdue: then it counts as done,
            # because nothing is known of how much of it is left.
            done_s = now - self._head_since
            left_s = self._own_s - (done_s if done_s < self._head_s else self._head_s)
            if left_s > 0.0:
                queued_s = left_s
        age_s = now - self._reported_at
        if age_s < self._reported_delay_s and age_s < _STALE_S:
            # what is left of the reported delay × its credit, and own work that the report did not cover
            reported_s = (self._reported_delay_s - age_s) * (1.0 - age_s / _STALE_S) + self._since_s
            if reported_s > queued_s:
                queued_s = reported_s
        return queued_s

    def __repr__(self) -> str:
        return (
            f"<QueueEstimate {len(self._entries)} in flight, {self._own_s * 1e3:.1f} ms of own work, last {self.load}>"
        )
