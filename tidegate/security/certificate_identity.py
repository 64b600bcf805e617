"""A certificate identity is a role and a name, written as `tidegate://ROLE/NAME`.

A host name says where something runs, which is not what the parts need to know of each other: a gateway that dials
edge-1 must reach edge-1 under whatever address it has today, and an edge must know that its caller is a gateway. So
each certificate carries its identity as a URI, and twice more where a library can't look at URIs:

- as a host name under a domain that cannot be registered (`edge-1.edge.tidegate.internal`), since TLS clients (gRPC's
  too) compare the other side's certificate with a host name and nothing else;
- as the common name, which MQTT brokers take for the user name. An edge's is its bare name, as the ACL wants it
  (`up/%u/#`). A gateway's is `gw~NAME` and a pool's is `pool~NAME`, their MQTT client ids; `~` is in no name here, so
  no edge can be issued as one. A role without business at the broker has a `#` in it, which brokers refuse under
  pattern ACLs.

Names are lower case, since host names are compared without case and MQTT topics with it: `Edge-1` and `edge-1` would be
one peer here and two there.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

Role = Literal["gateway", "edge", "pool", "broker", "client"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)
SCHEME: Final = "tidegate"
DOMAIN: Final = "tidegate.internal"  # .internal is reserved for private use (ICANN, 2024): no public CA signs it
NAME_MAX: Final = 40  # a common name has room for 64 characters
_NAME: Final = re.compile(rf"[a-z0-9][a-z0-9._-]{{0,{NAME_MAX - 1}}}")


class NotAllowed(Exception):
    """The peer's certificate is valid and names another part; the message says which."""


@dataclass(frozen=True, slots=True)
class CertificateIdentity:
    """A role and a name in it."""

    role: Role
    name: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"the role {self.role!r} is none of {', '.join(ROLES)}")
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"the name {self.name!r} must be 1 to {NAME_MAX} lower-case letters, digits and . _ -, starting with a "
                "letter or digit"
            )

    @classmethod
    def parse(cls, text: str) -> CertificateIdentity:
        """From `ROLE/NAME`, with or without `tidegate://`. Raises ValueError that names what is wrong."""
        role, slash, name = text.removeprefix(f"{SCHEME}://").partition("/")
        if not slash:
            raise ValueError(f"{text!r} reads like ROLE/NAME, for example edge/edge-1")
        return cls(role, name)  # type: ignore[arg-type]  # checked there

    @property
    def uri(self) -> str:
        return f"{SCHEME}://{self.role}/{self.name}"

    @property
    def host(self) -> str:
        """The host name under which TLS clients check it."""
        return f"{self.name}.{self.role}.{DOMAIN}"

    @property
    def common_name(self) -> str:
        """What an MQTT broker takes for the user name."""
        match self.role:
            case "edge":
                return self.name
            case "gateway":
                return f"gw~{self.name}"
            case "pool":
                return f"pool~{self.name}"
            case _:
                return f"{self.role}#{self.name}"

    def __str__(self) -> str:
        return f"{self.role}/{self.name}"


def identity_of(names: Iterable[str]) -> CertificateIdentity | None:
    """The identity among a certificate's subject alternative names, None where there is none or more than one."""
    found = {name for name in names if name.startswith(f"{SCHEME}://")}
    if len(found) != 1:
        return None
    try:
        return CertificateIdentity.parse(found.pop())
    except ValueError:
        return None


def alternative_names(peercert: Any) -> tuple[str, ...]:
    """The subject alternative names in what Python's ssl reports of a verified certificate (`getpeercert`)."""
    return tuple(name for _, name in (peercert or {}).get("subjectAltName", ()))


def check_role(
    names: Iterable[str], allowed: Collection[Role], *, ours_only: bool = True
) -> CertificateIdentity | None:
    """The peer's identity, if its role is one of `allowed`.

    Args:
        names: the subject alternative names of its verified certificate.
        ours_only: whether a certificate without an identity of ours is refused.

    Raises:
        NotAllowed: the certificate names another part.
    """
    names = tuple(names)
    identity = identity_of(names)
    wanted = " or ".join(sorted(allowed))
    if identity is None:
        if ours_only or any(name.startswith(f"{SCHEME}://") for name in names):
            raise NotAllowed(f"this needs the certificate of a {wanted}; yours names no one role and name")
        return None
    if identity.role not in allowed:
        raise NotAllowed(f"this needs the certificate of a {wanted}; yours is {identity}'s")
    return identity
