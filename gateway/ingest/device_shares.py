"""The shares of devices: what one device may take of a journal's memory of ids, of its room and of its turns.

The ids, the room for promises (deferred requests and their answers) and the time of targets are finite, and an
authenticated device may be broken or hostile. So each is divided by what devices hold, and no device is asked how
important it is compared to others:

    ids         when the memory is full, the device that holds most forgets its oldest
    promises    a device may hold a third of what is free: 1/4 of all if it is alone, 1/(n+3) if n devices are greedy;
                a newcomer always finds as much as they have
    turns       the right of a device first (configured, 0 for all), then the device that waited longest for a turn; the
                priority that a device gives its requests orders them among themselves, and counts up to its right

A device that holds nothing may have one request in whatever room there is.

Source: Choudhury and Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", IEEE/ACM ToN 1998;
Suter et al., "Design Considerations for Supporting TCP with Per-flow Queueing", INFOCOM 1998 (longest queue drop).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

FREE_FOR_ONE: Final = 1 / 3


class WaitingDevice(NamedTuple):
    """A device with due requests: the highest priority that it gave one, its last turn, its oldest request."""

    name: str
    priority: int
    turn: int
    oldest: int


def may_hold(*, held: int, size: int, free: int) -> bool:
    """Whether a device that holds so many bytes of promises may have `size` more, of which `free` are left."""
    if size > free:
        return False
    return held == 0 or held + size <= FREE_FOR_ONE * free


def who_forgets(newcomer: str, held: int, most: tuple[str, int]) -> str:
    """Return the device that forgets an id for one of the newcomer's, which holds so many; `most`: who holds most."""
    return newcomer if held >= most[1] else most[0]


def next_device(waiting: Iterable[WaitingDevice], right_of: Callable[[str], int]) -> WaitingDevice | None:
    """Return the device whose turn it is; None: none waits."""
    return min(waiting, key=lambda one: (-min(one.priority, right_of(one.name)), one.turn, one.oldest), default=None)
