"""Link events are what a gateway learns from its connections to targets, as values that the fleet view folds.

A link reports six things: it is up (with the other side's name, epoch and offers), it is down (with the reason in
words), a dial after that has failed, the other side's load changed, how long a frame takes there and back, and what its
evidence has shown. Unary targets send the ones they can know.

Between one `LinkUp` and the next `LinkDown` of a target every other event belongs to that connection;
the (epoch, sequence) of a load report orders it with the reports that come over MQTT. Nothing here has a time:
`Fleet.fold` takes its own `now`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gateway.core.fleet.attestation import Attestation
from tidegate.fleet.offers import ModelOffer
from tidegate.types import LoadReport

PathKind = Literal["direct", "dialled out"]  # which side dialled: this gateway, or the device


@dataclass(frozen=True, slots=True)
class LinkUp:
    """The other side said hello: it can be sent requests for what it offers."""

    target_id: str
    name: str  # what it calls itself: "edge/kiosk-1"; the target's own id for a foreign server, which has no hello
    epoch: int
    offers: tuple[ModelOffer, ...]
    path_kind: PathKind = "direct"


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The connection is gone, or the other side is leaving: nothing new; what is under way may be answered."""

    target_id: str
    reason: str
    in_order: bool = False  # it said goodbye


@dataclass(frozen=True, slots=True)
class RedialFailed:
    """It was lost and could not be dialled anew: it is not back in a moment."""

    target_id: str


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """A load report that came without an answer (which has its own in the `Reply`). `offers` None: not changed."""

    target_id: str
    load: LoadReport
    offers: tuple[ModelOffer, ...] | None = None


@dataclass(frozen=True, slots=True)
class LinkRtt:
    """A measured round trip without queue or compute."""

    target_id: str
    rtt_s: float


@dataclass(frozen=True, slots=True)
class LinkAttested:
    """Evidence was verified, or it was not, or counts no more."""

    target_id: str
    attestation: Attestation


LinkEvent = LinkUp | LinkDown | RedialFailed | LinkLoad | LinkRtt | LinkAttested
