"""What must hold of what all requests share: counters, probes, purses, claims, the balance, and memory.

`Bookkeeping` keeps books of its own on launches and ends, the simple way, and compares: whatever the gateway's own
counters lose or count twice shows as a difference at once, not as a slow leak.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import inf, isclose
from typing import Final

from gateway.core.estimate.calibration import BINS, Calibration
from gateway.core.estimate.conformal import LEAST, MOST
from gateway.core.estimate.link_estimate import LinkEstimate
from gateway.core.estimate.wait_error import MAX_FACTOR, MIN_FACTOR
from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.queue_estimate import QueueEstimate
from gateway.core.fleet.target import TargetView
from gateway.core.health.breaker import Breaker, BreakerState
from gateway.core.placement.utility import UtilityPlacer
from gateway.core.request.attempt import AttemptTelemetry
from gateway.core.request.hedging import EARLY_S
from gateway.core.request.token_budget import TokenBudget
from tidegate.outcome import BadAnswer, CallerError, InternalError, Overloaded, ServeError
from tidegate.runtime.compiled import is_compiled

_LONGEST_PATH: Final = 34  # 32 round trips and two that were never seen
_MOST_RENT: Final = 100.0
_BIN_WEIGHT: Final = 1 / (1 - 0.997) + 1e-6  # the most that a decayed count reaches

_NO_WORD_ON_TIME: Final = (CallerError, Overloaded, BadAnswer, InternalError)


class Counted(Calibration):
    """A calibration that knows how often it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.told = 0

    def record(self, raw: float, claimed: float, came: bool) -> None:
        super().record(raw, claimed, came)
        self.told += 1


class Purse:
    """What a purse should hold, added up the simple way."""

    def __init__(self, tokens: TokenBudget, share: float, cap: float) -> None:
        self._purse = tokens
        self._share, self._cap, self._tokens = share, cap, cap
        self._earned, self._spent = 0, 0.0

    def earn(self) -> None:
        self._tokens = min(self._cap, self._tokens + self._share)
        self._earned += 1

    def spend(self, share: float) -> None:
        self._tokens -= share
        self._spent += share

    def check(self) -> None:
        assert isclose(self._purse.tokens, self._tokens, abs_tol=1e-6), f"{self._purse} should have {self._tokens}"
        assert -self._cap <= self._purse.tokens <= self._cap, "a purse has a bottom and a lid"
        assert self._spent <= self._earned * self._share + 2 * self._cap, (
            "what second attempts lose is a share of the first"
        )


class Bookkeeping:
    """The same counts as the gateway's, kept apart from it."""

    def __init__(self, fleet: Fleet) -> None:
        self.quotas: list[Purse] = []
        self._fleet = fleet
        self._under_way: Counter[QueueEstimate] = Counter()
        self._probes: Counter[Breaker] = Counter()
        self._links: set[LinkEstimate] = set()
        self._targets: list[TargetView] = []
        self._warm: dict[str, tuple[float, Breaker, bool]] = {}  # since when, and the breaker then, and was it closed
        self._settled = 0
        self._calibration: Calibration | None = None  # of a policy that makes claims

    def watch(self, placer: UtilityPlacer) -> None:
        if not is_compiled():  # a compiled class takes no subclass: what it was told is not counted there
            placer.calibration = Counted()
        self._calibration = placer.calibration

    def comes(self, target: TargetView) -> None:
        self._targets.append(target)

    def begins(self, attempt: AttemptTelemetry) -> bool:
        """Note a launch; returns whether it is a probe."""
        target = attempt.candidate.target
        assert attempt.queue_estimate is target.queue_estimate and attempt.link is target.link
        self._under_way[attempt.queue_estimate] += 1
        self._links.add(attempt.link)
        spared = self._fleet.balance.spares(edge=target.spec.tier == "edge")
        for breaker, probe in attempt.breakers:
            self._probes[breaker] += probe
            assert self._probes[breaker] <= 1, "one probe at a time"
            assert not (probe and breaker.state is BreakerState.CLOSED), "nobody is probed who is trusted"
            # A path that has only been silent keeps nobody from being asked where nobody else is left.
            spared = spared or (breaker is target.path_breaker and target.ejected)
            assert probe or spared or breaker.state is BreakerState.CLOSED, "nothing but a probe while not closed"
        return any(probe for _, probe in attempt.breakers)

    def ends(self, attempt: AttemptTelemetry, how: str, error: ServeError | None, now: float) -> None:
        """Called before the evidence is told. `how`: "answered", "failed", "cancelled", or "moved" out of a queue."""
        self._under_way[attempt.queue_estimate] -= 1
        for breaker, probe in attempt.breakers:
            self._probes[breaker] -= probe
        if (claim := attempt.candidate.claim) is None:
            return
        given_up = how == "cancelled" and now < claim.prediction.due_at - EARLY_S
        # A stalled target's miss is its own: what all targets share does not hear of it.
        is_fault = how in ("failed", "cancelled") and attempt.is_stalled(now)
        self._settled += not (given_up or is_fault or isinstance(error, _NO_WORD_ON_TIME))

    def check(self) -> None:
        for queue_estimate, under_way in self._under_way.items():
            assert queue_estimate.in_flight == under_way, f"{queue_estimate} has {under_way} under way"
            check_sums(queue_estimate)
        for breaker, probes in self._probes.items():
            assert breaker.is_probing == bool(probes), f"{breaker} has {probes} probes under way"
        for quota in self.quotas:
            quota.check()
        if isinstance(self._calibration, Counted):
            told = self._calibration.told
            assert told == self._settled, f"{self._settled} claims were settled, {told} told"
        check_balance(self._fleet)
        self._check_slow_starts()

    def _check_slow_starts(self) -> None:
        """One begins with a new process, or when its breaker has closed, and at no other time."""
        before = self._warm
        self._warm = {
            id: (target.warm_since, target.breaker, target.breaker.state is BreakerState.CLOSED)
            for id, target in self._fleet.targets.items()
        }
        for id, (since, breaker, closed) in self._warm.items():
            was_since, was_breaker, was_closed = before.get(id, (since, breaker, closed))
            assert since == was_since or breaker is not was_breaker or closed > was_closed, f"{id} starts slowly"

    def check_at_rest(self, now: float) -> None:
        """Nothing is under way: every counter is zero, and what was learned has bounds."""
        self.check()
        for queue_estimate in self._under_way:
            assert (
                queue_estimate.in_flight == 0 and queue_estimate.own_work_s == queue_estimate.unreported_work_s == 0.0
            ), f"{queue_estimate} is not at rest"
            assert not queue_estimate.awaiting_report, f"{queue_estimate} still waits for reports on what has ended"
        for link in self._links:
            assert not link.unaccepted, f"{link} still waits for acks"
        assert not any(breaker.is_probing for breaker in self._probes), "a probe never came back"
        if self._calibration is not None:
            check_calibration(self._calibration)
        for target in self._targets:
            check_target(target, now)


