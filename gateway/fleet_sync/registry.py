"""The fleet as MQTT reports it: every message of every device folded into one view, in any order.

`fold` takes one message and returns what the gateway should do about it; `devices` is the view that placement reads.
The rules of one device are in `device.py`; this file is about the fleet: whose message is it, may it be believed, is
there room, and what must be asked again.

Anti-entropy instead of storms. A gateway that notices a gap (a heartbeat of a session whose birth it never saw, or of
an inventory with another hash, more than twice) asks that one device for a `Resync`, after a random part of two seconds
and from a token bucket for the whole fleet, filled by a hundredth of the fleet a second. So the worst case, a broker
that lost everything under a thousand devices, costs a steady trickle. A restarted gateway asks no device: births,
deaths and inventories are retained.

Epochs that went backwards. A device whose disk was wiped while its clock says 1970 comes back with a lower epoch than
the fleet remembers, and would never be believed again. Its next live message earns it an `EpochHint`: reconnect with at
least this epoch. The hint names the session that it is about, so a late message of a past session earns a hint that
its device ignores. Two agents that claim one epoch are parted in the same way: every live message in such an epoch
earns its sender a hint, since only births say which of the two it is.

Two agents of one name take its session from each other. Which one keeps it is decided in
`gateway/core/fleet/name_claims.py`; nothing of the other is folded, and every live message of it earns it a
`NameTaken`. Neither rests on one message: a command that is lost, or that comes to the other agent because that has
just taken the session, is said again for as long as there is a reason.

Invariants: a topic's device is the payload's device or the message is dropped; devices, waiting messages and effects
are bounded; the cost of a fold does not depend on the size of the fleet (`test_merge` counts).
It leaves the sending, the delays and the clock to `sync.py`.

Source: Shapiro et al., "Conflict-free Replicated Data Types", SSS 2011 (registers as maxima); Sparkplug 3.0 §5 (birth
and death with a sequence), whose single-state topic and rebirth storms this avoids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Final

from gateway.core.fleet.name_claims import NameClaim, NameClaims, NameConflict
from gateway.fleet_sync.changes import PendingChanges
from gateway.fleet_sync.device import DeviceRegister
from gateway.fleet_sync.freshness import BrokerOutage, DeviceView, Freshness
from tidegate.fleet.messages import MAX_EPOCH, BadMessage, Birth, Death, UpMessage, decode_up
from tidegate.fleet.reported import Reported
from tidegate.fleet.topics import DeviceTopic, Topics
from tidegate.types import LoadReport

RESYNC_JITTER_S: Final = 2.0
RESYNC_GAP_S: Final = 5.0  # per device; a lost answer is asked for again after this
HINT_GAP_S: Final = 1.0
SWEEP_GAP_S: Final = 1.0
EFFECTS_RATIO: Final = 0.01  # of the fleet, asked in a second: whatever its size, it is whole in some two minutes


@dataclass(frozen=True, slots=True)
class Resync:
    """Ask the device for its birth and inventory again, at `at`."""

    device: str
    at: float
    reason: str


@dataclass(frozen=True, slots=True)
class EpochHint:
    """Hint to the device that its session `seen` (of `boot`, if known) is not believed: begin one from `minimum` on."""

    device: str
    at: float
    seen: int
    boot: str
    minimum: int


@dataclass(frozen=True, slots=True)
class NameTaken:
    """Say to the agent of session `seen` that another agent keeps the device's name, so that it stands down."""

    device: str
    at: float
    seen: int
    boot: str
    reason: str


Effect = Resync | EpochHint | NameTaken


class _EffectBudget:
    """So many effects a second as each taking says, and a burst of twice as many."""

    __slots__ = ("_at", "_level")

    def __init__(self) -> None:
        self._level = inf
        self._at = -inf

    def take(self, now: float, per_s: float) -> bool:
        passed_s = max(0.0, now - self._at) if self._at > -inf else 0.0
        self._level = min(max(1.0, 2.0 * per_s), self._level + passed_s * per_s)
        self._at = now
        if self._level < 1.0:
            return False
        self._level -= 1.0
        return True


