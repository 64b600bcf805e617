"""An origin is what the sender of a request knows of its caller, for a gateway that places the request once more.

A gateway tells it a site, and a device tells it the gateway that it asks for help (`docs/asking-for-help.md`).

A target gets a request, a budget and a variant, because its gateway has decided everything else. A site gateway decides
again, so that it needs what the caller required: its pin, its least quality, the objectives of its tokens; and the
tenant, whose weight counts there too. What an origin says is believed, as a target believes its gateway: over TLS only
a gateway's certificate opens the port (`gateway/site_port.py`).

`path` has the names of the gateways that a request has come through. A gateway that finds its own name there refuses
the request by name, so that a loop in two configurations costs one hop and is seen at once. What a device says of the
path is not read: the gateway knows which device asks (`gateway/help`).

The other side is untrusted all the same: sizes and words are checked here, and what does not fit is refused.
"""

from __future__ import annotations

from math import isfinite
from typing import Final

import msgspec
from msgspec.structs import replace

from tidegate.caller import tenant_of
from tidegate.oip.budget import quoted_value
from tidegate.oip.tenant import is_tenant
from tidegate.outcome import InvalidRequest
from tidegate.placement_pin import PINS, Pin
from tidegate.rpc import link_pb2
from tidegate.types import Call, Route

MOST_HOPS: Final = 4  # gateways that a request may come through; a region and its sites are two
MOST_NAME: Final = 128
MOST_CREDENTIAL: Final = 16_384  # characters: as long as a header may be
_MOST_MICROS: Final = 2**53


class Origin(msgspec.Struct, frozen=True):
    """What is known of a caller. Its repr, which logs may print, holds no secret."""

    path: tuple[str, ...]  # the gateways that the request has come through, the caller's first
    tenant: str = ""
    pin: Pin = "any"
    min_quality: float = 0.0
    ttft_s: float | None = None  # what is left for the first token of a generation
    tpot_s: float | None = None
    resumes: bool = True
    attested: bool = False
    authorization: str = ""  # the credential that a device's caller showed; "": none

    @classmethod
    def of(cls, call: Call, sender: str, now: float, authorization: str = "") -> Origin:
        """The origin of a call that this gateway, or this device, sends on."""
        left_s = None if call.ttft_s is None else max(1e-6, call.ttft_s - (now - call.arrived_at))
        return cls(
            (*call.path, sender),
            tenant_of(call.tenant),
            call.pin,
            call.min_quality,
            left_s,
            call.tpot_s,
            call.resumes,
            call.attested,
            authorization,
        )

    def __repr__(self) -> str:
        return f"<Origin {' -> '.join(self.path)} tenant {self.tenant or '-'} pin {self.pin}>"

    def write_to(self, frame: link_pb2.Origin) -> None:
        frame.path.extend(self.path)
        frame.tenant, frame.pin, frame.min_quality = self.tenant, self.pin, self.min_quality
        frame.ttft_us, frame.tpot_us = _micros(self.ttft_s), _micros(self.tpot_s)
        frame.never_resumes = not self.resumes
        frame.attested = self.attested
        if self.authorization:
            frame.authorization = self.authorization


def originated(call: Call, frame: link_pb2.Request, peer: str) -> Call:
    """The call with what its gateway says of its caller. Raises InvalidRequest.

    Args:
        peer: the name of the other side, "gateway/NAME": the path of a request that says nothing.
    """
    if not frame.HasField("origin"):
        return replace(call, path=(peer.partition("/")[2] or peer,))
    origin = frame.origin
    path = tuple(origin.path)
    if not 0 < len(path) <= MOST_HOPS or any(not 0 < len(name) <= MOST_NAME for name in path):
        raise InvalidRequest(f"a request that came through {len(path)} gateways: from 1 to {MOST_HOPS}, with names")
    if origin.tenant and not is_tenant(origin.tenant):
        raise InvalidRequest(f"a request of tenant {quoted_value(origin.tenant)}, which is no tenant's name")
    if not (isfinite(origin.min_quality) and 0.0 <= origin.min_quality <= 1.0):
        raise InvalidRequest(f"a request of quality {origin.min_quality}: from 0 to 1")
    return replace(
        call,
        path=path,
        tenant=origin.tenant,
        pin=_pin_of(origin.pin),
        min_quality=origin.min_quality,
        ttft_s=origin.ttft_us / 1e6 or None,
        tpot_s=origin.tpot_us / 1e6 or None,
        resumes=not origin.never_resumes,
        attested=origin.attested,
    )


def credential_of(frame: link_pb2.Request) -> str:
    """The credential that a device's caller showed; "" for none. Raises InvalidRequest."""
    shown: str = frame.origin.authorization if frame.HasField("origin") else ""
    if len(shown) > MOST_CREDENTIAL:
        raise InvalidRequest(f"a credential of {len(shown)} characters: at most {MOST_CREDENTIAL}")
    return shown


def write_route(frame: link_pb2.ServedBy, route: Route) -> None:
    frame.target, frame.reason, frame.variant = route.served_by, route.reason, route.variant
    frame.attempts = min(route.attempts, 2**31)
    frame.hedged, frame.fallback = route.hedged, route.fallback
    frame.degraded, frame.provisional = route.degraded, route.provisional


def route_of(frame: link_pb2.ServedBy) -> Route:
    """The route in an answer. Its words come from the network and end up in headers: other characters are left out."""
    return Route(
        printable(frame.target),
        printable(frame.reason),
        printable(frame.variant),
        attempts=frame.attempts,
        hedged=frame.hedged,
        fallback=frame.fallback,
        degraded=frame.degraded,
        provisional=frame.provisional,
    )


def printable(text: str, allowed: str = "") -> str:
    """What of a text from the network may stand in a header. Args: allowed: of the separators there."""
    good = [one for one in text[:MOST_NAME] if one.isascii() and one.isprintable()]
    return "".join([one for one in good if one not in ';,\\"' or one in allowed])


def _pin_of(word: str) -> Pin:
    for pin in PINS:
        if word == pin:
            return pin
    raise InvalidRequest(f"a request pinned to {quoted_value(word)}: one of {', '.join(PINS)}")


def _micros(seconds: float | None) -> int:
    return 0 if seconds is None else min(_MOST_MICROS, max(1, int(seconds * 1e6)))
