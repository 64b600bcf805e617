"""Connectivity classifies what the device can reach as one of four modes, from evidence of broker and gateways.

    broker   gateway   mode
    ──────   ───────   ────────────
    there    there     ONLINE
    gone     there     CONTROL_LOST   the broker is down, requests still come over links: only news is lost
    there    gone      CLOUD_LOST     no gateway behind the broker: only callers of this device are left
    gone     gone      ISOLATED

Evidence of the broker is a session with it. Evidence of a gateway is anything that only a live one does: an open link
stream, a request, a heartbeat that is not retained. A device without a broker in its configuration misses none: for it
the first column is always "there".

A lost session counts at once, so does a gateway's goodbye, and silence after `SILENT_S` (three of its heartbeats).
Recovery takes PROBES good looks in a row and at least HOLD_S, so that a link that flaps is one change of mode and
not twenty. Looks are the caller's, about once a second; one that comes sooner than PROBE_GAP_S after the last counts
as no second probe.

The mode informs people, callers and the fleet. It changes nothing that computes, in either direction.

Source: docs/design/edge-state.md, "Modes without a network"; KubeEdge #4048 (workloads restarted on reconnect).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Final, get_args

from tidegate.fleet.conditions import Mode

SILENT_S: Final = 15.0
PROBES: Final = 3
HOLD_S: Final = 5.0
PROBE_GAP_S: Final = 0.5

_MODES: Final[dict[tuple[bool, bool], Mode]] = {
    (True, True): "online",
    (False, True): "control-lost",
    (True, False): "cloud-lost",
    (False, False): "isolated",
}


@dataclass(slots=True)
class _PeerSignal:
    """One column of the table."""

    there: bool = False
    good: int = 0  # looks in a row
    since: float = inf  # the first of them
    last_at: float = -inf

    def look(self, good: bool, now: float) -> None:
        if not good:
            self.there, self.good, self.since = False, 0, inf
            return
        if self.good == 0:
            self.since = now
        if self.good == 0 or now - self.last_at >= PROBE_GAP_S:
            self.good += 1
            self.last_at = now
        if self.good >= PROBES and now - self.since >= HOLD_S:
            self.there = True


_FROM_BEST: Final[tuple[Mode, ...]] = get_args(Mode)


@dataclass(frozen=True, slots=True)
class ModeChange:
    """A change of mode: the new mode, the one before, and the reason."""

    mode: Mode
    before: Mode
    why: str

    @property
    def is_worse(self) -> bool:
        """Whether the device reaches less now. At its start it reaches nothing, so that any first change is better."""
        return _FROM_BEST.index(self.mode) > _FROM_BEST.index(self.before)


@dataclass(slots=True)
class Connectivity:
    """Mutable: report signs of life to it, `look` about once a second and whenever a session ends."""

    has_broker: bool = True
    mode: Mode = "isolated"
    since: float = 0.0
    changes: int = 0
    _broker: _PeerSignal = field(default_factory=_PeerSignal)
    _gateway: _PeerSignal = field(default_factory=_PeerSignal)
    _heard_at: dict[str, float] = field(default_factory=dict)  # by gateway; "" is an unnamed gateway

    def __post_init__(self) -> None:
        self._broker.there = not self.has_broker
        self.mode = _MODES[(self._broker.there, False)]

    def heard(self, now: float, gateway: str = "") -> None:
        """Record a sign of life of a gateway."""
        self._heard_at[gateway] = now

    def left(self, gateway: str) -> None:
        """Record that a gateway said goodbye, or that the broker sent its will."""
        self._heard_at.pop(gateway, None)

    def look(self, *, session: bool, links: int, now: float) -> ModeChange | None:
        """Evaluate the evidence now; the change of mode, if there is one.

        Args:
            session: whether there is a session with the broker.
            links: open link streams of gateways.
        """
        self._broker.look(session or not self.has_broker, now)
        if not self.has_broker:
            self._broker.there = True
        self._gateway.look(links > 0 or now - max(self._heard_at.values(), default=-inf) <= SILENT_S, now)
        mode, before = _MODES[(self._broker.there, self._gateway.there)], self.mode
        if mode == before:
            return None
        self.mode, self.since, self.changes = mode, now, self.changes + 1
        return ModeChange(mode, before, self._why(session, links))

    def _why(self, session: bool, links: int) -> str:
        broker = "no broker is configured" if not self.has_broker else f"broker {'there' if session else 'gone'}"
        gateway = f"{links} link streams" if links else "gateway heard" if self._gateway.there else "no gateway heard"
        return f"{broker}, {gateway}"

    def __repr__(self) -> str:
        return f"<Connectivity {self.mode} since {self.since:.1f}, {self.changes} changes>"
