"""The gateway's view of its targets: who is there, what each offers, and how each has been doing.

Two roads feed it. The data plane says what can be sent to now: a link that is up, with its offers and its load. The
control plane (MQTT, and the configuration for static targets) says whom to connect to, and how fresh a device's own
word is. The data plane outranks the control plane both ways: a device that MQTT shows alive but whose link is broken
is not used, and one whose link works stays in use while its broker is gone.

    link target     usable ⇔ its link is up              offers from its hello and its load frames
    unary target    usable ⇔ its last probe succeeded    from whoever described it; it has no hello
    any             used   ⇔ usable and its breaker allows it

Per target the view keeps the three estimators that placement reads: breaker, link and ledger. They live as long as
the target's entry does; a new epoch is a new process and gets a new breaker.

`offered` is the hot path and reads an index that is rebuilt only when somebody comes, goes or changes an offer.
Invariant: the index holds exactly the ready offers of usable targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from gateway.core.breaker import Breaker, State
from gateway.core.cost import CostModel, VariantCost
from gateway.core.events import LinkEvent, LinkLoad, LinkRtt, LinkUp
from gateway.core.ledger import Ledger
from gateway.core.link import LinkEstimate
from gateway.core.precision import quality_of
from tidegate.fleet.offers import ModelOffer, VariantOffer
from tidegate.models.manifest import Feature
from tidegate.types import LoadReport

Tier = Literal["edge", "pool"]
Transport = Literal["link", "unary"]
TargetState = Literal["ready", "suspect", "down"]

# A second of an edge's compute is paid for already; one of the pool's is what the bill is made of.
PRICE: Final[dict[Tier, float]] = {"edge": 0.01, "pool": 1.0}
# How much one more request in flight adds to the next one's wait. An edge computes them one by one; a pool computes
# what waits together in one batch, which for short rows costs it about half.
_SHARE: Final[dict[Tier, float]] = {"edge": 1.0, "pool": 0.5}
_PRIOR_RTT_S: Final[dict[Tier, float]] = {"edge": 0.002, "pool": 0.005}


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """Who a target is and how to reach it. `static` ones are configured, the others come and go with the fleet."""

    id: str  # "edge/NAME" or "pool/NAME"
    tier: Tier
    address: str
    transport: Transport = "link"
    foreign: bool = False
    models: tuple[str, ...] = ()  # only these; () means all it offers
    static: bool = True


@dataclass(slots=True)
class TargetView:
    """Mutable: what is known of one target."""

    spec: TargetSpec
    ledger: Ledger
    link: LinkEstimate
    breaker: Breaker = field(default_factory=Breaker)
    up: bool = False
    tried: bool = False  # has it been up or down at least once
    reason: str = "not connected yet"
    since: float = 0.0  # when `up` last changed
    epoch: int = 0
    offers: tuple[ModelOffer, ...] = ()  # the last known ones, also while it is down
    doubt: str = ""  # why the control plane distrusts it; "" when it does not
    accepting: bool = True  # False while a device says that it takes no new work

    @property
    def id(self) -> str:
        return self.spec.id

    def state(self, now: float) -> tuple[TargetState, str]:
        """For people: the state and its reason."""
        if not self.up:
            return "down", self.reason
        if not self.accepting:
            return "down", "it takes no new work"
        if self.breaker.state is State.OPEN:
            left_s = max(0.0, self.breaker.retry_at - now)
            return "down", f"it kept failing; next probe in {left_s:.1f} s"
        if self.breaker.state is State.HALF_OPEN:
            return "suspect", "it kept failing and is being probed"
        return ("suspect", self.doubt) if self.doubt else ("ready", "")

    def __repr__(self) -> str:
        state = "up" if self.up else f"down ({self.reason})"
        return f"<TargetView {self.id} {state} {self.breaker.state.name} {self.ledger.in_flight} in flight>"


class Offered(NamedTuple):
    """One way to answer one model: a variant on a usable target, with its cost."""

    target: TargetView
    model: str
    version: str
    variant: VariantOffer
    cost: VariantCost
    price: float
    quality: float = 1.0


class Fleet:
    """Mutable: `add` and `remove` targets, `fold` what links say, `heard` what the control plane says."""

    def __init__(self, feature_of: Callable[[str, str], Feature]) -> None:
        """Args: feature_of: the cost feature of (model, version), for priors."""
        self.targets: dict[str, TargetView] = {}
        self._feature_of = feature_of
        self._costs = CostModel()
        self._index: dict[tuple[str, str], tuple[Offered, ...]] = {}

    def add(self, spec: TargetSpec, now: float) -> TargetView:
        """Begin to know a target. It is down until its link or its offers say otherwise."""
        tier = spec.tier
        target = TargetView(spec, Ledger(share=_SHARE[tier]), LinkEstimate(prior_rtt_s=_PRIOR_RTT_S[tier]), since=now)
        self.targets[spec.id] = target
        self._rebuild()
        return target

    def remove(self, target_id: str) -> None:
        """Forget a target and what was learned of it; attempts still under way there end on their own."""
        if self.targets.pop(target_id, None) is not None:
            self._costs.forget(target_id)
            self._rebuild()

    def fold(self, event: LinkEvent, now: float) -> None:
        """Take in one event of a link. Events of targets that were removed meanwhile are ignored."""
        target = self.targets.get(event.target_id)
        if target is None:
            return
        match event:
            case LinkLoad():  # first: one comes with every answer
                target.ledger.report(event.load, "link", now)
                if event.offers is not None:
                    self._offer(target, event.offers)
            case LinkRtt():  # comes with every heartbeat
                self._costs.relax(target.id, now)
                target.link.record(event.rtt_s, now)
            case LinkUp():
                self._came_up(target, event.epoch, event.offers, now)
            case _:  # LinkDown, the only one left
                self._went_down(target, event.reason, now)

    def heard(
        self,
        target_id: str,
        *,
        load: LoadReport | None,
        doubt: str,
        now: float,
        accepting: bool = True,
        offers: tuple[ModelOffer, ...] | None = None,
    ) -> None:
        """What the control plane says of a device: its load, why to doubt it, and whether it takes new work.

        Args:
            offers: for a unary target, which has no other way to say them; None leaves them as they are.
        """
        target = self.targets.get(target_id)
        if target is None:
            return
        target.doubt = doubt
        if load is not None:
            target.ledger.report(load, "mqtt", now)
        if accepting != target.accepting or (offers is not None and offers != target.offers):
            target.accepting = accepting
            self._offer(target, target.offers if offers is None else offers)

    def repriced(self) -> None:
        """The cost features of models changed: read them again."""
        self._rebuild()

    def offered(self, model: str, version: str) -> tuple[Offered, ...]:
        """Every variant of the model on a usable target. The breaker is not asked: it changes with time."""
        return self._index.get((model, version), ())

    def usable(self, now: float) -> bool:
        """Whether at least one target can be used."""
        return any(target.up and target.breaker.allows(now) for target in self.targets.values())

    def all_tried(self) -> bool:
        """Whether every static target has been reached or found unreachable at least once."""
        return all(target.tried for target in self.targets.values() if target.spec.static)

    def _came_up(self, target: TargetView, epoch: int, offers: tuple[ModelOffer, ...], now: float) -> None:
        if epoch != target.epoch or not target.up:
            target.breaker = Breaker()  # a new process or a new connection: the old one's failures are not its own
        target.link.heard(now)
        target.up, target.tried, target.reason, target.since, target.epoch = True, True, "", now, epoch
        self._offer(target, offers)

    def _went_down(self, target: TargetView, reason: str, now: float) -> None:
        if target.up or not target.tried:
            target.since = now
        target.up, target.tried, target.reason = False, True, reason
        self._rebuild()

    def _offer(self, target: TargetView, offers: tuple[ModelOffer, ...]) -> None:
        only = target.spec.models
        target.offers = tuple(offer for offer in offers if not only or offer.name in only)
        self._rebuild()

    def _rebuild(self) -> None:
        index: dict[tuple[str, str], list[Offered]] = {}
        for target in self.targets.values():
            for offered in self._ready_offers(target):
                index.setdefault((offered.model, offered.version), []).append(offered)
        self._index = {key: tuple(offers) for key, offers in index.items()}

    def _ready_offers(self, target: TargetView) -> Iterable[Offered]:
        price = PRICE[target.spec.tier]
        for model in target.offers if target.up and target.accepting else ():
            feature = self._feature_of(model.name, model.version)
            for variant in model.variants if model.state == "ready" else ():
                cost = self._costs.of(target.id, model.name, model.version, variant, feature)
                yield Offered(target, model.name, model.version, variant, cost, price, quality_of(variant))

    def __repr__(self) -> str:
        up = sum(target.up for target in self.targets.values())
        return f"<Fleet {up} of {len(self.targets)} targets up, {len(self._index)} models>"
