"""One device as its messages describe it: registers that only move forward, and what their silence means.

Registers. `birth` and `death` keep the greatest epoch ever seen; alive means that birth is the greater. `heartbeat` and
`inventory` belong to the born epoch and keep the greatest sequence. What belongs to a later epoch than the birth (its
birth was overtaken or lost) waits in a small bounded store. A maximum does not care for order, so any permutation,
duplication or loss of messages ends in the same registers once the newest of each has arrived. `reported` outlives its
session: until the next report it is the best that is known of the device's rollouts.

Freshness. Silence is graded, because placement can use a device that is merely late but not one that is gone:

    silent for ≤ 2 heartbeat intervals  FRESH    ≤ 5  STALE    ≤ 10  SUSPECT (probes only)    beyond  DEAD
    retained birth, never heard live    SUSPECT until 10 intervals have passed, then DEAD: never FRESH
    retained birth of a new session     silent since it was last heard in any session: a gateway that comes back to the
                                        broker after its devices did goes on as before the outage
    the device's own goodbye            DEAD at once, until a greater epoch is heard of
    a last will of the current epoch    SUSPECT, DEAD after the grace, unless a heartbeat refutes it: the broker may
                                        fire a will while the device still talks
    a late will of an older epoch       changes nothing
    answers requests all the same       CONTROL_LOST, usable: what the data plane sees outranks what a broker says

The one thing that does depend on order is whether a will or a heartbeat of the same session was last; it passes with
the next heartbeat, or with its absence.

While this gateway has no broker itself, silence says nothing about devices: the clock of silence stands still
(`BrokerOutage`) until the devices have had time to come back as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

from gateway.fleet_sync.freshness import (
    FRESH_UP_TO,
    JUST_AFTER_S,
    STALE_UP_TO,
    SUSPECT_UP_TO,
    BrokerOutage,
    DeviceView,
    Freshness,
)
from gateway.fleet_sync.report_age import ClocklessAge
from tidegate.fleet.conditions import UNTOLD
from tidegate.fleet.messages import Birth, Death, Heartbeat, Inventory, Sequenced, UpMessage, inventory_hash
from tidegate.fleet.offers import ModelOffer
from tidegate.fleet.reported import Reported
from tidegate.types import LoadReport

MAX_AHEAD: Final = 32


@dataclass(frozen=True, slots=True)
class _DeathRecord:
    death: Death
    at: float
    heartbeat_sequence: int  # the newest of that epoch when the note came; a newer one refutes a will


@dataclass(frozen=True, slots=True)
class _DataPlaneEvidence:
    """The data plane's own register: the device answered us."""

    epoch: int
    sequence: int
    at: float
    load: LoadReport | None


