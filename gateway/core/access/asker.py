"""An asker is a device that sends a request of one of its local callers to its gateway, to be answered elsewhere.

What the gateway believes of such a request, and what not:

    who asks            what the device's certificate or key proves, as where it dials in; never a word in the request
    what it may have    the grant of the device (`help.devices`): models, priority, pin, quotas
    for whom            of a caller that showed the device a credential, what that credential proves and grants, within
                        the device's grant; of any other caller the device's tenant, or another one where the device
                        may act for others

A pinned request has no business here: a device that sends one has broken its word, and the request is refused.

A helped request is known by its path, which has the device's name and nothing else. Placement leaves the device out
(`gateway/serving/dispatcher.py`) and every other gateway (`own_places.py`), and a target never asks for help with what
its gateway sent: so one hop is all there can be.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from gateway.core.access.entitlement import check_may_infer, check_model
from tidegate.caller import Identity
from tidegate.fleet.topics import is_name
from tidegate.outcome import InvalidRequest
from tidegate.placement_pin import stricter
from tidegate.priority import level_of
from tidegate.types import HELP, Call, TargetId

TIER: Final = "edge"


def why_not_asker(claimed: str, *, proven: str, known: bool) -> str:
    """Why a peer may not ask as this device; "" where it may.

    Args:
        claimed: as it says: "edge/NAME".
        proven: whose certificate or key it showed, in the same form; "" where none was asked for.
        known: whether the fleet knows the device, or there is none to ask.
    """
    tier, device = TargetId.parse(claimed)
    if tier != TIER or not is_name(device):
        return "only devices ask for help here, each by its name, edge/NAME"
    if proven and proven != claimed:
        return f"it says that it is {claimed} and shows the credential of {proven}"
    if not proven and not known:
        return f"{claimed} is not known to this fleet: its birth over MQTT has not been seen"
    return ""


def asked_call(call: Call, device: Identity, asker: str, bearer: Identity | None) -> Call:
    """The call that a device asks for, with the identity that answers for it.

    Args:
        asker: the device, "edge/NAME".
        bearer: the identity that its caller's own credential proves; None: it showed none.

    Raises:
        InvalidRequest: it is pinned.
        Forbidden: the device has no right to the model.
    """
    if call.pin != "any":
        raise InvalidRequest(f"a request pinned to {call.pin!r} does not leave {asker}, and is not answered here")
    check_may_infer(device)
    check_model(device, call.request.model_name)
    grant = device.grant
    priority = call.priority if level_of(call.priority) >= grant.highest_priority else grant.highest_priority
    return replace(
        call,
        protocol=HELP,
        path=(asker,),
        pin=stricter(call.pin, grant.pin),
        priority=priority,
        identity=device if bearer is None else bearer,
    )
