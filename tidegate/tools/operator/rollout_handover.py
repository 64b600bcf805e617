"""A TidegateRollout is handed to the gateway that conducts it, and what that gateway says becomes its status.

The order was signed where the operator's user has the key; this passes bytes on and can change none of them. Which
gateways there are, and the key for their admin ports, come from the operator's own command line and environment, not
from the resource: else whoever may write one could have the key sent anywhere.

An order names itself. It is sent only where the gateway does not know that name yet, so an operator that dies after
sending sends nothing twice.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tidegate.admin_client import Admin, AdminError
from tidegate.tools.operator.conditions import ResourceCondition
from tidegate.tools.operator.resource import CustomResource, Refused
from tidegate.tools.operator.specs import TidegateRolloutSpec

_WITHIN_S: Final = 10.0
_OVER: Final = ("succeeded", "returned")
_FINAL: Final = (400, 413, 422)  # the order itself is wrong, and stays so
_WHY: Final = "TidegateRollout"  # said with each command
_OWN_REASON: Final = f"operator: {_WHY}"  # as the gateway tells it again, once it has paused by such a command


@dataclass(frozen=True, slots=True)
class HandoverReport:
    """What is to be said of a rollout, and whether it is to be looked at again."""

    conditions: tuple[ResourceCondition, ...]
    fields: Mapping[str, Any]
    over: bool


class RolloutHandover:
    """Args:
    conductors: the admin port of each gateway that conducts rollouts, by the name that resources use.
    """

    def __init__(self, conductors: Mapping[str, str]) -> None:
        self._admins = {name: Admin(url, within_s=_WITHIN_S) for name, url in conductors.items()}

    async def carry(self, resource: CustomResource) -> HandoverReport:
        """Send the order or the command that is due, and return the state.

        Raises:
            Refused: the resource or its order is wrong.
            AdminError: the gateway does not answer, or not now.
        """
        spec = resource.parsed(TidegateRolloutSpec)
        admin = self._admins.get(spec.gateway)
        if admin is None:
            known = ", ".join(sorted(self._admins)) or "none"
            raise Refused(
                "UnknownGateway", f"spec.gateway: {spec.gateway!r} is no --conductor of this operator ({known})"
            )
        return await asyncio.to_thread(_carried, admin, _id_of(spec.order), spec)

    def __repr__(self) -> str:
        return f"<RolloutHandover to {', '.join(sorted(self._admins)) or 'nobody'}>"


def _id_of(order: str) -> str:
    try:
        found = json.loads(order)["spec"]["id"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused(
            "InvalidOrder", "spec.order is no order of `tidegate model rollout --out`: it has no id"
        ) from error
    if (
        not isinstance(found, str)
        or not found
        or len(found) > 64
        or not found.replace("-", "").replace("_", "").isalnum()
    ):
        raise Refused("InvalidOrder", "spec.order: its id is no word")
    return found


def _carried(admin: Admin, id: str, spec: TidegateRolloutSpec) -> HandoverReport:
    """Blocks on the network."""
    try:
        known = admin.read(f"/v1/rollouts/{id}")
    except AdminError as error:
        if error.status != 404:
            raise
        if spec.state == "aborted":
            return HandoverReport(
                (ResourceCondition("Accepted", "True", "NeverBegun"),), {"id": id, "phase": "aborted"}, over=True
            )
        known = _begun(admin, spec.order)
    if verb := _verb(str(known["phase"]), str(known.get("reason") or ""), spec.state):
        known = admin.post(f"/v1/rollouts/{id}/{verb}", json.dumps({"why": _WHY}).encode())
    return _report(known)


def _begun(admin: Admin, order: str) -> Any:
    try:
        return admin.post("/v1/rollouts", order.encode())
    except AdminError as error:
        if error.status in _FINAL:
            raise Refused("InvalidOrder", str(error)) from error
        raise


def _verb(phase: str, reason: str, wanted: str) -> str:
    """What must be said to a rollout so that it becomes what is wanted; "" for nothing."""
    match wanted, phase:
        case "paused", "running":
            return "pause"
        case "aborted", "running" | "paused" | "succeeded":
            return "abort"
        case "running", "paused" if reason == _OWN_REASON:
            return "resume"
    # A rollout that the gateway or a person has paused waits for a person, whose word this resource is not.
    return ""


def _report(known: Mapping[str, Any]) -> HandoverReport:
    phase, reason = str(known["phase"]), str(known.get("reason") or "")
    ready = {
        "succeeded": ResourceCondition("Ready", "True", "Succeeded", reason),
        "returned": ResourceCondition("Ready", "False", "Returned", reason),
        "returning": ResourceCondition("Ready", "False", "Returning", reason),
        "paused": ResourceCondition("Ready", "False", "Paused", reason),
    }.get(phase, ResourceCondition("Ready", "False", "Running", reason))
    fields = {
        "id": known["id"], "phase": phase, "reason": reason, "wave": int(known["wave"]), "waves": len(known["waves"]),
        "counts": {str(step): int(count) for step, count in known["counts"].items()},
    }  # fmt: skip
    return HandoverReport((ResourceCondition("Accepted", "True", "HandedOver"), ready), fields, over=phase in _OVER)
