"""Many requests' lives at once, in whatever order chance wants: the real machine, fleet and estimators, no clock.

A `World` is a gateway's core without its shell: a fleet, a placer with its hedging rule, and lives; in some there is
admission as well, with tenants, budgets and the gate before the placer (`door`). Each method of the form `step(x, y,
z)` lets one thing happen, what exactly being read from three numbers in [0, 1): a request arrives, an attempt is
accepted, answers or fails, a timer rings (early, late, or though it was replaced), a caller leaves, news comes of what
has ended long ago, a link comes up or goes down, a report comes out of order, a target comes or goes. Every step is
possible at any time (it does nothing where there is nothing to do it to), so steps can be drawn in any order and any of
them left out: the seeded fuzzer and its shrinking (`script`) and Hypothesis rest on that.

The world performs actions as `gateway/serving/execution.py` does, with the same `AttemptTelemetry` as evidence. What
must hold after each step is in `life` and `books`; `drain` rings the timers that are left, on time, and then nothing
may be left over.

One interleaving is one request's life, from its arrival to its end, among up to `MOST_LIVES` others.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from hashlib import blake2b
from itertools import count

from gateway.core.admission.placement_guard import AdmissionGuard
from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkDown, LinkLoad, LinkRtt, LinkUp
from gateway.core.fleet.pricing import Tier
from gateway.core.fleet.target import TargetSpec, TargetView, Transport
from gateway.core.placement.ask import Ask
from gateway.core.placement.placement import Placement
from gateway.core.placement.placer import Placer
from gateway.core.placement.probing import SHARE, ProbePlacer
from gateway.core.placement.utility import UtilityPlacer
from gateway.core.request.attempt import AttemptTelemetry
from gateway.core.request.escalation import Escalations
from gateway.core.request.hedge_by_chance import ChanceHedging
from gateway.core.request.hedging import EARLY_S, DeadlineHedging, HedgePolicy
from gateway.core.request.machine import Action, Cancel, Launch, RequestMachine, WakeAt
from gateway.core.request.token_budget import TokenBudget
from tests.support.interleave import draws
from tests.support.interleave.books import Bookkeeping, Purse, check_target
from tests.support.interleave.door import Door
from tests.support.interleave.draws import Profile, again, pick, variants_of
from tests.support.interleave.life import Event, Life, WatchedPlaces
from tidegate.fleet.offers import ModelOffer
from tidegate.outcome import DeadlineExceeded, Disconnected, ServeError, Unreachable
from tidegate.types import Accepted, LoadReport


class World:
    """Mutable: let steps happen, in any order; `drain` at the end. Every broken invariant is an AssertionError."""

    def __init__(self, profile: Profile) -> None:
        self.now = 1000.0
        self.fleet = Fleet(lambda model, version: "tokens", draw=lambda: self._draw)
        self.lives: list[Life] = []  # under way
        self.counts: Counter[str] = Counter()  # of what happened, to show that everything does
        self.signatures: list[int] = []  # of the lives that have ended: the order of their events, in one number
        self.overloaded = False
        self._profile = profile
        self._draw = 0.5
        self._keys = count()
        self._names = count()
        self._sequences = count(1)
        self._sour: dict[str, ServeError] = {}  # targets that only fail, and how
        self._ended: deque[tuple[Life, int]] = deque(maxlen=draws.REMEMBERED)
        self._books = Bookkeeping(self.fleet)
        self._hedging_purse: Purse | None = None
        self._door = Door(profile.places) if profile.places else None
        self._places, self._hedges = self._policy(profile)
        self._escalations, self._escalation_purse = self._judge(profile)
        for number in range(profile.targets):
            self.target_comes(number / draws.MOST_TARGETS, number * 0.37 % 1.0, number * 0.61 % 1.0)

    def _policy(self, profile: Profile) -> tuple[WatchedPlaces, HedgePolicy]:
        if profile.policy == "cheapest":
            return self._watched(Placer(self.fleet)), DeadlineHedging()
        placer = UtilityPlacer(self.fleet)
        quota = TokenBudget(share=profile.share, cap=profile.cap)
        self._books.watch(placer)
        self._hedging_purse = Purse(quota, profile.share, profile.cap)
        self._books.quotas.append(self._hedging_purse)
        return self._watched(placer), ChanceHedging(placer, overloaded=self._is_overloaded, tokens=quota)

    def _watched(self, placer: Placer) -> WatchedPlaces:
        placement: Placement = self._probing(placer)
        if self._door is not None:
            placement = AdmissionGuard(placement, self.fleet, self._door.admission)
        return WatchedPlaces(placer, placement, self._profile.hopeful)

    def _is_overloaded(self) -> bool:
        return self.overloaded or (self._door is not None and self._door.admission.overloaded())

    def _judge(self, profile: Profile) -> tuple[Escalations | None, Purse | None]:
        if not profile.escalated:
            return None, None
        escalations = Escalations(draws.SURE, max_share=profile.escalated, overloaded=self._is_overloaded)
        quota = Purse(escalations.tokens, profile.escalated, escalations.tokens.tokens)
        self._books.quotas.append(quota)
        return escalations, quota

    def _probing(self, placer: Placer) -> ProbePlacer:
        # Chance that follows the steps alone; every other request of low priority may explore.
        return ProbePlacer(placer, self.fleet, lambda: self.now * 97.0 % (2.0 * SHARE), overloaded=self._is_overloaded)

    # what happens to requests

    def time_passes(self, x: float, y: float, z: float) -> None:
        self.now += pick(draws.PAUSES_S, x) * (0.5 + y)

    def request_arrives(self, x: float, y: float, z: float) -> None:
        if len(self.lives) >= draws.MOST_LIVES:
            return
        tenant, priority = pick(draws.CALLERS, again(z, 13)), pick((0, 1, 2, 3, 4), again(z))
        if self._door is not None and not self._door.enters(tenant, priority, int(1e6 * x), self.now):
            self.counts["end: at the door"] += 1
            return
        units = 1.0 + pick((4.0, 16.0, 60.0, 300.0), z) * y
        ask = Ask(
            draws.MODEL,
            "1",
            units,
            pick((1, 1, 1, 4), again(y)),
            int(units),
            deadline=self.now + pick(draws.BUDGETS_S, x) * (0.5 + y),
            variant=pick(("", "", "", "", "", "fp32"), again(x)),
            priority=priority,
            body_bytes=pick((0, 200, 40_000, 1_000_000), again(x, 7)),
            min_quality=pick((0.0, 0.0, 0.0, 0.0, 0.95), again(y, 7)),
            pin=pick(draws.PINS, again(z, 7)),
            weight=self._door.admission.weight_of(tenant) if self._door is not None else 1.0,
            tenant=tenant,
        )
        most = self._profile.max_attempts
        machine = RequestMachine(
            ask, self._places, max_attempts=most, hedges=self._hedges, escalations=self._escalations
        )
        life = Life(machine, ask, self._places, most, self.now)
        self.lives.append(life)
        self._perform(life, machine.arrived(self.now), "arrived")

    def attempt_is_accepted(self, x: float, y: float, z: float) -> None:
        if (picked := self._under_way(x)) is None:
            return
        life, number = picked
        accepted = Accepted(int(9 * y), pick(draws.PROMISES_S, y) * (0.5 + z))
        life.attempts[number].accepted(self.now, accepted)
        life.said[number] = self.now + accepted.finish_in_s
        self._perform(life, life.machine.accepted(number, accepted, self.now), "accepted", number)

    def attempt_begins(self, x: float, y: float, z: float) -> None:
        """The first part of an answer that comes in parts, or enough to judge it where its beginning is held back."""
        if (picked := self._under_way(x)) is None:
            return
        life, number = picked
        machine = life.machine
        if life.has_begun or number in life.doubted:
            return
        if self._escalations is None or (y < 0.3 and number not in life.hides):
            self._perform(life, machine.begun(number, self.now), "begun", number)
        elif number not in life.hides:
            life.hides.add(number)
            self._perform(life, machine.held(number, self.now), "held", number)
        else:
            confidence = pick(draws.CONFIDENCES, again(z, 31))
            self._earns(confidence)
            sure = confidence is None or confidence >= draws.SURE
            if not sure:
                life.doubted.add(number)
            kind = "begun" if sure else "doubted"
            self._perform(life, machine.judged(number, confidence, self.now), kind, number)

    def _earns(self, confidence: float | None) -> None:
        if confidence is not None and self._escalation_purse is not None:
            self._escalation_purse.earn()

    def attempt_answers(self, x: float, y: float, z: float) -> None:
        if (picked := self._under_way(x)) is None:
            return
        life, number = picked
        attempt = life.attempts[number]
        if (fault := self._sour.get(attempt.candidate.target.id)) is not None:
            self._fail(life, number, fault, z)
            return
        took_s = self.now - attempt.launched_at
        stages = {} if y < 0.1 else {"queue": took_s * y * z, "compute": took_s * (1.0 - y) * z}
        load = self._report(attempt.candidate.target, again(y), again(z)) if z < 0.7 else None
        self._ends(attempt, "answered", stages=stages)
        link_s = attempt.answered(stages, load, self.now, pick((0, 100, 50_000), again(z, 7)))
        assert 0.0 <= link_s <= took_s, "the link's share is a share of the whole"
        self._over(life, number)
        is_judged = self._escalations and not life.has_begun and number not in life.doubted
        self._judged(life, number, pick(draws.CONFIDENCES, again(z, 31)) if is_judged else None)

    def _judged(self, life: Life, number: int, confidence: float | None) -> None:
        self._earns(confidence)
        sure = confidence is None or confidence >= draws.SURE
        if number in life.doubted and not life.has_begun:
            sure = False
        self._perform(
            life, life.machine.answered(number, self.now, confidence), "answered" if sure else "unsure", number
        )

    def attempt_fails(self, x: float, y: float, z: float) -> None:
        if (picked := self._under_way(x)) is not None:
            self._fail(*picked, pick(draws.FAILURES, y), z)

    def timer_rings(self, x: float, y: float, z: float) -> None:
        """Mostly the next one that is due, and mostly on time."""
        if not self.lives:
            return
        life = min(self.lives, key=_wake_at) if x < 0.95 else pick(self.lives, again(x))
        late_s = -EARLY_S * z if y < 0.3 else 0.0 if y < 0.7 else 0.02 * z
        self.now = max(self.now, life.wake_at + late_s)
        self._perform(life, life.machine.timer(self.now), "timer")

    def replaced_timer_rings(self, x: float, y: float, z: float) -> None:
        if self.lives:
            life = pick(self.lives, x)
            self._perform(life, life.machine.timer(self.now), "timer")

    def caller_leaves(self, x: float, y: float, z: float) -> None:
        if self.lives:
            life = pick(self.lives, x)
            self._perform(life, life.machine.cancelled(self.now), "cancelled")

    def old_news_comes(self, x: float, y: float, z: float) -> None:
        """Of an attempt that has ended, or of one that there never was."""
        if not self._ended:
            return
        life, number = pick(self._ended, x)
        if y < 0.2:
            number = life.launches + int(5 * z)
        machine, now = life.machine, self.now
        actions = [*machine.answered(number, now), *machine.failed(number, pick(draws.FAILURES, z), now)]
        actions += machine.accepted(number, Accepted(0, pick(draws.PROMISES_S, z)), now)
        actions += [*machine.begun(number, now), *machine.held(number, now), *machine.judged(number, 0.0, now)]
        if machine.done:
            actions += [*machine.timer(now), *machine.cancelled(now)]
        assert not actions, f"old news of attempt {number} led to {actions}"
        life.note("old news", min(number, 6))
        self.counts["old news"] += 1

    # what happens to targets

    def link_comes_up(self, x: float, y: float, z: float) -> None:
        if (target := self._target(x)) is None:
            return
        epoch = max(0, target.epoch + pick((0, 0, 0, 0, 0, 0, 0, 1, 1, -1), y))
        offers = (ModelOffer(draws.MODEL, "1", variants_of(again(y), z), "loading" if z > 0.9 else "ready"),)
        self.fleet.fold(LinkUp(target.id, target.id, epoch, offers), self.now)

    def link_goes_down(self, x: float, y: float, z: float) -> None:
        """What was under way there fails at once, or is just never heard of again."""
        if (target := self._target(x)) is None:
            return
        self.fleet.fold(LinkDown(target.id, "gone"), self.now)
        there = [one for one in self._all_under_way() if one[0].attempts[one[1]].candidate.target is target]
        for life, number in there if y < 0.6 else ():
            if number in life.attempts:  # it may have lost to the one before
                self._fail(life, number, Unreachable("the link is gone"), z)

    def load_is_reported(self, x: float, y: float, z: float) -> None:
        if (target := self._target(x)) is None:
            return
        load = self._report(target, y, z)
        if z < 0.5:
            self.fleet.fold(LinkLoad(target.id, load), self.now)
            return
        doubt, accepting = "silent" if again(y) < 0.2 else "", again(z) < 0.85
        self.fleet.heard(target.id, load=load, doubt=doubt, now=self.now, accepting=accepting)

    def link_is_measured(self, x: float, y: float, z: float) -> None:
        if (target := self._target(x)) is not None:
            self.fleet.fold(LinkRtt(target.id, pick(draws.RTTS_S, y) * (0.5 + z)), self.now)

    def target_comes(self, x: float, y: float, z: float) -> None:
        if len(self.fleet.targets) >= draws.MOST_TARGETS:
            return
        tier: Tier = "edge" if x < 0.6 else "pool"
        transport: Transport = "unary" if again(y) < 0.2 else "link"
        spec = TargetSpec(
            f"{tier}/{next(self._names) % 7}",
            tier,
            pick(draws.HOSTS, y),
            transport,
            foreign=transport == "unary",
            zone=pick((None, None, None, "site"), z),
        )
        if spec.id in self.fleet.targets:
            return
        self._books.comes(self.fleet.add(spec, self.now))
        offers = (ModelOffer(draws.MODEL, "1", variants_of(y, z)),)
        self.fleet.fold(LinkUp(spec.id, spec.id, 1, offers), self.now)

    def target_goes(self, x: float, y: float, z: float) -> None:
        if (target := self._target(x)) is not None:
            self.fleet.remove(target.id)

    def target_sours(self, x: float, y: float, z: float) -> None:
        """From now on, or no more, whatever it would answer is a fault of its own: breakers open."""
        target = self._target(x)
        if target is not None and self._sour.pop(target.id, None) is None:
            self._sour[target.id] = pick(draws.FAULTS, y)

    def sour_target_fails(self, x: float, y: float, z: float) -> None:
        sour = [one for one in self._all_under_way() if one[0].attempts[one[1]].candidate.target.id in self._sour]
        if sour:
            life, number = pick(sour, x)
            self._fail(life, number, self._sour[life.attempts[number].candidate.target.id], z)

    def overload_turns(self, x: float, y: float, z: float) -> None:
        self.overloaded = x < 0.4
        if self._door is not None and y < 0.5:
            self._door.is_swamped()

    # the end

    def drain(self) -> None:
        """Let every timer ring that is left, each at its instant: all lives end, and nothing is left over."""
        while self.lives:
            life = min(self.lives, key=_wake_at)
            self.now = max(self.now, life.wake_at)
            before = life.wake_at, life.launches
            self._perform(life, life.machine.timer(self.now), "timer")
            assert life.over or (life.wake_at, life.launches) != before, "a timer that rings on time gets somewhere"
            self.check()
        self._books.check_at_rest(self.now)
        if self._door is not None:
            self._door.check_at_rest()

    def check(self) -> None:
        """What holds after each step."""
        self._books.check()
        if self._door is not None:
            self._door.check()
            self.counts["overloaded"] += self._door.admission.overloaded()
        if target := self._target(len(self.signatures) * 0.37 % 1.0):
            check_target(target, self.now)

    # how

    def _perform(
        self, life: Life, actions: list[Action], event: str, number: int = -1, error: ServeError | None = None
    ) -> None:
        if event == "timer" and life.held:
            event = life.held
        life.take(actions, Event(event, number, self.now, self._is_overloaded(), isinstance(error, Disconnected)))
        moves = any(isinstance(action, Cancel) and action.hopeless for action in actions)
        for action in actions:
            match action:
                case Launch():
                    self._pays("moved" if moves else event, life.lost_share)
                    self._launch(life, action)
                case WakeAt(at):
                    life.wake_at = at
                case Cancel(cancelled, hopeless=hopeless):
                    attempt = life.attempts[cancelled]
                    self._ends(attempt, "moved" if hopeless else "cancelled")
                    attempt.cancelled(self.now, hopeless=hopeless)
                    self._over(life, cancelled)
                    self.counts["cancelled attempts"] += 1
        if life.over:
            self._end(life)

    def _pays(self, event: str, lost_share: float) -> None:
        """A first attempt earns, what was refused or promised late is placed again for nothing, all others are paid.

        After a failure it is what the failed one had computed that is paid for.
        """
        quota = self._escalation_purse if event in ("unsure", "doubted") else self._hedging_purse
        if quota is not None and event == "arrived":
            quota.earn()
        elif quota is not None and event in ("failed", "timer", "accepted", "unsure", "doubted"):
            quota.spend(max(0.1, lost_share) if event == "failed" else 1.0)

    def _launch(self, life: Life, launch: Launch) -> None:
        attempt = AttemptTelemetry(launch.candidate, next(self._keys), life.ask.units, self.now, life.ask.body_bytes)
        life.attempts[launch.attempt] = attempt
        self.counts["probes"] += self._books.begins(attempt)
        self.counts["launched"] += 1
        if self._door is not None:
            self._door.begins(attempt)

    def _ends(
        self,
        attempt: AttemptTelemetry,
        how: str,
        error: ServeError | None = None,
        stages: Mapping[str, float] | None = None,
    ) -> None:
        """Tell the books, before the evidence is told."""
        self._books.ends(attempt, how, error, self.now)
        if self._door is not None:
            self._door.ends(attempt, how, stages or {})

    def _fail(self, life: Life, number: int, error: ServeError, draw: float) -> None:
        attempt = life.attempts[number]
        life.lost_share = 1.0
        if isinstance(error, Disconnected | DeadlineExceeded):
            candidate = attempt.candidate
            done_at = life.said.get(number, attempt.launched_at + candidate.finish_s - candidate.link_s / 2)
            computed_s = candidate.compute_s - (done_at - self.now)
            life.lost_share = sorted((0.0, computed_s / candidate.compute_s, 1.0))[1]
        self._ends(attempt, "failed", error)
        attempt.failed(error, self.now, draw)
        self._over(life, number)
        event = "refused" if error.code == "overloaded" else "failed"
        self._perform(life, life.machine.failed(number, error, self.now), event, number, error)

    def _over(self, life: Life, number: int) -> None:
        del life.attempts[number]
        self._ended.append((life, number))

    def _end(self, life: Life) -> None:
        self.lives.remove(life)
        life.check_over()
        if self._door is not None:
            self._door.leaves(life.ask.tenant, self.now - life.arrived_at)
        self.counts[life.end_in_words()] += 1
        for word in life.words:
            self.counts[word] += 1
        self.signatures.append(int.from_bytes(blake2b(life.signature, digest_size=8).digest()))

    def _under_way(self, x: float) -> tuple[Life, int] | None:
        found = self._all_under_way()
        return pick(found, x) if found else None

    def _all_under_way(self) -> list[tuple[Life, int]]:
        return [(life, number) for life in self.lives for number in life.attempts]

    def _target(self, x: float) -> TargetView | None:
        targets = self.fleet.targets
        return pick(tuple(targets.values()), x) if targets else None

    def _report(self, target: TargetView, y: float, z: float) -> LoadReport:
        """In order for the most part, else from before, or from another epoch."""
        sequence = next(self._sequences) if y < 0.7 else int(20 * z)
        epoch = max(0, target.epoch + (0 if z < 0.8 else 1 if z < 0.9 else -1))
        return LoadReport(epoch, sequence, int(9 * z), 1, pick(draws.DELAYS_S, again(y, 7)) * (0.5 + z))

    def __repr__(self) -> str:
        return f"<World at {self.now:.3f}: {len(self.lives)} lives among {self.fleet!r}, {len(self.signatures)} over>"


def _wake_at(life: Life) -> float:
    return life.wake_at