def check_balance(fleet: Fleet) -> None:
    """The balance counts those that are there, as they are now, and nobody else."""
    balance = fleet.balance
    usable = [target for target in fleet.targets.values() if target.up and target.accepting]
    for target in fleet.targets.values():
        closed = target.breaker.state is target.path_breaker.state is BreakerState.CLOSED
        assert target.ejected == (not closed), f"{target} is {'' if target.ejected else 'not '}ejected"
    ejected = [target for target in usable if target.ejected]
    assert set(balance.ejected) == {target.id for target in ejected}, f"{balance} says {balance.ejected}"
    edges, out = _edges(usable), _edges(ejected)
    assert balance.edges_spared == (2 * out > edges), f"{balance}: {out} of {edges} edges"
    assert balance.panic == (2 * len(ejected) > len(usable)), f"{balance}: {len(ejected)} of {len(usable)}"


def _edges(targets: Iterable[TargetView]) -> int:
    return sum(target.spec.tier == "edge" for target in targets)


def check_sums(queue_estimate: QueueEstimate) -> None:
    """The running sums are the sums, and who has been reported had been acknowledged before."""
    entries = queue_estimate.entries
    unreported_s = sum(entry.work_s for entry in entries.values() if not entry.reported)
    assert isclose(queue_estimate.own_work_s, sum(entry.work_s for entry in entries.values()), abs_tol=1e-9)
    assert isclose(queue_estimate.unreported_work_s, unreported_s, abs_tol=1e-9), (
        f"{queue_estimate} lost track of what no report speaks of"
    )
    assert all(entry.accepted for entry in entries.values() if entry.reported), "a report knows only what was acked"
    awaiting = {key for key, entry in entries.items() if entry.accepted and not entry.reported}
    assert set(queue_estimate.awaiting_report) == awaiting


def check_calibration(calibration: Calibration) -> None:
    curve = calibration.curve
    assert len(curve) == BINS and list(curve) == sorted(curve) and 0.0 <= curve[0] <= curve[-1] <= 1.0
    assert 0.0 <= calibration.claimed.ece <= 1.0
    assert all(weight <= _BIN_WEIGHT for _, _, weight in calibration.raw.bins())


def check_target(target: TargetView, now: float) -> None:
    """What is read of a target at any time makes sense, and its memory has bounds."""
    queue_estimate, link = target.queue_estimate, target.link
    assert 0.0 <= queue_estimate.wait_s(now) < inf, "waits are finite and never negative"
    assert (
        MIN_FACTOR <= queue_estimate.error.factor <= MAX_FACTOR
        and queue_estimate.error.variance(queue_estimate.wait_s(now)) > 0.0
    )
    assert 0.0 <= queue_estimate.congestion.per_second(now) <= _MOST_RENT
    assert len(queue_estimate.report_paths) <= 2, "reports come by two roads"
    assert all(LEAST <= width <= MOST for width in target.interval_width.widths)
    path = link.path(now)
    assert len(path.values_s) == len(path.weights) <= _LONGEST_PATH
    assert list(path.values_s) == sorted(path.values_s) and path.values_s[0] >= 0.0
    assert isclose(path.below[-1], 1.0, abs_tol=1e-9) and min(path.weights) > 0.0
    assert 0.0 < link.trust(now) <= 1.0 and 0.0 < target.trust(now) <= 1.0
    assert link.silent_since is not None or not link.unaccepted, "who waits for an ack notices silence"
    assert link.unanswered >= link.awaiting_ack
    assert target.wait_s(now) >= queue_estimate.wait_s(now)
    assert link.rtt_s >= 0.0 and link.jitter_s >= 0.0 and link.s_per_byte >= 0.0
    assert link.patience_s(now) > 0.0
    assert link.unaccepted <= queue_estimate.entries.keys(), "only what is under way can be acknowledged"
    assert target.state(now)[0] in ("ready", "suspect", "down")
