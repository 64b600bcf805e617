"""Mosquitto's files, as text, are configured so that each device publishes as itself only.

The ACL is a few pattern lines for every device of a fleet, known or not, since a device's user name is its own name: it
writes below `up/NAME/` and reads below `down/NAME/`, and what gateways publish to all. What it may write is named topic
by topic: with topics of its own choice, each with a retained message, one device fills the broker's memory and disk.
Gateways have lines of their own, and so have pools that announce themselves: a pattern for pools would let each device
announce itself as one. A device is identified by its certificate (`use_identity_as_username`: the common name that
`tidegate pki` gives it), or a password of its own. There is no password that two devices share.

Two things that the ACL cannot do: a client id is not a user name, and a client that takes another's ends its session,
so the broker is configured to use the user name for both; and a retained message stays when its author is banned, so
the broker is configured to check the author again.

Pure: values in, text out, but for the salt of a password's hash.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final, Literal

from tidegate.fleet.topics import DeviceTopic, PoolTopic, StoredTopic, Topics, checked_name
from tidegate.security.certificate_identity import CertificateIdentity

Users = Literal["certificates", "passwords"]

# Mosquitto counts them in its one thread at each CONNECT, so its own number. Ours are 160 random bits, which no
# iteration makes harder to guess.
_ITERATIONS: Final = 101
_SALT_BYTES: Final = 12  # Mosquitto 2.0 takes no other
PASSWORD_BYTES: Final = 20
_DATA_DIR: Final = PurePath("/var/lib/mosquitto")  # Debian's


@dataclass(frozen=True, slots=True)
class MosquittoPlan:
    """What to write.

    Attributes:
        folder: where the files will lie when Mosquitto reads them.
        address: that it listens on; "" for all.
        encrypted: whether ca.crt, broker.crt and broker.key lie in the folder.
        data_dir: where it keeps retained messages; None: in memory only.
        run_as: the system's user that it becomes when root starts it; None: its own default, `mosquitto`.
        pools: pools that announce themselves.
        neighbours: whether devices may read where the others are, for `help.neighbours` of an edge.
    """

    fleet: str
    gateways: tuple[str, ...]
    folder: PurePath
    users: Users = "certificates"
    port: int = 8883
    address: str = ""
    encrypted: bool = True
    data_dir: PurePath | None = _DATA_DIR
    run_as: str | None = None
    pools: tuple[str, ...] = ()
    neighbours: bool = False

    def __post_init__(self) -> None:
        Topics(self.fleet)
        for gateway in self.gateways:
            checked_name(gateway, "the gateway's name")
        for pool in self.pools:
            CertificateIdentity("pool", pool)
        if self.users == "certificates" and not self.encrypted:
            raise ValueError("users by certificate need TLS: leave out --no-tls, or take --users passwords")


def gateway_user(name: str) -> str:
    """A gateway's user name: its certificate's common name, and its MQTT client id."""
    return CertificateIdentity("gateway", name).common_name


def pool_user(name: str) -> str:
    """The user name of a pool that announces itself, as a gateway's."""
    return CertificateIdentity("pool", name).common_name


def acl_text(plan: MosquittoPlan) -> str:
    root = Topics(plan.fleet).root
    lines = [
        f"# Rights to write and to read in the fleet `{plan.fleet}`. Written by `tidegate broker config`.",
        "# %u is the user name, which is the device's name. A device writes only below its own `up/`, on these",
        "# topics, and so cannot fill the broker with retained messages. It reads only its own `down/`, its group's,",
        "# and what gateways publish to all.",
        *(f"pattern write {root}/up/%u/{last}" for last in _written_by_devices(plan.gateways)),
        f"pattern read  {root}/down/%u/#",
        f"pattern read  {root}/gw/#",
        f"pattern read  {root}/down/g/#",
    ]
    if plan.neighbours:
        lines += [
            "# Neighbours ask each other for help, and read for it where the others are.",
            f"pattern read  {root}/up/+/birth",
        ]
    for gateway in plan.gateways:
        lines += [
            "",
            "# A gateway reads every device and every pool, and can write as none of them.",
            f"user {gateway_user(gateway)}",
            f"topic read  {root}/up/#",
            f"topic read  {root}/pool/#",
            f"topic write {root}/down/#",
            f"topic write {root}/gw/{gateway}/#",
            f"topic read  {root}/peer/+",
            f"topic write {root}/peer/{gateway}",
        ]
    for pool in plan.pools:
        lines += [
            "",
            "# A pool says where it is, under its own name only.",
            f"user {pool_user(pool)}",
            *(f"topic readwrite {root}/pool/{pool}/{kind}" for kind in PoolTopic),
        ]
    return "\n".join(lines) + "\n"