class FleetRegister:
    """Mutable: the fold of everything heard so far.

    Args:
        topics: of the fleet whose messages are folded; others are ignored.
        draw: chance, uniform in [0, 1).
        max_devices: how many names are remembered. Beyond, a new one is taken only in a dead one's place.
        effects_per_s: rate of resyncs and hints over a fleet of up to 500, of a larger one the hundredth part of its
            devices; more heals faster and costs more messages.
        will_grace_s: how long a last will may be refuted by a heartbeat before it is believed.
        reconnect_grace_s: how long after this gateway's own outage devices may need to come back: their backoff's cap.
        allow_url: whether a device may claim this address; a birth with any other is refused.
        claims: of devices' names, shared with the port that devices dial.
    """

    def __init__(
        self,
        topics: Topics,
        *,
        draw: Callable[[], float],
        max_devices: int = 16384,
        effects_per_s: float = 5.0,
        will_grace_s: float = 2.0,
        reconnect_grace_s: float = 30.0,
        allow_url: Callable[[str], bool] = lambda url: True,
        claims: NameClaims | None = None,
    ) -> None:
        self.claims = NameClaims() if claims is None else claims
        self.counts: Counter[str] = Counter()  # what became of the messages, by reason
        # By device that refuses its own file of settings: since when, and why.
        self.refused_files: dict[str, tuple[float, str]] = {}
        self._topics = topics
        self._draw = draw
        self._max_devices = max_devices
        self._will_grace_s = will_grace_s
        self._reconnect_grace_s = reconnect_grace_s
        self._allow_url = allow_url
        self._effects_per_s = effects_per_s
        self._tokens = _EffectBudget()
        self._outage = BrokerOutage()
        self._devices: dict[str, DeviceRegister] = {}
        self._changes = PendingChanges()
        self._doubted: set[str] = set()  # whose view, as it was last taken, is of no use
        self._asked_at: dict[tuple[type[Effect], str], float] = {}
        self._shared_epochs: dict[str, int] = {}  # by device, the newest that two agents have claimed
        self._sweep_from = -inf

    # -- control plane ---------------------------------------------------------------------------------------------

    def fold(self, topic: str, payload: bytes, now: float, *, retained: bool = False) -> list[Effect]:
        """Take in one message; what should be sent because of it.

        Args:
            retained: the broker kept it for later subscribers, so it says nothing about now.
        """
        parsed = self._topics.parse_up(topic)
        if parsed is None:
            self.counts["foreign_topic"] += 1
            return []
        name, kind = parsed
        if not payload:
            return self._forget(name, kind)
        try:
            message = decode_up(kind, payload)
        except BadMessage:
            self.counts["bad_payload"] += 1
            return []
        device = self._admit(name, message, now)
        return [] if device is None else self._fold_into(device, message, now, retained=retained)

    def _note_refused_file(self, reported: Reported, now: float) -> None:
        words = reported.configuration.file if reported.configuration is not None else ""
        if words:
            since, _ = self.refused_files.get(reported.device, (now, ""))
            self.refused_files[reported.device] = since, words
        else:
            self.refused_files.pop(reported.device, None)

    def _forget(self, name: str, kind: DeviceTopic) -> list[Effect]:
        """An empty retained birth is how an operator deletes a device; a live one's next heartbeat asks it back."""
        if kind is DeviceTopic.BIRTH and self._devices.pop(name, None) is not None:
            self.counts["forgotten"] += 1
            self._changes.forget(name)
            self.claims.forget(name)
            self.refused_files.pop(name, None)
            self._shared_epochs.pop(name, None)
            for effect in (Resync, EpochHint, NameTaken):
                self._asked_at.pop((effect, name), 0.0)
        return []

    def _admit(self, name: str, message: UpMessage, now: float) -> DeviceRegister | None:
        if message.device != name:
            self.counts["wrong_device"] += 1
            return None
        if isinstance(message, Birth) and not all(map(self._allow_url, message.urls)):
            self.counts["foreign_url"] += 1
            return None
        device = self._devices.get(name)
        if device is None and self._has_room(now):
            device = self._devices[name] = DeviceRegister(name, now)
        if device is None:
            self.counts["no_room"] += 1
        return device

    def _has_room(self, now: float) -> bool:
        """Whether one more fits; when full, the dead make room, looked for at most once a second."""
        if len(self._devices) >= self._max_devices and now >= self._sweep_from:
            self._sweep_from = now + SWEEP_GAP_S
            for name in [name for name, device in self._devices.items() if self._is_dead(device, now)]:
                self._forget(name, DeviceTopic.BIRTH)
        return len(self._devices) < self._max_devices

    def _is_dead(self, device: DeviceRegister, now: float) -> bool:
        return device.freshness(now, self._outage, self._will_grace_s)[0] is Freshness.DEAD

    def _fold_into(self, device: DeviceRegister, message: UpMessage, now: float, *, retained: bool) -> list[Effect]:
        known_epoch, before = device.known_epoch, device.birth
        if isinstance(message, Birth) and (
            message.epoch >= device.epoch or self.claims.must_hear(device.name, message.boot)
        ):
            conflict = self._claim(message, now, retained=retained)
            if conflict is not None:
                return self._name_taken(message, conflict, now)
        refused = self.claims.refused_by(device.name, message.epoch)
        if refused is not None:
            return [] if retained else self._refused_speaks(message, refused, now)
        news = device.fold(message, now, retained=retained)
        self.counts["folded" if news else "nothing_new"] += 1
        if news and isinstance(message, Reported):
            self._note_refused_file(message, now)
        self._look_again(device, now)
        if retained or isinstance(message, Death):
            return []
        if message.epoch < known_epoch:
            self.counts["stale_epoch"] += 1
            return self._hint(device, message, known_epoch, now)
        if isinstance(message, Birth) and before and message.epoch == before.epoch and message.boot != before.boot:
            self._shared_epochs[device.name] = message.epoch
        if self._shared_epochs.get(device.name) == message.epoch:
            return self._hint(device, message, known_epoch, now)
        return self._resync(device, now)

    def _hint(self, device: DeviceRegister, message: UpMessage, known_epoch: int, now: float) -> list[Effect]:
        if not self._may_ask(EpochHint, device.name, HINT_GAP_S, now):
            return []
        boot = message.boot if isinstance(message, Birth) else ""
        return [EpochHint(device.name, now, seen=message.epoch, boot=boot, minimum=min(known_epoch + 1, MAX_EPOCH))]

    def _claim(self, birth: Birth, now: float, *, retained: bool) -> NameConflict | None:
        claim = NameClaim(birth.boot, birth.epoch, ", ".join(birth.urls[:2]), now - birth.mono_ms / 1e3)
        if retained:
            self.claims.remembered(birth.device, claim)
            return None
        return self.claims.claim(birth.device, claim, now)

    def _refused_speaks(self, message: UpMessage, conflict: NameConflict, now: float) -> list[Effect]:
        """Tell it again; and ask for its birth, since the kept agent may have come to the same epoch unheard."""
        effects = self._name_taken(message, conflict, now)
        if effects and self._may_ask(Resync, message.device, RESYNC_GAP_S, now):
            effects.append(
                Resync(message.device, now + self._draw() * RESYNC_JITTER_S, "which agent speaks is not known")
            )
        return effects

    def _name_taken(self, message: UpMessage, conflict: NameConflict, now: float) -> list[Effect]:
        self.counts["name_taken"] += 1
        if isinstance(message, Death) or not self._may_ask(NameTaken, message.device, HINT_GAP_S, now):
            return []
        boot, reason = conflict.refused.boot, conflict.refusal(now)
        return [NameTaken(message.device, now, seen=message.epoch, boot=boot, reason=reason)]

    def _resync(self, device: DeviceRegister, now: float) -> list[Effect]:
        reason = self._gap(device)
        if not reason or not self._may_ask(Resync, device.name, RESYNC_GAP_S, now):
            return []
        return [Resync(device.name, now + self._draw() * RESYNC_JITTER_S, reason)]

    def _gap(self, device: DeviceRegister) -> str:
        if device.has_newer_than_birth:
            return "its birth is missing"
        return "its inventory is missing" if device.misses_inventory else ""

    def _may_ask(self, effect: type[Effect], name: str, gap_s: float, now: float) -> bool:
        if now - self._asked_at.get((effect, name), -inf) < gap_s:
            return False
        if not self._tokens.take(now, max(self._effects_per_s, EFFECTS_RATIO * len(self._devices))):
            return False
        self._asked_at[effect, name] = now
        self.counts["asked"] += 1
        return True

    def is_wanted(self, effect: Effect) -> bool:
        """Whether there is still a reason for an effect, asked when its time has come."""
        device = self._devices.get(effect.device)
        if device is None or not isinstance(effect, Resync):
            return device is not None
        return bool(self._gap(device)) or self.claims.in_conflict(effect.device)

    def control_plane(self, *, up: bool, now: float) -> None:
        """This gateway's own link to the broker went up or down; silence meanwhile says nothing about devices."""
        if up and self._outage.lasts:
            self._outage.end(now, self._reconnect_grace_s)
        elif not up and not self._outage.lasts:
            self._outage.begin(now)
        for device in self._devices.values():
            self._look_again(device, now)

    # -- data plane ------------------------------------------------------------------------------------------------

    def data_plane(self, name: str, epoch: int, sequence: int, load: LoadReport | None, now: float) -> bool:
        """A device that is known over MQTT answered, by (epoch, sequence) of that path; whether this was news."""
        device = self._devices.get(name)
        if device is None or not device.answered(epoch, sequence, load, now):
            return False
        self._clear_suspicion(device, now)
        return True

    def data_plane_alive(self, name: str, now: float) -> bool:
        """A sign of life without a report (a pong) on a path that `data_plane` has reported before."""
        device = self._devices.get(name)
        if device is None or not device.link_alive(now):
            return False
        self._clear_suspicion(device, now)
        return True

    def data_plane_lost(self, name: str, now: float) -> bool:
        """The path broke: until the device sends again, by any path, it is at best SUSPECT."""
        device = self._devices.get(name)
        if device is None:
            return False
        device.link_lost(now)
        self._look_again(device, now)
        return True

    def _clear_suspicion(self, device: DeviceRegister, now: float) -> None:
        """Answers come in by the hundred a second, and change the view of a device that was not believed to live."""
        if device.name in self._doubted or not self._changes.is_timed(device.name):
            self._look_again(device, now)

    # -- view ------------------------------------------------------------------------------------------------------

    def changed(self, now: float, most: int = 256) -> list[tuple[str, DeviceView | None]]:
        """By name, views that may differ from what this returned before, at most so many; empty when there are no more.

        None: it was forgotten, or not yet born. What only the clock has moved on (an age) is no change.
        """
        self.next_wake(now)
        taken = [(name, self.view(name, now)) for name in self._changes.take(most)]
        for name, view in taken:
            (self._doubted.discard if view is None or view.freshness.is_usable else self._doubted.add)(name)
        return taken

    @property
    def unborn(self) -> int:
        """How many are known by heartbeats alone: their births did not come."""
        return sum(device.birth is None and device.has_newer_than_birth for device in self._devices.values())

    def view(self, name: str, now: float) -> DeviceView | None:
        device = self._devices.get(name)
        return None if device is None else device.view(now, self._outage, self._will_grace_s)

    def device(self, name: str) -> DeviceRegister | None:
        """What was folded of one device; None where no message of it was taken in."""
        return self._devices.get(name)

    def devices(self, now: float) -> tuple[DeviceView, ...]:
        """Every device that was ever born, by name; with thousands of them this takes its time."""
        views = (device.view(now, self._outage, self._will_grace_s) for device in self._devices.values())
        return tuple(sorted((view for view in views if view is not None), key=lambda view: view.name))

    def knows(self, name: str) -> bool:
        """Whether a device of this name was ever born."""
        device = self._devices.get(name)
        return device is not None and device.birth is not None

    def next_wake(self, now: float) -> float | None:
        """The next instant at which some device's freshness changes by silence alone."""
        return self._changes.next_at(now, self._next_change_of)

    def _next_change_of(self, name: str, now: float) -> float | None:
        return self._devices[name].next_change_at(now, self._outage, self._will_grace_s)

    def _look_again(self, device: DeviceRegister, now: float) -> None:
        self._changes.mark(device.name)
        self._changes.sooner(device.name, device.next_change_at(now, self._outage, self._will_grace_s))

    def __len__(self) -> int:
        return len(self._devices)

    def __repr__(self) -> str:
        return f"<FleetRegister {self._topics.fleet} {len(self._devices)} devices, {self.counts['folded']} folded>"
