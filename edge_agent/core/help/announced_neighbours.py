"""The neighbours that were found over mDNS: a table that is bounded, forgets, and does not follow each flicker.

    heard    its announcement is there, and leads to this address
    gone     it said goodbye, or its announcement is not renewed any more

What is not heard again within KEEP_S is gone: records on the network have their time to live, and the search asks
again as it ends, so KEEP_S bridges the time between. An address that changes, or a device that comes and goes, is
followed once in SETTLE_S; a stream is opened for each change, and whoever sends announcements decides how many there
are. Names that are configured have their places; others share what is left of MOST_NEIGHBOURS, first come, first kept.

Pure; instants are arguments.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple

MOST_NEIGHBOURS: Final = 16  # as many as are asked at all
KEEP_S: Final = 10.0
SETTLE_S: Final = 10.0
_MOST_REMEMBERED: Final = 64  # names that have changed lately, for SETTLE_S


class _Finding(NamedTuple):
    address: str
    heard_at: float


class AnnouncedNeighbours:
    """Mutable: `heard` and `gone` as the network says, then `found`. Args: named: those that have their places."""

    def __init__(self, named: Collection[str] = ()) -> None:
        self._named = frozenset(named)
        self._places: dict[str, _Finding] = {}
        self._changed_at: dict[str, float] = {}

    def heard(self, name: str, address: str, now: float) -> None:
        """Its announcement is there."""
        self._forget(now)
        place = self._places.get(name)
        if place is not None and place.address == address:
            self._places[name] = _Finding(address, now)
        elif now - self._changed_at.get(name, now - SETTLE_S) < SETTLE_S:
            return  # the address of before is kept meanwhile, as long as KEEP_S
        elif place is not None or self._has_room(name):
            self._places[name] = _Finding(address, now)
            self._changed_at[name] = now

    def gone(self, name: str) -> None:
        """It said goodbye."""
        self._places.pop(name, None)

    def found(self, now: float) -> dict[str, str]:
        """Name → HOST:PORT."""
        self._forget(now)
        return {name: place.address for name, place in self._places.items()}

    def _has_room(self, name: str) -> bool:
        if name in self._named:
            return True
        others = sum(one not in self._named for one in self._places)
        return others < MOST_NEIGHBOURS - len(self._named) and len(self._changed_at) < _MOST_REMEMBERED

    def _forget(self, now: float) -> None:
        for name in [one for one, place in self._places.items() if now - place.heard_at > KEEP_S]:
            del self._places[name]
        for name in [one for one, at in self._changed_at.items() if now - at >= SETTLE_S]:
            del self._changed_at[name]

    def __repr__(self) -> str:
        return f"<AnnouncedNeighbours {', '.join(self._places) or 'none'}>"
