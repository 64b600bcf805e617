"""Peers are the gateways that serve beside this one, as the broker shows them.

    its state       online, with a will: it lives; a state that was retained proves no life for longer than a beat would
    a heartbeat     it lives
    its report      it lives, and this is what is asked of it
    silence         SILENT_S after the last of these it is gone; what a report said holds for FRESH_S
    its own name    from another process, in two sessions within NAMESAKE_S: two gateways were given one name
    no broker       nobody is heard and nobody is known to be gone: the number stays, and nothing that they said holds

So a gateway that loses the broker goes on with the equal part of everything, and the shares still add up.

Bounded: MOST_PEERS names, beyond which a new one is not counted. Pure: `now` does not decrease.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Final, NamedTuple

from gateway.core.peers.demand_terms import DemandTerms
from gateway.core.peers.fair_share import QuotaUse

SILENT_S: Final = 15.0  # three heartbeats
FRESH_S: Final = 2.0  # two reports of a gateway of which nothing is asked
MOST_PEERS: Final = 256
NAMESAKE_S: Final = 60.0


class CloudSpend(NamedTuple):
    """What a gateway spends in the cloud, in pool-seconds a second, and how many times its plain price that costs."""

    spend: float
    factor: float


@dataclass(frozen=True, slots=True)
class PeerReport:
    """What a gateway says of itself.

    `asked`: what its callers ask for and what they get, by quota and by kind, a second ("places": at once).
    `need`: None while it is not known. `cloud`: None without a budget.
    """

    asked: Mapping[str, Mapping[str, QuotaUse]] = field(default_factory=dict)
    need: DemandTerms | None = None
    cloud: CloudSpend | None = None


@dataclass(slots=True)
class _Peer:
    epoch: int = 0
    online: bool = False
    heard_at: float = -inf
    report: PeerReport | None = None
    reported_at: float = -inf

    def live(self, epoch: int, now: float) -> None:
        """Take a sign of life.

        An epoch lower than the last one lives all the same: its clock was set back, or another gateway had its name for
        a while. A broker delivers what one client sends in order, so that of a former life only the will comes late.
        """
        if epoch != self.epoch:
            self.report = None
        self.epoch, self.heard_at = epoch, now


class Peers:
    """Mutable: `connected`, `state`, `namesake` and `report` fold what is heard; the rest reads it.

    Args:
        own: this gateway's name; what is said under it is not about another one.
        expected: how many gateways there are at least, this one included.
    """

    def __init__(self, own: str, expected: int = 1) -> None:
        self._own = own
        self._expected = expected
        self._peers: dict[str, _Peer] = {}
        self._cut_off_at: float | None = None  # since when there has been no broker
        self._namesake_in = 0  # the last session that began with another process's state under this name
        self._namesake_seen_at = -inf
        self._has_namesake = False

    # what is heard

    def connected(self, *, up: bool, now: float) -> None:
        """The session with the broker has begun or ended."""
        if up and self._cut_off_at is not None:
            for peer in self._peers.values():  # each gets the time to be heard again
                peer.heard_at = max(peer.heard_at, now - SILENT_S / 2.0) if peer.online else peer.heard_at
            self._cut_off_at = None
        elif not up and self._cut_off_at is None:
            self._cut_off_at = now

    def state(self, name: str, epoch: int, now: float, *, online: bool) -> None:
        """A gateway came, or went; the goodbye of an earlier one of its name says nothing of the present one."""
        peer = self._of(name)
        if peer is None or (not online and epoch < peer.epoch):
            return
        peer.live(epoch, now)
        peer.online = online
        if not online:
            peer.report = None

    def namesake(self, session: int, now: float) -> None:
        """Take that this session with the broker began with another process's state under this gateway's name.

        That of the first session is a former life of this one. One later session is none yet: a broker that crashed may
        bring back what it had kept before this gateway started.
        """
        if session <= 1 or session == self._namesake_in:
            return
        self._has_namesake = now - self._namesake_seen_at < NAMESAKE_S
        self._namesake_in, self._namesake_seen_at = session, now

    def report(self, name: str, epoch: int, report: PeerReport, now: float) -> None:
        peer = self._of(name)
        if peer is not None:
            peer.live(epoch, now)
            peer.online = True
            peer.report, peer.reported_at = report, now

    def _of(self, name: str) -> _Peer | None:
        """None where nothing is to be taken from it."""
        if name == self._own:
            return None
        peer = self._peers.get(name)
        if peer is None:
            if len(self._peers) >= MOST_PEERS and not self._drop_one_that_is_gone():
                return None
            peer = self._peers[name] = _Peer()
        return peer

    def _drop_one_that_is_gone(self) -> bool:
        gone = next((name for name, one in self._peers.items() if not one.online), None)
        if gone is not None:
            del self._peers[gone]
        return gone is not None

    # what follows

    def count(self, now: float) -> int:
        """How many gateways there are, this one included."""
        return max(self._expected, 1 + len(self._alive(now)))

    def has_namesake(self, now: float) -> bool:
        """Whether another live gateway has this one's name, so that each takes the broker's session from the other."""
        return self._has_namesake and now - self._namesake_seen_at < NAMESAKE_S

    def names(self, now: float) -> list[str]:
        """The others that live."""
        return sorted(self._alive(now))

    def seen(self, now: float) -> list[tuple[str, float | None]]:
        """The others that live, and how long ago each has reported; None: not yet."""
        alive = self._alive(now)
        return [(name, None if one.report is None else now - one.reported_at) for name, one in sorted(alive.items())]

    def reports(self, now: float) -> list[PeerReport]:
        """What the others say, of those of which it is known."""
        return [
            one.report
            for one in self._alive(now).values()
            if one.report is not None and now - one.reported_at <= FRESH_S
        ]

    def report_of(self, name: str, now: float) -> PeerReport | None:
        """What one of the others says; None where it has not said anything lately."""
        one = self._alive(now).get(name)
        return one.report if one is not None and now - one.reported_at <= FRESH_S else None

    def unknown(self, now: float) -> int:
        """How many of the others have not said anything lately."""
        return self.count(now) - 1 - len(self.reports(now))

    def _alive(self, now: float) -> dict[str, _Peer]:
        heard_until = now if self._cut_off_at is None else self._cut_off_at
        return {name: one for name, one in self._peers.items() if one.online and heard_until - one.heard_at < SILENT_S}

    def __repr__(self) -> str:
        return f"<Peers of {self._own}: {', '.join(self._peers) or 'none'}>"
