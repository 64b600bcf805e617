"""Whether this device answers what a neighbour asks of it, by its own queue and never at its own callers' cost.

    from one hop only            the frame's path names the neighbour that asks, and nothing else: what came to it from
                                 a gateway or another neighbour is refused, so that no request travels in a circle
    not pinned, no step of a     it has no business here
    sequence, no generation
    few at once                  `max_in_flight` of all neighbours together
    room for its own             at most ROOM_SHARE of the queue is full
    surely in time               predicted to be done, behind everything that waits, within MARGIN of what is left

An admitted request has the last level of priority, so that own callers' requests go before it while it waits. A
computation that has begun is not interrupted: an own request waits for the rest of it at most, once for each slot.

It can be wrong where its cost is predicted too low; own requests are then late by the difference.

Pure.
"""

from __future__ import annotations

from typing import Final

import msgspec

from tidegate.fleet.topics import is_name
from tidegate.outcome import DeadlineExceeded, InvalidRequest, NotSupported, Overloaded
from tidegate.types import TargetId

MARGIN: Final = 0.5  # of the budget that is left: the answer travels back, and own callers come in between
ROOM_SHARE: Final = 0.5
AGAIN_S: Final = 0.1  # after which a neighbour may ask again where there was no room


class NeighbourRequest(msgspec.Struct, frozen=True):
    """What is known of a request when it is decided about."""

    asker: str  # "edge/NAME", as it has proven
    path: tuple[str, ...]  # through which it came, as the frame says
    pin: str
    is_step: bool  # of a sequence
    generates: bool
    left_s: float  # of its budget
    finish_s: float | None  # predicted, until it would be done here; None: unknown


class OwnLoad(msgspec.Struct, frozen=True):
    """How busy this device is."""

    neighbours: int  # requests of neighbours that are under way
    most_neighbours: int
    queued: int
    most_queued: int


def why_not_neighbour(claimed: str, own: str, *, proven: str | None) -> str:
    """Why a peer may not ask as this neighbour; "" where it may, if the configuration lets it.

    Args:
        claimed: as it says: "edge/NAME".
        own: this device, in the same form.
        proven: whose certificate it showed, in the same form; None: this port has no TLS.
    """
    tier, device = TargetId.parse(claimed)
    if tier != "edge" or not is_name(device):
        return "only devices are neighbours, each by its name, edge/NAME"
    if claimed == own:
        return f"{own} is this device itself"
    if proven is not None and proven != claimed:
        return (
            f"it says that it is {claimed} and shows {f'the certificate of {proven}' if proven else 'no certificate'}"
        )
    return ""


def check_neighbours_request(asked: NeighbourRequest, load: OwnLoad) -> None:
    """Return where the device answers it.

    Raises:
        InvalidRequest: it came through others, or is pinned.
        NotSupported: it is a step of a sequence, or generates.
        Overloaded: there is no room for neighbours now.
        DeadlineExceeded: it is not surely in time.
    """
    if asked.path != (asked.asker,):
        raise InvalidRequest(f"a request that came through {' -> '.join(asked.path) or 'nobody'} is not passed on")
    if asked.pin != "any":
        raise InvalidRequest(
            f"a request pinned to {asked.pin!r} does not leave {asked.asker}, and is not answered here"
        )
    if asked.is_step:
        raise NotSupported("a step of a sequence is answered where the sequence began")
    if asked.generates:
        raise NotSupported("neighbours do not generate for each other: a gateway can be asked")
    if load.neighbours >= load.most_neighbours:
        raise Overloaded(f"{load.neighbours} requests of neighbours are under way", retry_after_s=AGAIN_S)
    if load.queued > ROOM_SHARE * load.most_queued:
        raise Overloaded(
            f"{load.queued} requests wait, and the rest of the queue is for own callers", retry_after_s=1.0
        )
    if asked.finish_s is not None and asked.finish_s > MARGIN * asked.left_s:
        raise DeadlineExceeded(
            f"not surely in time: predicted to be done in {asked.finish_s * 1e3:.0f} ms, and "
            f"{asked.left_s * 1e3:.0f} ms are left"
        )