def _written_by_devices(gateways: Sequence[str]) -> list[str]:
    """The ends of the topics that a device writes."""
    stored = [f"{kind}/{gateway}" for gateway in gateways for kind in StoredTopic]
    return [*DeviceTopic, "probe", *stored]


QUEUE_LINES: Final = (
    "# A gateway that connects gets the births and inventories of the whole fleet at once. A client with more than",
    "# so many unread messages gets no more, or is cut off by a later version; by default that is 1000. (0 is not",
    "# unlimited in all versions.)",
    "max_queued_messages 100000",
    "max_queued_bytes 67108864",
)


def conf_text(plan: MosquittoPlan) -> str:
    lines = [
        f"# Mosquitto (2.0 or later) for the fleet `{plan.fleet}`. Written by `tidegate broker config`.",
        f"listener {plan.port} {plan.address}".rstrip(),
        *(_tls_lines(plan) if plan.encrypted else ["# No encryption: for a network that you trust with passwords."]),
        *_user_lines(plan),
        "# A session belongs to a client id, so no client can end another's.",
        "use_username_as_clientid true",
        f"acl_file {plan.folder / 'tidegate.acl'}",
        "# A retained message counts only while its author may still write there.",
        "check_retain_source true",
        "",
        "# Without it a confirmed message takes 90 ms longer, even on loopback (Nagle against delayed ACKs).",
        "set_tcp_nodelay true",
        *_persistence_lines(plan),
        "# Above the largest message there is, a signed document of what a device shall run.",
        "message_size_limit 131072",
        *QUEUE_LINES,
        *([f"user {plan.run_as}"] if plan.run_as else []),
    ]
    return "\n".join(lines) + "\n"


def _tls_lines(plan: MosquittoPlan) -> list[str]:
    return [
        "# Made by `tidegate pki`; after a renewal `systemctl reload mosquitto` takes the new ones.",
        f"cafile {plan.folder / 'ca.crt'}",
        f"certfile {plan.folder / 'broker.crt'}",
        f"keyfile {plan.folder / 'broker.key'}",
        "# Every client here is ours, and all of them can.",
        "tls_version tlsv1.3",
    ]


def _user_lines(plan: MosquittoPlan) -> list[str]:
    if plan.users == "passwords":
        return ["allow_anonymous false", f"password_file {plan.folder / 'tidegate.passwd'}"]
    return [
        "# A device is identified by its certificate.",
        "allow_anonymous false",
        "require_certificate true",
        "use_identity_as_username true",
    ]


def _persistence_lines(plan: MosquittoPlan) -> list[str]:
    if plan.data_dir is None:
        return ["persistence false"]
    return [
        "# Retained registers (births, deaths, inventories) outlive a restart of the broker.",
        "persistence true",
        f"persistence_location {plan.data_dir}/",
        "autosave_interval 60",
    ]


# passwords


def new_password() -> str:
    return secrets.token_urlsafe(PASSWORD_BYTES)


def passwd_line(user: str, password: str) -> str:
    """A line as `mosquitto_passwd` writes it: PBKDF2 with SHA-512, salted."""
    salt = secrets.token_bytes(_SALT_BYTES)
    digest = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, _ITERATIONS)
    encoded = (base64.b64encode(one).decode() for one in (salt, digest))
    return f"{user}:$7${_ITERATIONS}${'$'.join(encoded)}"


def passwd_text(existing: str, passwords: Mapping[str, str]) -> str:
    """The password file with these users' lines new and all others as they were."""
    kept = [line for line in existing.splitlines() if line and line.partition(":")[0] not in passwords]
    return "\n".join([*kept, *(passwd_line(user, password) for user, password in passwords.items())]) + "\n"


def users_in(existing: str) -> Sequence[str]:
    return [line.partition(":")[0] for line in existing.splitlines() if line]
