"""One target: its identity and address (`TargetSpec`), and what is known of it (`TargetView`).

A view holds what placement reads of its target: the estimate of its queue, the link's estimate, two breakers (the
process behind it, and the path to it), and what a refusal or a new process has to say about the next wait. It is kept
up by the fleet (`fleet.py`) and by attempts (`gateway/core/request/attempt.py`), and decides nothing but how far it is
to be trusted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

from gateway.core.estimate.calibration import TargetBias
from gateway.core.estimate.conformal import IntervalWidth
from gateway.core.estimate.link_estimate import BROKEN, LinkEstimate
from gateway.core.fleet.attestation import ATTESTATION_OFF, Attestation
from gateway.core.fleet.concurrency_credit import ConcurrencyCredit
from gateway.core.fleet.ejection import SLOW_START_S, EjectionPolicy, slow_start_share
from gateway.core.fleet.link_events import PathKind
from gateway.core.fleet.pricing import FREE, TIER, Tier, TokenPrice
from gateway.core.fleet.queue_estimate import QueueEstimate
from gateway.core.fleet.scaling import ReplicaScaler
from gateway.core.health.breaker import Breaker, BreakerState
from gateway.core.health.common_cause import CommonCause
from gateway.core.health.degradation import Degradation
from gateway.core.health.progress import ProgressWatch
from tidegate.fleet.conditions import UNTOLD, DeviceConditions
from tidegate.fleet.offers import ModelOffer
from tidegate.placement_pin import Zone

Transport = Literal["link", "unary", "openai"]
EdgeTransport = Literal["link", "unary"]  # to a device that is known over MQTT
TargetState = Literal["ready", "suspect", "down"]

# A site keeps a request's pin itself, down to its devices: how far in it can answer is in its offers.
_USUAL_ZONE: Final[dict[Tier, Zone]] = {"edge": "edge", "pool": "cloud", "site": "edge"}
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0  # after a refusal that does not say when there will be room
_IN_A_ROW: Final = 2  # refusals, with none taken between: one may be about the one request
_FULL_TRUST: Final = 0.05
# A worker is replaced in seconds, and whether it was is asked as often: with the breaker's spread and the second for
# which a probe waits for a request of low priority (`probing.py`), one that is back is found within three seconds.
_STALL_CAP_S: Final = 1.5
_SCOUT_RTTS, _SCOUT_S = 2.0, 0.02  # how long to wait for the outcome of the first request after a pause


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """A target's identity and how to reach it. `static` ones are configured, the others come and go with the fleet."""

    id: str  # "edge/NAME", "pool/NAME" or "site/NAME"
    tier: Tier
    address: str
    transport: Transport = "link"
    foreign: bool = False
    models: tuple[str, ...] = ()  # only these; () means all it offers
    static: bool = True
    zone: Zone | None = None  # None: the one that is usual for its tier
    standby: bool = False  # in reserve: asked only where the others cannot make it
    encrypted: bool = True  # whether a gateway that has a certificate calls it over TLS
    token_price: TokenPrice = FREE  # beside its time

    @property
    def lies_in(self) -> Zone:
        return self.zone or _USUAL_ZONE[self.tier]

    @property
    def has_bounds_of_its_own(self) -> bool:
        """Whether it may rightly call invalid what was checked here, as a foreign server, or a site that has one."""
        return self.foreign or self.tier == "site"


