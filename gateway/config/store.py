"""The section `store`: a Redis or Valkey that gateways side by side share."""

from __future__ import annotations

from pathlib import Path
from typing import Self
from urllib.parse import unquote, urlsplit

from pydantic import Field, field_validator, model_validator

from tidegate.config import Section
from tidegate.servers.address import is_loopback


class SharedStoreConfig(Section):
    """Where the store is, and how long ahead quotas are leased from it (`docs/gateways.md`)."""

    url: str = Field(
        description="redis://[USER:PASSWORD@]HOST[:PORT][/DATABASE], or rediss:// over TLS; plain text on loopback "
        "only, unless `plain_text` allows it."
    )
    password_file: Path | None = Field(
        None, description="File with the store's password, in place of one in `url`; only its first line counts."
    )
    ca: Path | None = Field(
        None, description="The CA that the store's certificate comes from, PEM. None: those that this system trusts."
    )
    cert: Path | None = Field(None, description="Certificate that is shown to the store, PEM. None: none is.")
    key: Path | None = Field(None, description="The certificate's key, PEM.")
    plain_text: bool = Field(
        False, description="Whether redis:// may go to another machine, where the network itself is trusted."
    )
    lease_ms: int = Field(
        200,
        ge=100,
        le=500,
        description="How long ahead quotas are leased, in milliseconds. More asks the store less often, and leaves "
        "more of a quota where it may not be needed.",
    )
    timeout_ms: int = Field(
        500,
        ge=50,
        le=5000,
        description="How long the store may take to answer, in milliseconds; beyond, quotas are shared without it. No "
        "request waits for it.",
    )

    @field_validator("url")
    @classmethod
    def _url_is_valid(cls, url: str) -> str:
        parts, public = urlsplit(url), url.rpartition("@")[2]
        if parts.scheme not in ("redis", "rediss") or not parts.hostname:
            raise ValueError(f"{public!r} is not a store's address; it reads like redis://host:6379/0 or rediss://host")
        database = parts.path.strip("/")
        if database and not (database.isdecimal() and int(database) < 1000):
            raise ValueError(f"{public!r}: what follows the / is the number of a database, not {database!r}")
        if parts.query:
            raise ValueError(f"{public!r} has a query; options of the store are keys of their own in this section")
        try:
            parts.port  # noqa: B018  # raises where it is none
        except ValueError:  # which urllib words without the address
            raise ValueError(f"{public!r} has no port from 1 to 65535; it reads like redis://host:6379") from None
        return url

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        parts = urlsplit(self.url)
        secure = parts.scheme == "rediss"
        if not secure and not self.plain_text and not is_loopback(parts.hostname or ""):
            raise ValueError(
                f"store.url {self.public!r} goes to another machine in plain text: use rediss://, or plain_text: true "
                "where the network itself is trusted"
            )
        if not secure and (self.ca or self.cert):
            raise ValueError("store.ca and store.cert need rediss:// in store.url: redis:// is plain text")
        if (self.cert is None) != (self.key is None):
            raise ValueError("store.cert and store.key belong together: set both or none")
        if parts.password and self.password_file:
            raise ValueError("the store has two passwords, one in store.url and store.password_file: leave one out")
        return self

    @property
    def public(self) -> str:
        """The address without its password, for logs."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{self.url.rpartition('@')[2].removeprefix(parts.scheme + '://')}"

    @property
    def address(self) -> tuple[str, int, int]:
        """Host, port and database."""
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 6379, int(parts.path.strip("/") or 0)

    @property
    def secure(self) -> bool:
        return urlsplit(self.url).scheme == "rediss"

    @property
    def username(self) -> str | None:
        name = urlsplit(self.url).username
        return unquote(name) if name else None

    def password(self) -> str | None:
        """The password, from the file where one is named. Raises OSError."""
        if self.password_file is not None:
            return self.password_file.read_text(encoding="utf-8").partition("\n")[0].strip()
        password = urlsplit(self.url).password
        return unquote(password) if password else None
