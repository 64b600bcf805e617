"""The drain pacer limits how fast a device sends its stored entries: in trains, with a pause after each train.

A device that comes back after ten hours has a long backlog and one thin uplink, which live traffic uses too. Pacing by
an estimate of the uplink needs an estimate; pacing by duty cycle does not. A train of entries is sent at once; from its
first entry to its last receipt it has kept the uplink (and the gateway's disk) busy for at most that long; then comes a
pause in proportion. So whatever the link is, at most `share` of it is used, on average over a train and its pause:

    pause = train x (1 / share - 1)            share 50 %, while live requests are about: 10 %

Only the size of a train is learned: bytes that take about TRAIN_S, by what the last trains carried a second, so that a
live message never waits for long behind one. The number of entries is adaptive too, from 8 to 32: it
grows by a quarter while trains are quick and halves when one is slow or is not acknowledged.

Entries of one key are sent in order, and may share a train: a topic of MQTT keeps its order within a session, there is
one train at a time, and the lost part of it is sent again in order. A refused entry waits, and holds up only the
entries behind it under its key; a busy gateway makes all wait.

The machine takes sessions, sendings and receipts, and returns how much may be sent now. It begins with the session,
not with a timer. It can be wrong where receipts are slow for another reason than the link: then it is slower, never
faster.

Source: docs/design/edge-state.md, "Draining the backlog"; NanoMQ #2423 (nothing was sent until the next publish).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Final, NamedTuple, Protocol, TypeVar

MIN_WINDOW: Final = 8
MAX_WINDOW: Final = 32
SHARE: Final = 0.5
LIVE_SHARE: Final = 0.1
TRAIN_S: Final = 0.5
FIRST_BYTES: Final = 32_768  # of the first train of a session, before its rate is known
MIN_BYTES: Final = 2_048
MAX_BYTES: Final = 1_048_576
MIN_PAUSE_S: Final = 0.01
MOST_BUSY_S: Final = 300.0
LIVE_PAUSE_S: Final = 60.0  # live requests lengthen a pause up to this: a busy device drains slowly, but does
RECEIPT_S: Final = 15.0  # without a receipt for this long, an entry is sent again
REFUSED_S: Final = 2.0  # doubled with each refusal
MOST_REFUSED_S: Final = 60.0


class SendBudget(NamedTuple):
    """The entries and bytes that may be sent at once."""

    entries: int
    size_bytes: int


class SizedEntry(Protocol):
    """The part of a stored entry on which the choice depends."""

    @property
    def id(self) -> str: ...

    @property
    def key(self) -> str: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def attempts(self) -> int:
        """How often the entry was refused already."""
        ...


EntryT = TypeVar("EntryT", bound=SizedEntry)


class _UnsettledEntry(NamedTuple):
    key: str
    at: float
    attempts: int


@dataclass(slots=True)
class DrainPacer:
    """Mutable. `choose` from what waits, `sent` each, `settled` by receipts."""

    share: float = SHARE
    live_share: float = LIVE_SHARE
    window: int = MIN_WINDOW
    train_bytes: int = FIRST_BYTES
    rate_bytes_s: float = 0.0  # measured over the last trains, smoothed; 0: not known yet
    trains: int = 0
    _up: bool = False
    _under_way: dict[str, _UnsettledEntry] = field(default_factory=dict)
    _train_began_at: float = 0.0
    _train_bytes_sent: int = 0
    _pause_until: float = -inf
    _not_before: dict[str, float] = field(default_factory=dict)  # refused entries

    @property
    def under_way(self) -> frozenset[str]:
        return frozenset(self._under_way)

    def held_back(self, now: float) -> frozenset[str]:
        """Entries that were refused and whose time has not come again."""
        self._not_before = {id: at for id, at in self._not_before.items() if at > now}
        return frozenset(self._not_before)

    def begin(self, now: float) -> None:
        """Begin a session with a gateway that takes entries: the first train may go at once."""
        self._up, self._under_way, self._pause_until = True, {}, now
        self.window, self.train_bytes, self.rate_bytes_s = MIN_WINDOW, FIRST_BYTES, 0.0

    def end(self) -> None:
        """End the session; entries under way may or may not have arrived, and are sent again."""
        self._up, self._under_way = False, {}

    def budget(self, now: float, *, live: bool) -> SendBudget | None:
        """What may be sent now; None: nothing.

        Args:
            live: whether requests are being answered.
        """
        if not self._up:
            return None
        if self._under_way:
            if now - max(one.at for one in self._under_way.values()) < RECEIPT_S:
                return None
            self._train_was_lost(now, live)
        return None if now < self._pause_until else SendBudget(self.window, self.train_bytes)

    def choose(self, waiting: Iterable[EntryT], budget: SendBudget, now: float) -> list[EntryT]:
        """The next train, in this order and within the budget, but at least one entry however large it is."""
        held = {one.key for one in self._under_way.values() if one.key}
        chosen: list[EntryT] = []
        size = 0
        for entry in waiting:
            if entry.key in held or entry.id in self._under_way:
                continue
            if self._not_before.get(entry.id, -inf) > now:
                held.update([entry.key] if entry.key else [])
                continue
            if chosen and (len(chosen) >= budget.entries or size + entry.size_bytes > budget.size_bytes):
                break
            chosen.append(entry)
            size += entry.size_bytes
        return chosen

    def sent(self, entry: SizedEntry, now: float) -> None:
        if not self._under_way:
            self._train_began_at, self._train_bytes_sent = now, 0
        self._under_way[entry.id] = _UnsettledEntry(entry.key, now, entry.attempts)
        self._train_bytes_sent += entry.size_bytes

    def settled(self, ids: Iterable[str], now: float, *, live: bool) -> None:
        """Record that a receipt named these entries, taken or not."""
        before = len(self._under_way)
        for id in ids:
            self._under_way.pop(id, None)
        if before and not self._under_way:
            self._train_arrived(now, live)

    def refused(self, id: str, now: float) -> None:
        """Record that an entry was not taken; call it before `settled` for the receipt that names the entry."""
        sent = self._under_way.get(id)
        if sent is not None:
            self._not_before[id] = now + min(MOST_REFUSED_S, REFUSED_S * 2.0 ** min(sent.attempts, 10))

    def busy(self, for_s: float, now: float) -> None:
        """Record that the gateway takes nothing for a while; entries under way were not taken."""
        self._under_way = {}
        self._pause_until = max(self._pause_until, now + min(for_s, MOST_BUSY_S))

    def next_wake(self, now: float) -> float | None:
        """When to call `budget` again, if nothing happens before."""
        if not self._up:
            return None
        if self._under_way:
            return max(one.at for one in self._under_way.values()) + RECEIPT_S
        if now < self._pause_until:
            return self._pause_until
        return min((at for at in self._not_before.values() if at > now), default=None)

    def _train_arrived(self, now: float, live: bool) -> None:
        took_s = max(1e-4, now - self._train_began_at)
        rate = self._train_bytes_sent / took_s
        self.rate_bytes_s = rate if not self.rate_bytes_s else 0.7 * self.rate_bytes_s + 0.3 * rate
        self.train_bytes = round(min(MAX_BYTES, max(MIN_BYTES, self.rate_bytes_s * TRAIN_S)))
        if took_s > 2.0 * TRAIN_S:
            self.window = max(MIN_WINDOW, self.window // 2)
        else:
            self.window = min(MAX_WINDOW, self.window + self.window // 4)
        self._pause(took_s, now, live)

    def _train_was_lost(self, now: float, live: bool) -> None:
        self._under_way = {}
        self.window, self.train_bytes = MIN_WINDOW, max(MIN_BYTES, self.train_bytes // 2)
        self._pause(now - self._train_began_at, now, live)

    def _pause(self, took_s: float, now: float, live: bool) -> None:
        self.trains += 1
        pause_s = max(MIN_PAUSE_S, took_s * (1.0 / self.share - 1.0))
        if live:
            pause_s = max(pause_s, min(LIVE_PAUSE_S, took_s * (1.0 / self.live_share - 1.0)))
        self._pause_until = now + pause_s

    def __repr__(self) -> str:
        state = f"{len(self._under_way)} under way" if self._up else "no session"
        return f"<DrainPacer {state}, window {self.window}, {self.train_bytes} bytes a train, {self.trains} trains>"
