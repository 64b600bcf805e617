"""What keeps a valid configuration from starting here: files that are missing or closed, ports, the broker's address.

A configuration model checks what a file says; this looks at the machine as well. Keys are found by name, so no process
is known here: those of `MUST_EXIST` name what somebody else has put there, while folders for state are made at start.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import BaseModel

from tidegate.config import ProcessConfig
from tidegate.mqtt.broker_url import BrokerUrl
from tidegate.runtime.ports import try_listen
from tidegate.servers.address import format_address

MUST_EXIST: Final = frozenset(
    {
        "attestation.allowed",
        "attestation.key",
        "auth.jwt.jwks_file",
        "auth.keys_file",
        "dial_key_file",
        "model_repository",
        "rollout.keys",
        "tls.ca",
        "tls.cert",
        "tls.client_ca",
        "tls.key",
    }
)
_MADE_BY: Final = {
    "attestation.key": "`tidegate attest init` makes one",
    "auth.keys_file": "`tidegate keys create` makes one",
    "model_repository": "`tidegate model add` or `tidegate model build` makes one",
    "rollout.keys": "`tidegate keys signing create` makes one",
    "tls.ca": "`tidegate pki issue` makes them",
    "tls.cert": "`tidegate pki issue` makes them",
    "tls.key": "`tidegate pki issue` makes them",
}
_HOST_OF: Final = {"admin_port": "admin_host", "metrics_port": "metrics_host"}
_EVERY: Final = frozenset({"0.0.0.0", "::", ""})


class ConfiguredPort(NamedTuple):
    """A port that the process would open."""

    key: str
    host: str
    port: int


def said_wrongly(config: ProcessConfig) -> list[str]:
    """What can start on no machine."""
    return [*_broker_problems(config), *_shared_ports(listeners(config))]


def missing_here(config: ProcessConfig) -> list[str]:
    """What cannot start on this machine, as this user."""
    return [problem for key, path in _paths(config) if key in MUST_EXIST and (problem := _closed(key, path))]


def taken_ports(config: ProcessConfig) -> list[str]:
    """Ports that something listens on now, which may be this very process."""
    taken = []
    for key, host, port in listeners(config):
        try:
            try_listen(host, port)
        except OSError as error:
            taken.append(f"key {key!r} = {port}: {format_address(host, port)}: {error.strerror}")
    return taken


def listeners(config: ProcessConfig) -> list[ConfiguredPort]:
    """The ports with a fixed number."""
    every = getattr(config, "host", "127.0.0.1")
    found = []
    for key, value in _values(config):
        if key.endswith("port") and type(value) is int and value:
            found.append(ConfiguredPort(key, getattr(config, _HOST_OF.get(key, "host"), None) or every, value))
    return found


def _broker_problems(config: ProcessConfig) -> Iterator[str]:
    url = getattr(config, "mqtt", None)
    if url:
        try:
            BrokerUrl.parse(url)
        except ValueError as error:  # it names the address without its password
            yield f"key 'mqtt': {error}"


def _shared_ports(ports: list[ConfiguredPort]) -> Iterator[str]:
    for index, one in enumerate(ports):
        for other in ports[:index]:
            together = one.host == other.host or not _EVERY.isdisjoint((one.host, other.host))
            if one.port == other.port and together:
                yield f"keys {other.key!r} and {one.key!r} are both {one.port}: give one of them another port"


def _closed(key: str, path: Path) -> str:
    """Why the file or folder cannot be read; "" if it can."""
    try:
        if path.is_dir():
            next(path.iterdir(), None)
            return "" if key == "model_repository" else f"key {key!r} = {str(path)!r}: is a folder, not a file"
        with path.open("rb"):
            return f"key {key!r} = {str(path)!r}: is a file, not a folder" if key == "model_repository" else ""
    except FileNotFoundError:
        hint = _MADE_BY.get(key)
        return f"key {key!r} = {str(path)!r}: is not there{f'; {hint}' if hint else ''}"
    except PermissionError:
        return f"key {key!r} = {str(path)!r}: this user may not read it; check as the user that the service runs as"
    except OSError as error:
        return f"key {key!r} = {str(path)!r}: {error.strerror}"


def _paths(config: BaseModel) -> Iterator[tuple[str, Path]]:
    for key, value in _values(config):
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, Path):
                yield key, one


def _values(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _values(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
