"""Help choice decides about a local caller's request: computed here, sent to a peer that helps, or refused here.

    predicted in time here                               here
    predicted late here, and in time at a peer           the peer, while there is time for it
    predicted late here, and nothing better is known     here: the device's own queue decides (`edge_queue.py`)
    begun here, and not answered when it should be       the peer beside it, while there is time for it
    never here (it does not fit, was refused, no model)  the peer, unless it is provably late there too
    no peer may or can be asked                          refused here, as without help

A peer is a gateway, or a neighbour: another device of the site (`neighbour_view.py` says what is known of it). Of those
that can be asked the one that is predicted to answer first is, and of two alike the neighbour, which costs no uplink
and no pool. What only a gateway can vouch for (quality, evidence, the tokens of a generation) no neighbour is asked.

A request that may not leave the device never does, however the rest looks: its pin is a promise. A request is asked for
once at most: what comes back without an answer is computed here or refused. What a gateway answers for a device it
never sends back, and no device asks for what its gateway or a neighbour sent, so there are no loops
(`gateway/core/access/asker.py`, `neighbour_admission.py`).

A gateway of which no answer is known yet counts as quick: only an answer can show how quick it is, and one that never
answers is left alone after a few requests (`help_breaker.py`). A neighbour of which none is known counts as its link
and its queue.

Predictions may be wrong, of the queue here as of the peer. Then a request is late that the other place would have
answered, and its time is learned (`help_times.py`).

Pure. Source: docs/design/routing.md, "Provable lateness".
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final, Literal, NamedTuple

import msgspec

from edge_agent.core.help.neighbour_admission import MARGIN

OPTIMISM: Final = 0.6  # as in `edge_queue.py`: faster than its prediction by more than this, an answer never is

Place = Literal["here", "peer", "nowhere"]


class HelpNeed(msgspec.Struct, frozen=True):
    """What is known of a request when it is decided about."""

    left_s: float  # of its budget
    here_s: float  # predicted, until it would be done here; inf: never
    size_bytes: int  # of its tensors
    stays: str = ""  # why it may not leave the device; "" where it may
    asked: bool = False  # whether a peer was asked for it already
    gateways_only: str = ""  # why no neighbour is asked for it; "" where one may be


class HelpLimits(msgspec.Struct, frozen=True):
    """What a device may ask for."""

    max_in_flight: int
    max_request_bytes: int


class HelpingPeer(NamedTuple):
    """One gateway or neighbour as the device knows it now."""

    name: str  # as the one who asks calls it
    took_s: float | None  # predicted, from the question to the answer; None: no answer is known
    why_not: str = ""  # why it cannot be asked; "" where it can
    is_neighbour: bool = False


class HelpChoice(NamedTuple):
    """Where a request goes; `why` says why no peer is asked, and is "" where one is."""

    place: Place
    peer: str = ""
    why: str = ""
    is_neighbour: bool = False


def choose_place(need: HelpNeed, peers: Sequence[HelpingPeer], in_flight: int, limits: HelpLimits) -> HelpChoice:
    """Decide. Args: in_flight: requests that peers are asked for now."""
    if need.here_s <= need.left_s:
        return HelpChoice("here", why="it is predicted in time here")
    otherwise: Place = "nowhere" if need.here_s == inf else "here"
    why = _why_never(need, in_flight, limits)
    if why:
        return HelpChoice(otherwise, why=why)
    able = able_peers(need.gateways_only, peers)
    # A neighbour would refuse what it cannot surely do in time, and a question is asked only once.
    best = first_peer([one for one in able if not _would_refuse(one, need.left_s)]) or first_peer(able)
    if best is None:
        why = next((one.why_not for one in peers if one.why_not), need.gateways_only or "no gateway helps this device")
        return HelpChoice(otherwise, why=why)
    if _would_refuse(best, need.left_s):
        late = f"{best.name} takes only what it surely does within {MARGIN * need.left_s * 1e3:.0f} ms"
        return HelpChoice(otherwise, why=late)
    # Where it can be done here as well, both bets are compared; else only proof that it is vain keeps it from trying.
    slack = OPTIMISM if otherwise == "nowhere" else 1.0
    if best.took_s is not None and slack * best.took_s >= need.left_s:
        late = f"{best.name} takes {best.took_s * 1e3:.0f} ms, and {need.left_s * 1e3:.0f} ms are left"
        return HelpChoice(otherwise, why=late)
    return HelpChoice("peer", best.name, is_neighbour=best.is_neighbour)


def able_peers(gateways_only: str, peers: Sequence[HelpingPeer]) -> list[HelpingPeer]:
    """Those that can be asked. Args: gateways_only: why no neighbour may be; "" where one may."""
    return [one for one in peers if not one.why_not and not (one.is_neighbour and gateways_only)]


def first_peer(able: Sequence[HelpingPeer]) -> HelpingPeer | None:
    """The one that answers first by what is known; None of none."""
    return min(able, key=lambda one: (one.took_s or 0.0, not one.is_neighbour), default=None)


def ask_after_s(left_s: float, here_s: float, took_s: float | None) -> float:
    """Seconds after which a peer is asked beside the device for what is not answered by then; inf: never.

    As late as there is time for twice what the peer takes, and not before twice what was predicted here. Predictions
    of a queue are wrong where something in it takes longer than ever before, or hangs.

    Args:
        left_s: of the budget.
        here_s: predicted, until it would be done here.
        took_s: predicted of the peer; None: no answer is known.
    """
    latest_s = left_s / 2 if took_s is None else left_s - 2.0 * took_s
    after_s = max(2.0 * here_s, latest_s, 0.0)
    return after_s if left_s - after_s > OPTIMISM * (took_s or 0.0) else inf


def _would_refuse(peer: HelpingPeer, left_s: float) -> bool:
    return peer.is_neighbour and (peer.took_s or 0.0) > MARGIN * left_s


def _why_never(need: HelpNeed, in_flight: int, limits: HelpLimits) -> str:
    if need.stays:
        return need.stays
    if need.asked:
        return "another was asked for it already"
    if need.left_s <= 0.0:
        return "no time is left"
    if need.size_bytes > limits.max_request_bytes:
        return f"it has {need.size_bytes} bytes, and help.max_request_bytes is {limits.max_request_bytes}"
    if in_flight >= limits.max_in_flight:
        return f"{in_flight} requests are asked for already (help.max_in_flight)"
    return ""
