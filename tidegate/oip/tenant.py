"""The tenant that a caller names for itself, in the header or OIP parameter `tidegate-tenant`.

A gateway with `auth` believes a name only from a caller with the right `act-for-others`. Without `auth` any name is
believed, so it may decide about shares and budgets only if a proxy in front of the gateway authenticates callers and
sets it. The name ends up in hashes, logs and metrics, hence its few characters. An invalid name is refused, never
ignored: otherwise its owner would not know whose budget is charged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from tidegate.oip.budget import quoted_value
from tidegate.outcome import InvalidRequest
from tidegate.types import Parameters

TENANT_KEY: Final = "tidegate-tenant"
RULE: Final = "1 to 64 letters, digits, dots, dashes or underscores, the first a letter or a digit"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


def is_tenant(name: str) -> bool:
    """Whether a tenant may be called so."""
    return _NAME.fullmatch(name) is not None


def tenant_of(headers: Mapping[str, str], parameters: Parameters) -> str:
    """The tenant's name; "" for none. Raises InvalidRequest for an invalid name or two different ones."""
    found = ""
    for values, source in ((headers, f"header {TENANT_KEY}"), (parameters, f"parameter {TENANT_KEY!r}")):
        if TENANT_KEY not in values:
            continue
        name = values[TENANT_KEY]
        if not isinstance(name, str) or not is_tenant(name):
            raise InvalidRequest(f"{source} must be {RULE}, got {quoted_value(name)}")
        if found not in ("", name):
            raise InvalidRequest(f"header {TENANT_KEY} says {found!r} but the parameter says {name!r}")
        found = name
    return found
