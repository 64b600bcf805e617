"""What keeps a valid configuration from starting here: files that are missing or closed, ports, the broker's address.

A configuration model checks what a file says; this looks at the machine as well. Keys are found by name, so no process
is known here. Each key with a path stands in one of three sets, which a test holds against the models: `MUST_EXIST`
names what somebody else has put there, `MADE` what the process itself writes, so that only its place must be there, and
`READ_IF_THERE` what may be missing. Each finding names the key, the value and the way out.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import BaseModel

from tidegate.config import ProcessConfig
from tidegate.models.repository import Repository, RepositoryError
from tidegate.mqtt.broker_url import BrokerUrl
from tidegate.runtime.ports import try_listen
from tidegate.runtime.process import StartError
from tidegate.security.certificate_identity import CertificateIdentity
from tidegate.security.tls import check_encrypted, tls_of
from tidegate.servers.address import format_address

# What must be there, and what brings it.
MUST_EXIST: Final = {
    "attestation.allowed": "the lines that `tidegate attest init` prints on targets, one a key",
    "attestation.key": "`tidegate attest init` makes one",
    "auth.jwt.jwks_file": "the issuer offers it; `auth.jwt.jwks_url` fetches it instead",
    "auth.keys_file": "`tidegate keys create` makes one",
    "cgroup": "with systemd, `Delegate=yes` in the unit makes one",
    "discovery[].ca_file": "the CA of the cluster's API server; in a pod, without the key, its service account's",
    "discovery[].path": "the list of targets; it must be there at the start, and is followed then",
    "discovery[].token_file": "`kubectl create token` prints one; in a pod, without the key, its service account's",
    "dial_key_file": "the key that `tidegate keys create --right dial-in` prints, alone in a file",
    "model_repository": "`tidegate model add` or `tidegate model build` makes one",
    "rollout.keys": "`tidegate keys signing create` makes one",
    "targets[].openai.api_key_file": "the key that the server's operator gave out, alone in a file",
    "targets[].openai.ca_file": "the certificate of the CA that signs the server's; without the key, the system's CAs",
    "sequence_home_key": "`openssl rand -hex 32` prints one; every gateway has the same",
    "store.ca": "the certificate of the CA that signs the store's",
    "store.cert": "the certificate that the store asks of its clients",
    "store.key": "the key of `store.cert`",
    "store.password_file": "the store's password, alone in a file",
    "tls.ca": "`tidegate pki issue` makes them",
    "tls.cert": "`tidegate pki issue` makes them",
    "tls.client_ca": "the certificate of the CA that signs callers'; without the key it is `tls.ca`",
    "tls.key": "`tidegate pki issue` makes them",
}
MADE: Final = frozenset(
    {
        "admin_token_file", "agreement.inputs_folder", "artifacts.folder", "ingest.path", "metrics_dir",
        "operator_token_file", "state_dir", "trials_file",
    }
)  # fmt: skip
READ_IF_THERE: Final = frozenset({"device_file", "sensors"})
FOLDERS: Final = frozenset(
    {
        "agreement.inputs_folder", "artifacts.folder", "cgroup", "metrics_dir", "model_repository", "sensors",
        "state_dir",
    }
)  # fmt: skip
# Where a port listens, if not at `host`.
HOST_OF: Final = {"admin_port": "admin_host", "artifacts.port": "artifacts.host", "metrics_port": "metrics_host"}
_LOCALHOST: Final[frozenset[IPv4Address | IPv6Address]] = frozenset({IPv4Address("127.0.0.1"), IPv6Address("::1")})
_CHECK_AS: Final = "check as the user that the service runs as"


class ConfiguredPort(NamedTuple):
    """A port that the process would open."""

    key: str
    host: str
    port: int
    server: int = 0  # which of several servers: each takes the next port

    @property
    def named(self) -> str:
        words = f"key {self.key!r} = {self.port - self.server}"
        return f"{words}, for server {self.server}" if self.server else words


def said_wrongly(config: ProcessConfig) -> list[str]:
    """What can start on no machine."""
    firsts = [one for one in listeners(config) if not one.server]  # of further servers `conflicts` tells
    return [*config.conflicts(), *_broker_problems(config), *_shared_ports(firsts)]


def missing_here(config: ProcessConfig, role: str) -> list[str]:
    """What cannot start on this machine, as this user."""
    closed = [problem for key, path in _paths(config) if (problem := _closed(key, path))]
    own = [] if any("'tls." in one for one in closed) else _certificate_problems(config, role)
    models = [] if any("'model_repository'" in one for one in closed) else _model_problems(config)
    return [*closed, *own, *models, *_unusable_ports(config)]


def taken_ports(config: ProcessConfig) -> list[str]:
    """Ports that something listens on now, which may be this very process."""
    return [
        f"{one.named}: {format_address(one.host, one.port)} is taken; if not by this very process, "
        "free it or set another"
        for one in listeners(config)
        if _listen_error(one) == errno.EADDRINUSE
    ]


def listeners(config: ProcessConfig) -> list[ConfiguredPort]:
    """The ports with a fixed number."""
    values = dict(_values(config))
    every, servers = str(values.get("host", "127.0.0.1")), values.get("servers", 1)
    return [
        ConfiguredPort(key, values.get(HOST_OF.get(key, "host")) or every, value + server, server)
        for key, value in values.items()
        for server in range(servers if type(value) is int and value + servers <= 2**16 else 1)
        if key.endswith("port") and "[]" not in key and type(value) is int and value  # in lists, others' ports
    ]


def _broker_problems(config: ProcessConfig) -> Iterator[str]:
    url = getattr(config, "mqtt", None)
    if url:
        try:
            BrokerUrl.parse(url)
            check_encrypted(url, getattr(config, "tls", None))
        except ValueError as error:  # it names the address without its password
            yield f"key 'mqtt': {error}"
        except StartError as error:
            yield str(error)


def _shared_ports(ports: list[ConfiguredPort]) -> Iterator[str]:
    for index, one in enumerate(ports):
        for other in ports[:index]:
            if one.port == other.port and _meet(one.host, other.host):
                yield f"keys {other.key!r} and {one.key!r} are both {one.port}: give one of them another port"


def _meet(one: str, other: str) -> bool:
    """Whether two servers at these hosts would want the same address, as far as their names alone tell."""
    left, right = _addresses(one), _addresses(other)
    if not left or not right:  # a name: only the machine knows
        return one.lower() == other.lower() or any(address.is_unspecified for address in left | right)
    return any(
        mine == yours
        or (mine.is_unspecified and mine.version in (6, yours.version))  # `::` takes IPv4 too
        or (yours.is_unspecified and yours.version in (6, mine.version))
        for mine in left
        for yours in right
    )


def _addresses(host: str) -> frozenset[IPv4Address | IPv6Address]:
    if host.lower() == "localhost":
        return _LOCALHOST
    try:
        return frozenset({ip_address(host or "::")})
    except ValueError:
        return frozenset()


def _listen_error(port: ConfiguredPort) -> int | None:
    """Why nothing can listen there now, as the system's number; 0 for a host that is none."""
    try:
        try_listen(port.host, port.port)
    except (OSError, UnicodeError) as error:
        number = error.errno if isinstance(error, OSError) else None
        return number if number is not None and number > 0 else 0
    return None


