"""Degradation tracks a target's named conditions with their evidence, and pulls the levers that each one has.

A breaker takes out what fails. Decay does not fail: answers get slower, memory fills, a path turns long, and every
number is still an answer. A condition is the name of such a decay, since when, and its evidence in numbers:

    condition      sign (`detectors.py`)        lever
    slow_drift     compute shifts, creeps, or spreads   what was learned is learned anew; predictions are wider
    memory_leak    memory grows, full within hours      a second there is dearer (and its agent recycles the worker)
    link_regime    round trips stay long                no hedges go there
    cold_cache     first answers are slow               slow start
    thermal        it throttles, or is hot              the price of heat, for as long as the condition lasts
    queue_buildup  the wait is long and grows           no hedges go there
    error_burst    failures come in numbers             no hedges go there
    stalled        promises answers and gives none      its breaker opens (`progress.py`)
    loop_stalled   its agent says that its event loop is held up and deadlines are missed   none: a second attempt helps
    model_absent   its agent says that it cannot serve a model that it is to serve   none: it is not offered
    worker_lost    it says that a worker hung or died   none: what follows from it is seen otherwise
    answer_drift   its answers disagree with the pool's (`gateway/core/agreement`)   its variant is demoted

Levers are mild on purpose: predictions already hold what answers have shown, so a condition changes what they cannot
say, and its chief use is to be reported to people before a deadline is missed.

Hysteresis, so that nothing flaps: each sign has a lower threshold to stay than to begin, and a condition ends only
when its sign has been gone for `HOLD_S` without a break. A new process ends what was the old one's (all but
`link_regime` and `answer_drift`); the next condition there is a new one.

Invariants: at most one condition of a name; a condition that ends lasted `HOLD_S` at least, unless its process ended;
`look` is called about once a second with non-decreasing `now`, and returns each change exactly once.
It can be wrong where signs are. Pure. Source: docs/design/faults.md, "Degradation".
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, inf, log
from typing import Final, Literal, NamedTuple, get_args

from gateway.core.health.detectors import (
    ErrorDetector,
    MemoryDetector,
    PathDetector,
    QueueDetector,
    SpeedDetector,
    absent_models_reason,
    overheating_reason,
    stalled_loop_reason,
)
from tidegate.fleet.conditions import UNTOLD, DeviceConditions
from tidegate.fleet.offers import SERVING, ModelOffer

Name = Literal[
    "slow_drift", "memory_leak", "link_regime", "cold_cache", "thermal", "queue_buildup", "error_burst", "stalled",
    "worker_lost", "model_absent", "loop_stalled", "answer_drift",
]  # fmt: skip
NAMES: Final[tuple[Name, ...]] = get_args(Name)
Variant = tuple[str, str, str]  # model, version, variant

HOLD_S: Final = 10.0
LOOK_S: Final = 0.5  # heartbeats come every second, jittered
WIDER: Final = 1.25  # times the spread of predictions that have just been wrong
DEARER: Final = 1.5  # times the price of a second where memory runs out
_OF_A_VARIANT: Final[tuple[Name, ...]] = ("slow_drift", "cold_cache")
# Not the process's: a file or a sensor is as wrong for the next one, and the watch says when answers agree again.
_OUTLIVES_PROCESS: Final = frozenset({"link_regime", "answer_drift"})
_UNHEDGED: Final = frozenset({"link_regime", "queue_buildup", "error_burst"})
_INSTANT_S: Final = 1e-6


class Condition(NamedTuple):
    """What ails a target since when, with the evidence in words."""

    name: Name
    since: float
    evidence: str
    variant: Variant | None = None  # where it is about one
    told_model: str = ""  # where it is about one, and not about a variant

    @property
    def model(self) -> str:
        """The model that it is about, if it is about one."""
        return self.variant[0] if self.variant is not None else self.told_model


class ConditionChange(NamedTuple):
    """A condition has begun, or ended."""

    condition: Condition
    begun: bool
    at: float


class Degradation:
    """Mutable: told of answers, failures and looks. `active` are the conditions that hold now, by name."""

    __slots__ = (
        "_errors", "_gone_since", "_look_at", "_memory", "_queue", "_speeds", "_stall", "_stalled_model", "_way",
        "_workers_away", "_workers_lost", "active", "changes",
    )  # fmt: skip

    def __init__(self) -> None:
        self.active: dict[Name, Condition] = {}
        self.changes: list[ConditionChange] = []  # that nobody took yet
        self._look_at = -inf
        self._gone_since: dict[Name, float] = {}  # of active ones: when their sign was gone
        self._speeds: dict[Variant, SpeedDetector] = {}
        self._stall = ""  # why it is thought to stand still, ...
        self._stalled_model = ""  # ... and with which model
        self._workers_lost: dict[tuple[str, str], int] = {}  # model, version → how many it has told of
        self._workers_away: tuple[str, str] = "", ""  # of the last that was lost: in words and its model, until ready
        self._errors = ErrorDetector()
        self._queue = QueueDetector()
        self._way = PathDetector()
        self._memory = MemoryDetector()

    # what is seen

    def answered(self, variant: Variant, table_s: float, took_s: float, now: float) -> None:
        """An answer that was computed by itself took so long, where its table says `table_s`."""
        speed = self._speeds.get(variant)
        if speed is None:
            speed = self._speeds[variant] = SpeedDetector()
        if speed.answered(log((took_s or _INSTANT_S) / table_s), now):
            self._judge_speed(variant, now)

    def ended(self, *, failed: bool, now: float) -> None:
        """An attempt ended in a way that says something of the target or of the way to it."""
        if not failed:
            self._stall = ""
        if self._errors.ended(failed=failed):
            self._judge("error_burst", self._errors.look(), now)

    def stalled(self, words: str, now: float, model: str = "") -> None:
        """The target owes answers and gives none."""
        self._stall, self._stalled_model = words, model
        self._judge("stalled", words, now, model=model)

    def disagrees(self, words: str, now: float, model: str = "") -> None:
        """Answers of the target disagree with the reference's, or with "" for `words` no longer."""
        if words:
            self._judge("answer_drift", words, now, model=model)
        elif "answer_drift" in self.active:
            self._end("answer_drift", now)  # the watch has a test of its own for this: it needs no hysteresis

    def offered(self, offers: Iterable[ModelOffer], now: float) -> None:
        """The target says what it offers, and with it how many workers it has lost.

        A count that is heard for the first time says nothing: they may have been lost before this gateway began.
        """
        for offer in offers:
            key, lost = (offer.name, offer.version), offer.worker.lost if offer.worker else 0
            known = self._workers_lost.get(key)
            self._workers_lost[key] = max(lost, known or 0)  # an older message may come by the slower path
            if known is not None and offer.worker is not None and lost > known:
                words = f"{offer.name}: {offer.worker.reason or 'its worker was lost'}; {lost} lost since its start"
                self._workers_away = words, offer.name
                self._judge("worker_lost", words, now, model=offer.name)
            if offer.name == self._workers_away[1] and offer.state in SERVING:
                self._workers_away = "", ""

    def look(self, now: float, *, rtt_s: float, wait_s: float, conditions: DeviceConditions = UNTOLD) -> None:
        """The regular look, about once a second: at the path, the queue and what the device says of itself."""
        if now < self._look_at:
            return  # heartbeats that come in a heap are one
        self._look_at = now + LOOK_S
        active = self.active
        self._judge("link_regime", self._way.look(rtt_s), now)
        self._judge("queue_buildup", self._queue.look(wait_s, now, raised="queue_buildup" in active), now)
        if conditions is not UNTOLD or active:
            self._judge("memory_leak", self._memory.look(conditions, now), now)
            self._judge("thermal", overheating_reason(conditions, raised="thermal" in active), now)
            self._judge("loop_stalled", stalled_loop_reason(conditions), now)
            self._judge("model_absent", absent_models_reason(conditions), now)
        if active:
            self._look_again(now)

    def new_process(self, now: float) -> None:
        """Another process answers there now: what ailed the old one is over, and its caches are cold."""
        for name in [name for name in self.active if name not in _OUTLIVES_PROCESS]:
            self._end(name, now)
        self._stall = ""
        self._workers_lost, self._workers_away = {}, ("", "")
        self._errors, self._queue, self._memory = ErrorDetector(), QueueDetector(), MemoryDetector()
        for speed in self._speeds.values():
            speed.cool_down()

    def take_changes(self) -> list[ConditionChange]:
        """The changes since this was last called."""
        changes, self.changes = self.changes, []
        return changes

    # what follows

    @property
    def hedges(self) -> bool:
        """Whether hedges may go there."""
        return not self.active or _UNHEDGED.isdisjoint(self.active)

    @property
    def price_factor(self) -> float:
        return DEARER if "memory_leak" in self.active else 1.0

    @property
    def is_hot(self) -> bool:
        return "thermal" in self.active

    def learned(self, variant: Variant) -> float:
        """How many times its table's seconds a variant's latest answers took."""
        return exp(self._speeds[variant].shift.level)

    # judging

    def _judge_speed(self, variant: Variant, now: float) -> None:
        for name in _OF_A_VARIANT:
            held = self.active.get(name)
            if held is None or held.variant == variant:
                self._judge(name, self._told(name, variant), now, variant)

    def _told(self, name: Name, variant: Variant) -> str:
        speed = self._speeds[variant]
        words = speed.slow() if name == "slow_drift" else speed.cold(raised=name in self.active)
        return f"{variant[0]} {variant[2]}: {words}" if words else ""

    def _look_again(self, now: float) -> None:
        """Let conditions end whose sign is only seen with answers, where answers may have stopped coming."""
        self._judge("stalled", self._stall, now, model=self._stalled_model)
        self._judge("worker_lost", self._workers_away[0], now, model=self._workers_away[1])
        for name in _OF_A_VARIANT:
            held = self.active.get(name)
            if held is not None and held.variant is not None:
                self._judge(name, self._told(name, held.variant), now, held.variant)
        self._judge("error_burst", self._errors.look(), now)

    def _judge(self, name: Name, words: str, now: float, variant: Variant | None = None, model: str = "") -> None:
        held = self.active.get(name)
        if words:
            self._gone_since.pop(name, None)
            if held is None:
                self._begin(Condition(name, now, words, variant, model))
            else:
                self.active[name] = held._replace(evidence=words, told_model=model)
        elif held is not None and now - self._gone_since.setdefault(name, now) >= HOLD_S:
            self._end(name, now)

    def _begin(self, condition: Condition) -> None:
        self.active[condition.name] = condition
        self.changes.append(ConditionChange(condition, True, condition.since))

    def _end(self, name: Name, now: float) -> None:
        self._gone_since.pop(name, None)
        self.changes.append(ConditionChange(self.active.pop(name), False, now))

    def __repr__(self) -> str:
        return f"<Degradation {', '.join(self.active) or 'none'}>"