@dataclass(slots=True)
class TargetView:
    """Mutable: what is known of one target."""

    spec: TargetSpec
    queue_estimate: QueueEstimate
    link: LinkEstimate
    balance: EjectionPolicy
    draw: Callable[[], float]
    siblings: CommonCause = field(default_factory=CommonCause)  # its tier's
    breaker: Breaker = field(default_factory=Breaker)
    path_breaker: Breaker = field(default_factory=Breaker)
    bias: TargetBias = field(default_factory=TargetBias)
    progress: ProgressWatch = field(default_factory=ProgressWatch)
    interval_width: IntervalWidth = field(default_factory=IntervalWidth)  # its tier's
    up: bool = False
    tried: bool = False  # has it been up or down at least once
    reason: str = "not connected yet"
    since: float = 0.0  # when `up` last changed
    epoch: int = 0
    path_kind: PathKind = "direct"  # by which it was last up
    offers: tuple[ModelOffer, ...] = ()  # the last known ones, also while it is down
    doubt: str = ""  # why the control plane distrusts it; "" when it does not
    accepting: bool = True  # False while a device says that it takes no new work
    leaving: str = ""  # why it only finishes what it has: its source of discovery says so; "" while it stays
    ejected: bool = False  # one of its breakers is not closed
    warm_since: float = -SLOW_START_S  # when its slow start began
    trusted_since: float = 0.0  # when its breaker closed last
    plain_from: float = 0.0  # from then on its wait is what its queue estimate says
    refused_until: float = 0.0
    refusals: int = 0  # in a row, with no request taken between
    asked_at: float = 0.0  # when it was last sent a request
    conditions: DeviceConditions = UNTOLD  # what a device said of its battery, its heat and its link
    price: float = 1.0  # of a second of compute there, now
    byte_price: float = 0.0
    attestation: Attestation = ATTESTATION_OFF  # what its evidence has shown
    degradation: Degradation = field(default_factory=Degradation)  # its named conditions
    concurrency: ConcurrencyCredit = field(default_factory=ConcurrencyCredit)  # what it is believed to do at a time
    scaling: ReplicaScaler | None = None  # its tier's, where the number of replicas needed is wanted

    @property
    def id(self) -> str:
        return self.spec.id

    def token_cost(self, prompt_tokens: float, answer_tokens: float) -> float:
        """What a generation costs where tokens are paid for, in seconds of a pool, as dear as the cloud is now."""
        return self.spec.token_price.of(prompt_tokens, answer_tokens) * self.price / TIER[self.spec.tier]

    @property
    def takes_work(self) -> bool:
        """Whether it takes new work at all, by its own word and by its source's."""
        return self.accepting and not self.leaving

    def takes(self, now: float) -> bool:
        """Whether it is to be used as a matter of course; an ejected one only where too many are."""
        if now >= self.progress.look_at and not self.ejected and self.progress.is_stalled(now):
            self._stalled(now)
        if self.link.silent_since is not None and not self.ejected and self.link.is_mute(now):
            self.path_breaker.trip("three requests were not acknowledged", now, self.draw())
        return not self.ejected or self.balance.spares(edge=self.spec.tier == "edge")

    def allows(self, now: float) -> bool:
        """The same, or as a probe that is due."""
        return self.takes(now) or (self.breaker.allows(now) and self.path_breaker.allows(now))

    def trust(self, now: float) -> float:
        """How far to believe that an attempt is answered at all.

        By the path's silence, an ejected one's record, and what its siblings were struck by.
        """
        if (
            self.link.silent_since is None
            and not self.ejected
            and self.refusals < _IN_A_ROW
            and not self.siblings.stalls
        ):
            return 1.0
        trust = self.link.trust(now) * (_FULL_TRUST if self.expects_refusal(now) else 1.0)
        if self.siblings.stalls:
            trust *= self.siblings.trust(self.id, now)
        if now >= self.progress.look_at and self.progress.is_stalled(now):
            trust *= BROKEN
        return trust * min(self.breaker.chance(now), self.path_breaker.chance(now)) if self.ejected else trust

    def expects_refusal(self, now: float) -> bool:
        """Whether it has refused all lately, and has no room yet, or the first request after the pause is under way.

        A wait alone does not say this: where others queue for longer, a pause of 200 ms looks like the shorter queue,
        and all went there only to be refused, for as long as it lasted (the fault matrix' row 11).
        """
        if self.refusals < _IN_A_ROW:
            return False
        patience_s = _SCOUT_RTTS * self.link.rtt_s + _SCOUT_S
        return now < self.refused_until or self.refused_until <= self.asked_at > now - patience_s

    def wait_s(self, now: float) -> float:
        """How long a request that arrives there now would wait; longer in its slow start, and after a refusal."""
        wait_s = self.queue_estimate.wait_s(now)
        if now >= self.plain_from:
            return wait_s
        return max(self.refused_until - now, wait_s / slow_start_share(now - self.warm_since))

    def expected_wait_s(self, ahead_s: float, now: float) -> float:
        """The wait with so much ahead, by how far such predictions have been off here."""
        factor = self.queue_estimate.error.factor
        # What was learned of the usual wait must not shorten a pause that the target asked for.
        return ahead_s * (factor if now >= self.plain_from else max(1.0, factor))

    def refused(self, retry_after_s: float | None, now: float) -> None:
        """It had no room: none is expected before it says so, or for a time that doubles with each refusal in a row."""
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0**self.refusals) if retry_after_s is None else retry_after_s
        self.refusals = min(self.refusals + 1, 30)
        self.refused_until = now + min(pause_s, _LONGEST_PAUSE_S)
        self.plain_from = max(self.plain_from, self.refused_until)

    def _stalled(self, now: float) -> None:
        words = f"it promised answers and gave none for {self.progress.overdue_s(now):.2f} s"
        self.degradation.stalled(words, now, self.progress.owed_model(now))
        self.siblings.stalled(self.id, now)
        self.breaker.trip(words, now, self.draw(), cap_s=_STALL_CAP_S)

    def warm_up(self, now: float) -> None:
        """Begin a slow start."""
        self.warm_since = now
        self.plain_from = max(self.plain_from, now + SLOW_START_S)

    def state(self, now: float) -> tuple[TargetState, str]:
        """For people: the state and its reason."""
        if self.leaving:
            return "down", self.leaving
        if not self.up:
            return "down", self.reason
        if not self.accepting:
            words = self.conditions.in_words()
            return "down", f"it takes no new work ({words})" if words else "it takes no new work"
        if self.ejected:
            return self._ejected_state(now)
        if self.doubt:
            return "suspect", self.doubt
        share = slow_start_share(now - self.warm_since)
        return "ready", "" if share == 1.0 else f"warming up: counts for {share:.0%} of its capacity"

    def _ejected_state(self, now: float) -> tuple[TargetState, str]:
        what, breaker = "it", self.breaker
        if breaker.state is BreakerState.CLOSED:
            what, breaker = "the way to it", self.path_breaker
        if self.balance.spares(edge=self.spec.tier == "edge"):
            return "suspect", f"{what} kept failing ({breaker.reason}), as most do: used all the same"
        if breaker.state is BreakerState.HALF_OPEN:
            return "suspect", f"{what} kept failing ({breaker.reason}) and is being probed"
        left_s = max(0.0, breaker.retry_at - now)
        return "down", f"{what} kept failing ({breaker.reason}); next probe in {left_s:.1f} s"

    def __repr__(self) -> str:
        state = "up" if self.up else f"down ({self.reason})"
        breakers = f"{self.breaker.state.name}/{self.path_breaker.state.name}"
        return f"<TargetView {self.id} {state} {breakers} {self.queue_estimate.in_flight} in flight>"
