"""An entitlement fixes the tenant of an authenticated call, and keeps its priority and its pin within the grant.

Asking for more urgency or more distance than is granted is no error: a client library sets such things without its user
knowing. A model or a tenant that is not granted is one, since nothing else can be given in its place. The refusal goes
by the name alone, so it is the same for a model that exists and for one that does not.
"""

from __future__ import annotations

from msgspec.structs import replace

from tidegate.caller import NO_LIMITS, Identity
from tidegate.outcome import Forbidden
from tidegate.placement_pin import stricter
from tidegate.priority import level_of
from tidegate.types import Call


def authorized_call(call: Call, identity: Identity, payer: str) -> Call:
    """The call as this identity may make it, on the budget of `payer`. Raises Forbidden."""
    grant = identity.grant
    check_may_infer(identity)
    check_model(identity, call.request.model_name)
    tenant = delegated_tenant(call, identity)
    level = level_of(call.priority)
    priority = call.priority if level >= grant.highest_priority else grant.highest_priority
    return replace(
        call, tenant=tenant or payer, priority=priority, pin=stricter(call.pin, grant.pin), identity=identity
    )


def delegated_tenant(call: Call, identity: Identity) -> str:
    """The other tenant that the call names; "" is none. Raises Forbidden: it may not act for that one."""
    if call.tenant in ("", identity.tenant):
        return ""
    if not identity.may("act-for-others"):
        raise Forbidden(f"{identity.id} is of tenant {identity.tenant!r} and may not act for {call.tenant!r}")
    return call.tenant


def second_payer(call: Call) -> str:
    """The quota of the credential that pays beside the call's tenant; "" where there is none.

    Only a credential with limits of its own pays compute and places for others: one without, such as a gateway's that
    brings the requests of all its tenants, would have to pay all of them out of one tenant's share.
    """
    identity = call.identity
    if identity is None or identity.grant.limits == NO_LIMITS:
        return ""
    return "" if call.tenant in ("", identity.payer) else identity.payer


def check_may_infer(identity: Identity) -> None:
    """Raises Forbidden."""
    if not identity.may("infer"):
        raise Forbidden(f"{identity.id} has no right to use models")


def check_model(identity: Identity, name: str) -> None:
    """Raises Forbidden, whether or not there is such a model."""
    if not identity.may_use(name):
        raise Forbidden(f"{identity.id} may not use a model called {name[:200]!r}")
