"""The address of a broker and the credentials for it: `mqtts://edge-1:PASSWORD@broker.local?protocol=5`.

Texts about an address never contain its password: a URL comes from a configuration, its errors end in logs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, cast
from urllib.parse import parse_qs, unquote, urlsplit

Version = Literal["5", "3.1.1"]
_PORTS: Final = {"mqtt": 1883, "mqtts": 8883}


@dataclass(frozen=True, slots=True)
class BrokerUrl:
    """`mqtt[s]://[user:password@]host[:port][?protocol=5|3.1.1|auto]`; `mqtts` is over TLS."""

    host: str
    port: int
    username: str | None
    password: str | None = field(repr=False)
    version: Literal["auto"] | Version
    secure: bool = False

    @classmethod
    def parse(cls, url: str) -> BrokerUrl:
        """Raises ValueError, which names what is wrong with the URL without its password."""
        public = url.rpartition("@")[2]
        try:
            parts = urlsplit(url)
        except ValueError:  # its words may hold all that stands before the path
            raise ValueError(f"{public!r} is not a broker's address; it reads like mqtt://host:1883") from None
        if parts.scheme not in _PORTS or not parts.hostname:
            raise ValueError(f"{public!r} is not a broker's address; it reads like mqtt://host:1883 or mqtts://host")
        version = parse_qs(parts.query).get("protocol", ["auto"])[0]
        if version not in ("auto", "5", "3.1.1"):
            raise ValueError(f"{public!r}: protocol is 5, 3.1.1 or auto, not {version!r}")
        username = unquote(parts.username) if parts.username else None
        password = unquote(parts.password) if parts.password else None
        try:
            port = parts.port or _PORTS[parts.scheme]
        except ValueError:  # which urllib words without the address
            raise ValueError(f"{public!r} has no port from 1 to 65535; it reads like mqtt://host:1883") from None
        return cls(parts.hostname, port, username, password, cast(Version, version), secure=parts.scheme == "mqtts")

    def __str__(self) -> str:
        return f"{'mqtts' if self.secure else 'mqtt'}://{self.host}:{self.port}"
