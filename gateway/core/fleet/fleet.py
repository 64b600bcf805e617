"""The fleet view holds what is known of each target: whether it is there, what it offers, how it has been doing.

Two sources feed it. The data plane says what can be sent to now: a link that is up, with its offers and its load. The
control plane (MQTT, and the configuration for static targets) says which targets to connect to, and how fresh a
device's last report is. The data plane outranks the control plane both ways: a device that MQTT shows alive but whose
link is broken is not used, and one whose link works stays in use while its broker is gone.

    link target     usable ⇔ its link is up              offers from its hello and its load frames
    unary target    usable ⇔ its last probe succeeded    from the control plane; it has no hello
    any             used   ⇔ usable and neither its own breaker nor its path's is open, or it is spared (`ejection.py`)

Per target the view keeps the estimators that placement reads: two breakers, link and queue estimate. They live as long
as the target's entry does. A new epoch is a new process: it gets a new breaker and starts slowly. A new connection gets
a new breaker for the path.

`offered` is the hot path and reads an index that is kept up offer by offer: a target that comes, goes or changes what
it offers costs as much as it has offers, however many targets there are.
Invariant: the index holds exactly the offers of usable targets that serve: those that are ready or still soak.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

from msgspec.structs import replace

from gateway.core.estimate.calibration import TargetBias
from gateway.core.estimate.conformal import IntervalWidth
from gateway.core.estimate.link_estimate import LinkEstimate
from gateway.core.estimate.service_cost import CostModel
from gateway.core.fleet.attestation import CONNECTION_ENDED
from gateway.core.fleet.concurrency_credit import ConcurrencyCredit
from gateway.core.fleet.ejection import SLOW_START_S, EjectionPolicy
from gateway.core.fleet.link_events import LinkAttested, LinkEvent, LinkLoad, LinkRtt, LinkUp, RedialFailed
from gateway.core.fleet.offer_index import Offer, OfferIndex
from gateway.core.fleet.pricing import TIER, Tier, byte_price_of, price_of
from gateway.core.fleet.queue_estimate import QueueEstimate
from gateway.core.fleet.scaling import ReplicaNeed, ReplicaScaler
from gateway.core.fleet.site_queue import SiteQueueEstimate
from gateway.core.fleet.target import TargetSpec, TargetView
from gateway.core.fleet.target_history import Learned, TargetHistory
from gateway.core.fleet.variant_rank import quality_of
from gateway.core.health.breaker import Breaker, BreakerState
from gateway.core.health.common_cause import CommonCause
from gateway.core.health.degradation import WIDER, ConditionChange
from gateway.core.health.progress import ProgressWatch
from gateway.core.peers.demand_terms import DemandTerms
from tidegate.fleet.conditions import UNTOLD, DeviceConditions
from tidegate.fleet.offers import SERVING, ModelOffer
from tidegate.models.manifest import Feature
from tidegate.placement_pin import outer
from tidegate.types import LoadReport

LOOK_AGAIN_S: Final = 0.01  # whether a link that was lost just now is back
STATIC_REDIAL_S: Final = 1.5  # configured targets are few, are meant to be there, and much hangs on each
_LONGEST_HOPE_S: Final = 0.25  # of a dial that nothing is heard of: an early refusal serves the caller better
_PRIOR_RTT_S: Final[dict[Tier, float]] = {"edge": 0.002, "pool": 0.005, "site": 0.02}


OfferKey = tuple[str, str, str]  # model, version, variant
_NO_OFFERS: Final = OfferIndex()


class AnswerDrift(NamedTuple):
    """A variant's answers disagree with the reference's."""

    evidence: str
    demoted: bool  # whether placement skips it


class Fleet:
    """Mutable: `add` and `remove` targets, `fold` what links say, `heard` what the control plane says."""

    def __init__(
        self,
        feature_of: Callable[[str, str], Feature],
        *,
        draw: Callable[[], float] = lambda: 0.5,
        scaling: ReplicaScaler | None = None,
    ) -> None:
        """Args: feature_of: the cost feature of (model, version), for priors.
        draw: chance, uniform in [0, 1), for the breakers of paths.
        scaling: where the number of pool replicas needed is wanted.
        """
        self.targets: dict[str, TargetView] = {}
        self.balance = EjectionPolicy()
        # Called when a target is ejected, and when it is back.
        self.on_health: Callable[[TargetView, float], None] = lambda _target, _now: None
        # Called when a condition of a target begins or ends.
        self.on_condition: Callable[[TargetView, ConditionChange], None] = lambda _target, _change: None
        self.scaling = scaling
        self.unhedged: set[str] = set()  # targets whose conditions keep hedges away
        self._feature_of = feature_of
        self._draw = draw
        self._costs = CostModel()
        self._history = TargetHistory()
        self._coverage: dict[Tier, IntervalWidth] = {tier: IntervalWidth() for tier in TIER}
        self._siblings: dict[Tier, CommonCause] = {tier: CommonCause() for tier in TIER}
        self._index: dict[tuple[str, str], OfferIndex] = {}
        self._indexed: dict[str, list[OfferKey]] = {}  # by target: its entries in the index
        self._slots: dict[str, int] = {}  # by target that generates: how many at a time, as believed
        self.slots = 0  # of all of them together
        self._drifts: dict[str, dict[OfferKey, AnswerDrift]] = {}  # by target, also while it is away
        self._hoped_by: dict[str, float] = {}  # by target whose link was lost: until then it may be back
        self.scarcity = 1.0  # how many times its plain price the cloud costs
        self._cloud: set[str] = set()  # targets whose price it is
        self._metered: set[str] = set()
        self._reserve: set[str] = set()
        self.sites: set[str] = set()  # the targets that are other gateways
        self._static: set[str] = set()  # few, where devices that come and go may be ten thousand

    def add(self, spec: TargetSpec, now: float) -> TargetView:
        """Begin to know a target. It is down until its link or its offers say otherwise."""
        self.remove(spec.id)
        tier = spec.tier
        learned = self._history.take(spec.id, now)
        if learned is not None:
            self._costs.restore(spec.id, dict(learned.costs))
        target = TargetView(
            spec,
            SiteQueueEstimate() if tier == "site" else QueueEstimate(batches=tier == "pool", in_order=not spec.foreign),
            LinkEstimate(prior_rtt_s=_PRIOR_RTT_S[tier]) if learned is None else learned.link,
            self.balance,
            self._draw,
            siblings=self._siblings[tier],
            interval_width=self._coverage[tier],
            since=now,
            concurrency=ConcurrencyCredit(partial(self._have_slots, spec.id)),
            scaling=self.scaling if tier == "pool" else None,
        )
        self._renew(target, breaker=True)
        self.targets[spec.id] = target
        if self.balance.began_at is None:
            self.balance.began_at = now
        if spec.lies_in == "cloud":
            self._cloud.add(spec.id)
        if spec.standby:
            self._reserve.add(spec.id)
        if spec.static:
            self._static.add(spec.id)
        if tier == "site":
            self.sites.add(spec.id)
        self._price(target)
        self._tell_drift(target, now)
        return target

    def keep_history(self, target_id: str, now: float) -> None:
        """Before `remove` of a target that may come back: what was learned of it is its own again if `add` is soon."""
        target = self.targets[target_id]
        self._history.keep(target_id, Learned(self._costs.forget(target_id), target.link), now)

    def remove(self, target_id: str) -> None:
        """Forget a target and what was learned of it; attempts still under way there end on their own."""
        target = self.targets.pop(target_id, None)
        if target is not None:
            target.breaker.retire()
            target.path_breaker.retire()
            target.siblings.forget(target_id)
            self._costs.forget(target_id)
            self._unlist(target)
            self._hoped_by.pop(target_id, None)
            self.balance.forget(target_id)
            self._metered.discard(target_id)
            self._cloud.discard(target_id)
            self._reserve.discard(target_id)
            self._static.discard(target_id)
            self.sites.discard(target_id)
            self.unhedged.discard(target_id)

    def relocate(self, spec: TargetSpec, now: float) -> None:
        """The target is at another address now: what was learned of it stays, and it is down until it is reached."""
        target = self.targets[spec.id]
        target.spec = spec
        self._went_down(target, f"it has moved to {spec.address}", now)

    def drain(self, target_id: str, why: str) -> None:
        """From now on the target only finishes what it has; with "" for `why` it takes new work again."""
        target = self.targets[target_id]
        if target.leaving != why:
            target.leaving = why
            self._list(target)

    @property
    def queues(self) -> int:
        """How many queues there are behind this gateway: of each target one, and of a site those of its places.

        Of the places that a site says it has, as many as it has been seen to use.
        """
        places = 0.0
        for target in [self.targets[target_id] for target_id in self.sites]:
            if isinstance(target.queue_estimate, SiteQueueEstimate):
                places += target.concurrency.bounded(target.queue_estimate.places)
        return len(self.targets) + int(places)

    @property
    def has_reserve(self) -> bool:
        """Whether a target is known that only waits to be needed."""
        return bool(self._reserve)

    def fold(self, event: LinkEvent, now: float) -> None:
        """Take in one event of a link. Events of targets that were removed meanwhile are ignored."""
        target = self.targets.get(event.target_id)
        if target is None:
            return
        match event:
            case LinkLoad():  # first: one comes with every answer
                target.queue_estimate.report(event.load, "link", now)
                target.link.heard(now)  # it came over the path, even if its answer is not needed any more
                target.path_breaker.heard(now)
                if event.offers is not None:
                    self._offer(target, event.offers, now)
            case LinkRtt():  # comes with every heartbeat
                self._costs.relax(target.id, now)
                target.bias.relax(now)
                target.link.record(event.rtt_s, now)
                target.path_breaker.heard(now)
                self._look(target, event.rtt_s, now)
            case LinkUp():
                self._hoped_by.pop(target.id, None)
                self._came_up(target, event, now)
            case RedialFailed():
                self._hoped_by.pop(target.id, None)
            case LinkAttested():
                target.attestation = event.attestation
            case _:  # LinkDown, the only one left
                if target.up and not event.in_order and target.spec.transport == "link":
                    self._hoped_by[target.id] = now + _LONGEST_HOPE_S
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
        conditions: DeviceConditions = UNTOLD,
    ) -> None:
        """What the control plane says of a device: its load, why to doubt it, what it costs, and whether it takes work.

        Args:
            offers: for a unary target, which has no other way to say them; None leaves them as they are.
        """
        target = self.targets.get(target_id)
        if target is None:
            return
        target.doubt = doubt
        if conditions != target.conditions:
            target.conditions = conditions
            self._price(target)
        if load is not None:
            target.queue_estimate.report(load, "mqtt", now)
        if accepting != target.accepting or (offers is not None and offers != target.offers):
            target.accepting = accepting
            self._offer(target, target.offers if offers is None else offers, now)

    def price_cloud(self, factor: float) -> None:
        """How many times its usual price a second in the cloud costs now, at least once."""
        if factor != self.scarcity:
            self.scarcity = factor
            for target_id in self._cloud:
                self._price(self.targets[target_id])

    @property
    def is_metered(self) -> bool:
        """Whether the bytes of a request have a price anywhere."""
        return bool(self._metered)

    def repriced(self) -> None:
        """The cost features of models changed: read them again."""
        for target in self.targets.values():
            self._list(target)

    def offers(self, model: str, version: str) -> OfferIndex:
        """Every variant of the model on a usable target. Breakers are not asked here: they change with time."""
        return self._index.get((model, version), _NO_OFFERS)

    def offered(self, model: str, version: str) -> Sequence[Offer]:
        """The same, to be walked at once: it changes when a target comes or goes."""
        return self.offers(model, version).all.items

    def indexes(self) -> ItemsView[tuple[str, str], OfferIndex]:
        """By model and version: the same."""
        return self._index.items()

    def serving(self, model: str) -> dict[str, list[str]]:
        """By version of the model that is served: the targets. O(their offers), so not for requests."""
        versions = self.served_versions(model)
        return {one: list(dict.fromkeys(offer.target.id for offer in self.offered(model, one))) for one in versions}

    def served_versions(self, model: str) -> list[str]:
        """Versions of the model that usable targets offer. O(models), so only for refusals and operators."""
        return [version for name, version in self._index if name == model]

    def usable(self, now: float) -> bool:
        """Whether at least one target can be used."""
        return any(target.up and target.allows(now) for target in self.targets.values())

    def retry_after_s(self, now: float) -> float | None:
        """In how many seconds a target may be usable again; None when none is expected.

        Soon after a link was lost, which is dialled again at once, until that dial has failed (a server that is only
        probed is asked again at its next probe); else when the next ejected target gets its probe, or one that is
        configured and down its next dial.
        """
        if any(now < by for by in self._hoped_by.values()):
            return LOOK_AGAIN_S
        ejected = [self.targets[target_id] for target_id in self.balance.ejected]
        waits_s = [max(0.0, one.breaker.retry_at - now, one.path_breaker.retry_at - now) for one in ejected]
        static = [self.targets[target_id] for target_id in self._static]
        if not all(target.up or target.leaving for target in static):
            waits_s.append(STATIC_REDIAL_S)
        return min(waits_s, default=None)

    def all_tried(self) -> bool:
        """Whether every static target has been reached or found unreachable at least once."""
        return all(self.targets[target_id].tried for target_id in self._static)

    def _came_up(self, target: TargetView, event: LinkUp, now: float) -> None:
        epoch, new_process = event.epoch, event.epoch != target.epoch
        if new_process or not target.up or event.path_kind != target.path_kind:
            self._renew(target, breaker=new_process)  # what failed before was another process, or another connection
        if new_process:
            target.queue_estimate.new_process(epoch)
        if new_process and target.epoch:
            target.degradation.new_process(now)
            self._act(target)
        if new_process and self._is_settled(now):
            target.warm_up(now)
        if not (new_process or target.up):
            target.progress.path_is_back(now)
        target.link.heard(now)
        self._unattest(target)
        target.up, target.tried, target.reason, target.since, target.epoch = True, True, "", now, epoch
        target.path_kind = event.path_kind
        self._offer(target, event.offers, now)

    def _is_settled(self, now: float) -> bool:
        """Whether other targets are warm: in a fleet that has just begun none is."""
        began_at = self.balance.began_at
        return began_at is not None and now - began_at >= SLOW_START_S

    def _went_down(self, target: TargetView, reason: str, now: float) -> None:
        if target.up or not target.tried:
            target.since = now
        target.up, target.tried, target.reason = False, True, reason
        self._unattest(target)
        self._list(target)

    def _unattest(self, target: TargetView) -> None:
        """Evidence is of one connection: it says nothing of the next one."""
        if not target.attestation.why_not:
            target.attestation = CONNECTION_ENDED

    def _price(self, target: TargetView) -> None:
        scarcity = self.scarcity if target.id in self._cloud else 1.0
        degradation = target.degradation
        target.price = price_of(
            target.spec.tier, target.conditions, scarcity, hot=degradation.is_hot, ailing=degradation.price_factor
        )
        if target.spec.tier == "site":
            target.price = _price_of_site(target.offers, target.price)
        target.byte_price = byte_price_of(target.conditions)
        (self._metered.add if target.byte_price else self._metered.discard)(target.id)

    def _offer(self, target: TargetView, offers: tuple[ModelOffer, ...], now: float) -> None:
        only = target.spec.models
        if target.ejected and any(_is_back(one, target.offers) for one in offers):
            target.breaker.cut_short(now)  # its worker was replaced: whether that helped is worth a probe at once
        target.offers = tuple(offer for offer in offers if not only or offer.name in only)
        if isinstance(target.queue_estimate, SiteQueueEstimate):
            target.queue_estimate.places = max([one.places for offer in offers for one in offer.variants], default=1.0)
            self._price(target)
        target.degradation.offered(target.offers, now)
        if target.degradation.changes:
            self._act(target)
        self._list(target)

    def replicas_needed(self, now: float, others: Sequence[DemandTerms | None] = ()) -> ReplicaNeed | None:
        """How many replicas of the pool are needed; None where it is not computed. `others`: see `ReplicaScaler`."""
        if self.scaling is None:
            return None
        pools = [one for one in self.targets.values() if one.spec.tier == "pool" and one.up and one.takes_work]
        backlog_s = sum(one.queue_estimate.wait_s(now) for one in pools)
        return self.scaling.decide(now, replicas=len(pools), backlog_s=backlog_s, others=others)

    # agreement

    def drifts(self, target_id: str, key: OfferKey, drift: AnswerDrift | None, now: float) -> None:
        """The variant's answers disagree with the reference's; None: no longer. It holds also while the target is away.

        Nothing is remembered of a target beyond what its caller says: `gateway/core/agreement` bounds how many drift.
        """
        of_target = self._drifts.setdefault(target_id, {})
        if drift is not None:
            of_target[key] = drift
        else:
            of_target.pop(key, None)
            if not of_target:
                del self._drifts[target_id]
        target = self.targets.get(target_id)
        if target is not None:
            self._tell_drift(target, now)
            self._list(target)

    def _tell_drift(self, target: TargetView, now: float) -> None:
        drifts = self._drifts.get(target.id, {})
        model = next((key[0] for key in drifts), "")
        target.degradation.disagrees("; ".join(one.evidence for one in drifts.values()), now, model)
        if target.degradation.changes:
            self._act(target)

    # degradation

    def without_hedging(self, others: set[str]) -> set[str]:
        """`others`, and those that hedges should not go to, unless no other target that works would be left."""
        avoided = others | self.unhedged
        is_left = any(one.up and not one.ejected for one in self.targets.values() if one.id not in avoided)
        return avoided if is_left else others

    def _look(self, target: TargetView, rtt_s: float, now: float) -> None:
        """With every heartbeat: look for conditions of the target."""
        load = target.queue_estimate.load
        wait_s = load.queue_delay_s if load is not None else 0.0
        target.degradation.look(now, rtt_s=rtt_s, wait_s=wait_s, conditions=target.conditions)
        if target.degradation.changes:
            self._act(target)

    def _act(self, target: TargetView) -> None:
        """Pull the levers of conditions that have begun or ended there, and report them."""
        degradation = target.degradation
        for change in degradation.take_changes():
            name, variant = change.condition.name, change.condition.variant
            cost = self._costs.known(target.id, variant) if variant is not None else None
            if name == "slow_drift" and cost is not None and variant is not None:
                cost.widen(WIDER if change.begun else 1.0)
                if change.begun:
                    cost.relearn(degradation.learned(variant))
            elif name == "cold_cache" and change.begun and self._is_settled(change.at):
                target.warm_up(change.at)
            self.on_condition(target, change)
        self._price(target)
        (self.unhedged.discard if degradation.hedges else self.unhedged.add)(target.id)

    # health

    def _renew(self, target: TargetView, *, breaker: bool) -> None:
        """Forget what failed before: on the path, and with `breaker` in the process as well."""
        target.path_breaker.retire()
        target.path_breaker = Breaker(on_move=partial(self._path_moved, target))
        if breaker:
            target.breaker.retire()
            target.breaker = Breaker(on_move=partial(self._breaker_moved, target))
            target.progress, target.bias = ProgressWatch(), TargetBias()
            target.siblings.watch(target.id, target.progress)
        target.ejected = target.breaker.state is not BreakerState.CLOSED

    def _breaker_moved(self, target: TargetView, now: float) -> None:
        if target.breaker.state is BreakerState.CLOSED:
            target.trusted_since = now
            if not target.breaker.tripped:
                target.warm_up(now)
        self._moved(target, now)

    def _path_moved(self, target: TargetView, now: float) -> None:
        if target.path_breaker.state is not BreakerState.OPEN:
            target.progress.path_is_back(now)
        self._moved(target, now)

    def _moved(self, target: TargetView, now: float) -> None:
        """A breaker of the target has moved."""
        states = target.breaker.state, target.path_breaker.state
        ejected = states != (BreakerState.CLOSED, BreakerState.CLOSED)
        if ejected == target.ejected:
            return
        target.ejected = ejected
        self._count(target)
        if target.up:  # of one whose link is down it was said that it is
            self.on_health(target, now)

    def _count(self, target: TargetView) -> None:
        usable = target.up and target.takes_work
        self.balance.count(target.id, edge=target.spec.tier == "edge", usable=usable, ejected=target.ejected)

    # the index

    def _list(self, target: TargetView) -> None:
        """Have the index hold what the target offers now. O(its offers)."""
        self._count(target)
        ready = {(one.model, one.version, one.variant.name): one for one in self._ready_offers(target)}
        for key in self._indexed.get(target.id, ()):
            if key not in ready:
                self._drop(target.id, key)
        for (model, version, variant), one in ready.items():
            self._index.setdefault((model, version), OfferIndex()).put((target.id, variant), one)
        self._indexed[target.id] = list(ready)
        self._costs.keep(target.id, target.offers)
        target.concurrency.claim(sum(one.variant.slots for one in ready.values()))

    def _have_slots(self, target_id: str, slots: int) -> None:
        self.slots += slots - self._slots.pop(target_id, 0)
        if slots:
            self._slots[target_id] = slots

    def _unlist(self, target: TargetView) -> None:
        target.concurrency.claim(0)
        for key in self._indexed.pop(target.id, ()):
            self._drop(target.id, key)

    def _drop(self, target_id: str, key: OfferKey) -> None:
        model, version, variant = key
        offers = self._index[model, version]
        offers.drop((target_id, variant))
        if not offers.all:
            del self._index[model, version]

    def _ready_offers(self, target: TargetView) -> Iterator[Offer]:
        zone = target.spec.lies_in
        drifts = self._drifts.get(target.id) if self._drifts else None
        for model in target.offers if target.up and target.takes_work else ():
            feature = self._feature_of(model.name, model.version)
            for variant in model.variants if model.answers else ():
                cost = self._costs.of(target.id, model.name, model.version, variant, feature)
                if drifts and (drift := drifts.get((model.name, model.version, variant.name))) and drift.demoted:
                    variant = replace(variant, standing="demoted")  # noqa: PLW2901  # placement reads it so
                yield Offer(
                    target=target,
                    model=model.name,
                    version=model.version,
                    variant=variant,
                    cost=cost,
                    quality=quality_of(variant),
                    zone=zone if variant.zone is None else outer(zone, variant.zone),
                    cold_s=model.cold_s,
                )

    def __repr__(self) -> str:
        up = sum(target.up for target in self.targets.values())
        return f"<Fleet {up} of {len(self.targets)} targets up, {len(self._index)} models>"


def _price_of_site(offers: tuple[ModelOffer, ...], usual: float) -> float:
    """The least price of a second of compute at the site: a request goes to its cheapest place that makes it."""
    return min([one.price for offer in offers for one in offer.variants if one.price is not None], default=usual)


def _is_back(offer: ModelOffer, before: tuple[ModelOffer, ...]) -> bool:
    """Whether the model serves now, and was known and did not before."""
    if offer.state not in SERVING:
        return False
    return any((one.name, one.version) == (offer.name, offer.version) and one.state not in SERVING for one in before)