class DeviceRegister:
    """Mutable; every `fold_*` returns whether it was news."""

    __slots__ = (
        "_age", "_ahead", "_death", "_evidence", "_heard_before", "_heartbeat", "_heartbeat_at", "_inventory",
        "_inventory_hash", "_link_lost", "birth", "first_seen_at", "mismatches", "name",
        "reported",
    )  # fmt: skip

    def __init__(self, name: str, now: float) -> None:
        self.name = name
        self.first_seen_at = now
        self.birth: Birth | None = None
        self.reported: Reported | None = None
        self.mismatches = 0  # heartbeats in a row that speak of an inventory that we don't have
        self._death: _DeathRecord | None = None
        self._ahead: dict[tuple[int, type[Sequenced]], tuple[Heartbeat | Inventory, float, bool]] = {}
        self._evidence: _DataPlaneEvidence | None = None
        self._link_lost: tuple[float, int] | None = None  # (when, newest heartbeat then)
        self._age = ClocklessAge()
        self._heard_before: float | None = None  # when it was last heard live in an earlier session
        self._begin_session()

    def _begin_session(self) -> None:
        if self._age.said_at is not None:
            self._heard_before = self._age.said_at
        self._age = ClocklessAge()
        self._heartbeat: Heartbeat | None = None
        self._heartbeat_at = -inf
        self._inventory: Inventory | None = None
        self._inventory_hash: str | None = None
        self._link_lost = None
        self.mismatches = 0

    @property
    def epoch(self) -> int:
        """The epoch that was born; 0 before any birth."""
        return self.birth.epoch if self.birth else 0

    @property
    def known_epoch(self) -> int:
        """The greatest epoch that a birth or a death named."""
        return max(self.epoch, self._death.death.epoch if self._death else 0)

    @property
    def has_newer_than_birth(self) -> bool:
        """Messages wait for a birth that has not come."""
        return bool(self._ahead)

    @property
    def misses_inventory(self) -> bool:
        return self.mismatches > 2

    # -- control plane ---------------------------------------------------------------------------------------------

    def fold(self, message: UpMessage, now: float, *, retained: bool) -> bool:
        match message:
            case Birth():
                return self._fold_birth(message, now, retained=retained)
            case Death():
                return self._fold_death(message, now)
            case Reported():
                return self._fold_reported(message)
        if message.epoch > self.epoch:
            return self._wait_for_birth(message, now, retained=retained)
        return message.epoch == self.epoch and self._fold_state(message, now, retained=retained)

    def _fold_birth(self, birth: Birth, now: float, *, retained: bool) -> bool:
        if birth.epoch < self.epoch:
            return False
        if birth.epoch > self.epoch:
            self._begin_session()
        self._hear(birth, now, retained=retained)
        if self.birth is not None and _rank(birth) <= _rank(self.birth):
            return False
        self.birth = birth
        self._inventory_hash = None
        self._fold_waiting()
        return True

    def _fold_waiting(self) -> None:
        for key in sorted(self._ahead, key=lambda key: (key[0], key[1].__name__)):
            if key[0] <= self.epoch:
                message, at, retained = self._ahead.pop(key)
                if key[0] == self.epoch:
                    self._fold_state(message, at, retained=retained)

    def _fold_death(self, death: Death, now: float) -> bool:
        known = self._death.death if self._death else None
        if known and (death.epoch, death.is_own_word, death.reason) <= (known.epoch, known.is_own_word, known.reason):
            return False
        self._death = _DeathRecord(death, now, self._newest_heartbeat_of(death.epoch))
        return death.epoch >= self.epoch

    def _fold_reported(self, reported: Reported) -> bool:
        held = self.reported
        if held is not None and (reported.epoch, reported.sequence) <= (held.epoch, held.sequence):
            return False
        self.reported = reported
        return True

    def _newest_heartbeat_of(self, epoch: int) -> int:
        waiting = self._ahead.get((epoch, Heartbeat))
        held = self._heartbeat if epoch == self.epoch else None
        return max(waiting[0].sequence if waiting else 0, held.sequence if held else 0)

    def _wait_for_birth(self, message: Heartbeat | Inventory, now: float, *, retained: bool) -> bool:
        """Keep the newest of each (epoch, topic); of too many epochs, the greatest."""
        key = (message.epoch, type(message))
        held = self._ahead.get(key)
        if held is not None and message.sequence <= held[0].sequence:
            return False
        self._ahead[key] = (message, now, retained)
        if len(self._ahead) > MAX_AHEAD:
            del self._ahead[min(self._ahead, key=lambda key: key[0])]
        return False  # nothing to see yet

    def _fold_state(self, message: Heartbeat | Inventory, now: float, *, retained: bool) -> bool:
        self._hear(message, now, retained=retained)
        if isinstance(message, Inventory):
            return self._fold_inventory(message)
        if self._heartbeat is not None and message.sequence <= self._heartbeat.sequence:
            return False
        self._heartbeat, self._heartbeat_at = message, now
        agrees = message.inventory == self._known_inventory_hash()
        self.mismatches = 0 if agrees else self.mismatches + 1
        return True

    def _fold_inventory(self, inventory: Inventory) -> bool:
        if self._inventory is not None and inventory.sequence <= self._inventory.sequence:
            return False
        before = self.offers
        self._inventory, self._inventory_hash = inventory, None
        if self._heartbeat is not None and self._heartbeat.inventory == self._known_inventory_hash():
            self.mismatches = 0
        return self.offers != before

    def _known_inventory_hash(self) -> str:
        """Hashed once per inventory, so that a heartbeat costs a comparison."""
        if self._inventory_hash is None:
            self._inventory_hash = inventory_hash(self.offers)
        return self._inventory_hash

    def _hear(self, message: Sequenced, now: float, *, retained: bool) -> None:
        # What the broker kept says that the device was, not that it is.
        if not retained:
            self._age.record(message.mono_ms / 1000.0, now)

    # -- data plane ------------------------------------------------------------------------------------------------

    def answered(self, epoch: int, sequence: int, load: LoadReport | None, now: float) -> bool:
        """The device itself answered over the data plane, by the same (epoch, sequence) rule."""
        if epoch < self.epoch or (
            self._evidence and (epoch, sequence) <= (self._evidence.epoch, self._evidence.sequence)
        ):
            return False
        self._evidence = _DataPlaneEvidence(epoch, sequence, now, load)
        self._link_lost = None
        return True

    def link_alive(self, now: float) -> bool:
        """A sign of life without a report, such as a pong: prolongs what `answered` said."""
        if self._evidence is None:
            return False
        held = self._evidence
        self._evidence = _DataPlaneEvidence(held.epoch, held.sequence, now, held.load)
        self._link_lost = None
        return True

    def link_lost(self, now: float) -> bool:
        """The data plane saw the device go: no evidence speaks for it, and a heartbeat must speak first."""
        held = self._evidence
        self._evidence = _DataPlaneEvidence(held.epoch, held.sequence, -inf, held.load) if held else None
        self._link_lost = (now, self._heartbeat.sequence if self._heartbeat else 0)
        return True

    # -- view ------------------------------------------------------------------------------------------------------

    @property
    def offers(self) -> tuple[ModelOffer, ...]:
        if self._inventory is not None and (self.birth is None or self._inventory.revision >= self.birth.revision):
            return self._inventory.offers
        return self.birth.offers if self.birth else ()

    def view(self, now: float, outage: BrokerOutage, will_grace_s: float) -> DeviceView | None:
        """None before a birth: such a device has no known address."""
        if self.birth is None:
            return None
        freshness, reason = self.freshness(now, outage, will_grace_s)
        return DeviceView(
            name=self.name,
            epoch=self.epoch,
            urls=self.birth.urls,
            offers=self.offers,
            load=self._load(),
            freshness=freshness,
            age_s=max(0.0, now - self._last_sign_at()),
            reason=reason,
            accepting=(self._heartbeat or self.birth).admission == "open",
            agent=self.birth.agent,
            conditions=self._heartbeat.conditions if self._heartbeat else UNTOLD,
            reported=self.reported,
        )

    def freshness(self, now: float, outage: BrokerOutage, will_grace_s: float) -> tuple[Freshness, str]:
        """The class of the module's table, with its reason."""
        departed = self._departed()
        if departed:
            return Freshness.DEAD, departed
        freshness, reason = self._by_control_plane(now, outage, will_grace_s)
        if freshness in (Freshness.SUSPECT, Freshness.DEAD) and self._answers(now):
            return Freshness.CONTROL_LOST, f"answers requests, though {reason}"
        return freshness, reason

    def _departed(self) -> str:
        """The device's own goodbye; only a greater epoch, by any path, takes it back."""
        note = self._death
        if note is None or not note.death.is_own_word or note.death.epoch < self.epoch:
            return ""
        newer = self._evidence is not None and self._evidence.epoch > note.death.epoch
        return "" if newer else f"said goodbye: {note.death.reason}"

    def _by_control_plane(self, now: float, outage: BrokerOutage, will_grace_s: float) -> tuple[Freshness, str]:
        silence, reason = self._by_silence(now, outage)
        will_at = self._will_at()
        if silence is Freshness.DEAD or (will_at is not None and now - will_at >= will_grace_s):
            return Freshness.DEAD, reason if will_at is None else "its last will came"
        if will_at is not None:
            return Freshness.SUSPECT, "its last will came"
        if self._link_lost is not None and self._sequence() <= self._link_lost[1]:
            return Freshness.SUSPECT, "its data link broke"
        return silence, reason

    def _will_at(self) -> float | None:
        """When a last will that nothing has refuted arrived."""
        note = self._death
        if note is None or note.death.is_own_word or note.death.epoch < self.epoch:
            return None
        refuted = note.death.epoch == self.epoch and self._sequence() > note.heartbeat_sequence
        return None if refuted else note.at

    def _by_silence(self, now: float, outage: BrokerOutage) -> tuple[Freshness, str]:
        heard_at = self._last_heard_at()
        intervals = _silent_s(heard_at, now, outage) / self._interval_s()
        if intervals > SUSPECT_UP_TO:
            return Freshness.DEAD, f"silent for {now - heard_at:.1f} s"
        if self._heard_live_at() is None:
            return Freshness.SUSPECT, "known by retained messages only"
        if intervals > STALE_UP_TO:
            return Freshness.SUSPECT, f"silent for {now - heard_at:.1f} s"
        if outage.excuses(heard_at, now):
            return Freshness.CONTROL_LOST, "not heard since this gateway lost the broker"
        if intervals > FRESH_UP_TO:
            return Freshness.STALE, f"silent for {now - heard_at:.1f} s"
        return Freshness.FRESH, ""

    def _answers(self, now: float) -> bool:
        held = self._evidence
        return held is not None and held.epoch >= self.epoch and now - held.at <= STALE_UP_TO * self._interval_s()

    def _sequence(self) -> int:
        return self._heartbeat.sequence if self._heartbeat else 0

    def _interval_s(self) -> float:
        latest = self._heartbeat or self.birth
        return latest.interval_ms / 1000.0 if latest else 1.0

    def _heard_live_at(self) -> float | None:
        said_at = self._age.said_at
        return self._heard_before if said_at is None else said_at

    def _last_heard_at(self) -> float:
        heard_at = self._heard_live_at()
        return self.first_seen_at if heard_at is None else heard_at

    def _last_sign_at(self) -> float:
        return max(self._last_heard_at(), self._evidence.at if self._evidence else -inf)

    def _load(self) -> LoadReport | None:
        """The newest by whichever path: the greater epoch first, then the later arrival."""
        held = self._evidence
        beat = self._heartbeat
        if held is not None and held.load is not None and held.epoch >= self.epoch and held.at >= self._heartbeat_at:
            return held.load
        if beat is None:
            return None
        return LoadReport(beat.epoch, beat.sequence, beat.queued, beat.in_flight, beat.queue_delay_ms / 1000.0)

    def next_change_at(self, now: float, outage: BrokerOutage, will_grace_s: float) -> float | None:
        """The next instant at which the view changes if nothing more is heard; None when it will not."""
        moments = self._silence_moments(now, outage)
        if self._death is not None:
            moments.append(self._death.at + will_grace_s)
        if self._evidence is not None:
            moments.append(self._evidence.at + STALE_UP_TO * self._interval_s())
        return min((moment + JUST_AFTER_S for moment in moments if moment + JUST_AFTER_S > now), default=None)

    def _silence_moments(self, now: float, outage: BrokerOutage) -> list[float]:
        heard_at, interval_s = self._last_heard_at(), self._interval_s()
        silent_s = _silent_s(heard_at, now, outage)
        # The clock of silence stands still while the outage excuses it.
        starts_at = max(now, outage.over_at) if outage.excuses(heard_at, now) else now
        limits = (FRESH_UP_TO * interval_s, STALE_UP_TO * interval_s, SUSPECT_UP_TO * interval_s)
        return [starts_at + limit - silent_s for limit in limits if limit >= silent_s and starts_at < inf]

    def __repr__(self) -> str:
        death = self._death.death.epoch if self._death else 0
        ahead = len(self._ahead)
        return f"<DeviceRegister {self.name} born {self.epoch} died {death} heartbeat {self._sequence()} ahead {ahead}>"


def _silent_s(since: float, now: float, outage: BrokerOutage) -> float:
    return now - since - outage.excused_s(since, now)


def _rank(birth: Birth) -> tuple[int, int, str]:
    # `boot` only settles, the same way everywhere, which of two claimants of one epoch shows until a hint parts them.
    return birth.epoch, birth.sequence, birth.boot