def _unusable_ports(config: ProcessConfig) -> Iterator[str]:
    for one in listeners(config):
        number = _listen_error(one)
        if number in (None, errno.EADDRINUSE):
            continue
        if number in (errno.EACCES, errno.EPERM):
            way_out = (
                f"this user may not listen on {one.port}: take a port from 1024 on, or {_CHECK_AS}, "
                "if its unit has AmbientCapabilities=CAP_NET_BIND_SERVICE"
            )
        else:
            way_out = f"{one.host!r} is no address of this machine; 0.0.0.0 listens on all that it has"
        yield f"{one.named}: {way_out}"


def _closed(key: str, path: Path) -> str:
    """Why the file or folder cannot be used; "" if it can."""
    if key in READ_IF_THERE:
        return ""
    problem = _cannot_be_made(key, path) if key in MADE else _cannot_be_read(key, path)
    return f"key {key!r} = {str(path)!r}: {problem}" if problem else ""


def _cannot_be_read(key: str, path: Path) -> str:
    try:
        if path.is_dir():
            next(path.iterdir(), None)
            return "" if key in FOLDERS else "is a folder, not a file; name the file in it"
        with path.open("rb"):
            return "is a file, not a folder; name the folder that it is in" if key in FOLDERS else ""
    except FileNotFoundError:
        return f"is not there; {MUST_EXIST.get(key, 'make it, or take the key out')}"
    except PermissionError:
        return f"this user may not read it; {_CHECK_AS}"
    except OSError as error:
        return f"{error.strerror}; name another path"


def _cannot_be_made(key: str, path: Path) -> str:
    """Of what the process writes itself: its nearest folder must be there to be written to."""
    if path.exists() and path.is_dir() != (key in FOLDERS):
        return "is a folder, not a file; name a file" if path.is_dir() else "is a file, not a folder; name a folder"
    there = path if path.exists() else next(one for one in path.absolute().parents if one.exists())
    if not path.exists() and not there.is_dir():
        return f"cannot be made: {str(there)!r} is a file; name another path"
    if os.access(there, os.W_OK | (os.X_OK if there.is_dir() else 0)):
        return ""
    if key == "state_dir" and os.statvfs(there).f_flag & os.ST_RDONLY:
        return ""  # such an edge serves, and says so
    return f"this user may not write to {str(there)!r}; give it the folder (`install -d -o USER`), or {_CHECK_AS}"


def _certificate_problems(config: ProcessConfig, role: str) -> list[str]:
    try:
        tls_of(getattr(config, "tls", None), lambda: CertificateIdentity(role, getattr(config, "name", "")))  # type: ignore[arg-type]
    except StartError as error:
        return [str(error)]
    return []


def _model_problems(config: ProcessConfig) -> list[str]:
    root = getattr(config, "model_repository", None)
    try:
        if root is not None:
            Repository(root).manifests()
    except RepositoryError as error:
        return [f"key 'model_repository': {error}"]
    return []


def _paths(config: BaseModel) -> Iterator[tuple[str, Path]]:
    for key, value in _values(config):
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, Path):
                yield key, one


def _values(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        sections = [one for one in value if isinstance(one, BaseModel)] if isinstance(value, tuple) else ()
        if isinstance(value, BaseModel):
            yield from _values(value, f"{prefix}{name}.")
        elif sections:
            for one in sections:
                yield from _values(one, f"{prefix}{name}[].")
        else:
            yield f"{prefix}{name}", value
