"""Help choice decides about a local caller's request: computed here, sent to a gateway that helps, or refused here.

    predicted in time here                               here
    predicted late here, and in time at a gateway        the gateway, while there is time for it
    predicted late here, and nothing better is known     here: the device's own queue decides (`edge_queue.py`)
    begun here, and not answered when it should be       the gateway beside it, while there is time for it
    never here (it does not fit, was refused, no model)  the gateway, unless it is provably late there too
    no gateway may or can be asked                       refused here, as without help

A request that may not leave the device never does, however the rest looks: its pin is a promise. A request is asked for
once at most: what comes back without an answer is computed here or refused. What a gateway answers for a device it
never sends back, and no device asks for what its gateway sent, so there are no loops (`gateway/core/access/asker.py`).

A gateway of which no answer is known yet counts as quick: only an answer can show how quick it is, and one that never
answers is left alone after a few requests (`help_breaker.py`).

Predictions may be wrong, of the queue here as of the gateway. Then a request is late that the other place would have
answered, and its time is learned (`help_times.py`).

Pure. Source: docs/design/routing.md, "Provable lateness".
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final, Literal, NamedTuple

import msgspec

OPTIMISM: Final = 0.6  # as in `edge_queue.py`: faster than its prediction by more than this, an answer never is

Place = Literal["here", "gateway", "nowhere"]


class HelpNeed(msgspec.Struct, frozen=True):
    """What is known of a request when it is decided about."""

    left_s: float  # of its budget
    here_s: float  # predicted, until it would be done here; inf: never
    size_bytes: int  # of its tensors
    stays: str = ""  # why it may not leave the device; "" where it may
    asked: bool = False  # whether a gateway was asked for it already


class HelpLimits(msgspec.Struct, frozen=True):
    """What a device may ask for."""

    max_in_flight: int
    max_request_bytes: int


class HelpingGateway(NamedTuple):
    """One gateway as the device knows it now."""

    name: str  # "gateway/NAME"
    took_s: float | None  # predicted, from the question to the answer; None: no answer is known
    why_not: str = ""  # why it cannot be asked; "" where it can


class HelpChoice(NamedTuple):
    """Where a request goes; `why` says why no gateway is asked, and is "" where one is."""

    place: Place
    gateway: str = ""
    why: str = ""


def choose_place(need: HelpNeed, gateways: Sequence[HelpingGateway], in_flight: int, limits: HelpLimits) -> HelpChoice:
    """Decide. Args: in_flight: requests that gateways are asked for now."""
    if need.here_s <= need.left_s:
        return HelpChoice("here", why="it is predicted in time here")
    otherwise: Place = "nowhere" if need.here_s == inf else "here"
    why = _why_never(need, in_flight, limits)
    if why:
        return HelpChoice(otherwise, why=why)
    able = [one for one in gateways if not one.why_not]
    if not able:
        return HelpChoice(otherwise, why=next((one.why_not for one in gateways), "no gateway helps this device"))
    best = min(able, key=lambda one: one.took_s or 0.0)
    # Where it can be done here as well, both bets are compared; else only proof that it is vain keeps it from trying.
    slack = OPTIMISM if otherwise == "nowhere" else 1.0
    if best.took_s is not None and slack * best.took_s >= need.left_s:
        late = f"{best.name} takes {best.took_s * 1e3:.0f} ms, and {need.left_s * 1e3:.0f} ms are left"
        return HelpChoice(otherwise, why=late)
    return HelpChoice("gateway", best.name)


def ask_after_s(left_s: float, here_s: float, took_s: float | None) -> float:
    """Seconds after which a gateway is asked beside the device for what is not answered by then; inf: never.

    As late as there is time for twice what the gateway takes, and not before twice what was predicted here. Predictions
    of a queue are wrong where something in it takes longer than ever before, or hangs.

    Args:
        left_s: of the budget.
        here_s: predicted, until it would be done here.
        took_s: predicted of the gateway; None: no answer is known.
    """
    latest_s = left_s / 2 if took_s is None else left_s - 2.0 * took_s
    after_s = max(2.0 * here_s, latest_s, 0.0)
    return after_s if left_s - after_s > OPTIMISM * (took_s or 0.0) else inf


def _why_never(need: HelpNeed, in_flight: int, limits: HelpLimits) -> str:
    if need.stays:
        return need.stays
    if need.asked:
        return "a gateway was asked for it already"
    if need.left_s <= 0.0:
        return "no time is left"
    if need.size_bytes > limits.max_request_bytes:
        return f"it has {need.size_bytes} bytes, and help.max_request_bytes is {limits.max_request_bytes}"
    if in_flight >= limits.max_in_flight:
        return f"{in_flight} requests are asked for already (help.max_in_flight)"
    return ""
