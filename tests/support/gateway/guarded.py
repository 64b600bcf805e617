"""A gateway that asks for credentials, with keys of every standing, in front of one echoing pool."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from msgspec.structs import replace

from gateway.app import Gateway
from gateway.core.access.api_key import ID_BYTES, SALT_BYTES, SECRET_BYTES, KeyRecord, new_key
from gateway.identity.key_file import edit_keys
from tests.support.gateway.app import Far, configured, running, target
from tidegate import clock
from tidegate.caller import Grant, Right

ALL: tuple[Right, ...] = ("infer", "metrics", "admin", "act-for-others")
REFUSED = ("none", "wrong", "unknown", "malformed", "scheme", "expired", "revoked")


@dataclass
class Keys:
    """The keys in a file, by what they are for."""

    path: Path
    texts: dict[str, str]
    records: dict[str, KeyRecord]

    def add(self, name: str, grant: Grant, *, expires_in_s: float | None = None) -> str:
        now = clock.utc_s()
        expires_at = None if expires_in_s is None else now + expires_in_s
        record, text = new_key(
            grant, secrets.token_bytes(ID_BYTES + SALT_BYTES + SECRET_BYTES), utc_s=now, expires_at=expires_at
        )
        self.put(name, record, text)
        return text

    def put(self, name: str, record: KeyRecord, text: str) -> None:
        with edit_keys(self.path) as records:
            records[record.id] = record
        self.texts[name], self.records[name] = text, record

    def revoke(self, name: str) -> None:
        self.put(name, replace(self.records[name], revoked_at=clock.utc_s()), self.texts[name])

    def headers(self, name: str) -> dict[str, str]:
        """The header that shows the key of this name, or one of the kinds of `REFUSED`."""
        good = self.texts["good"]
        shown = {
            "none": "",
            "wrong": f"Bearer {good[:-1]}{'0' if good[-1] != '0' else '1'}",
            "unknown": f"Bearer tg_{'0' * 12}_{good[-64:]}",
            "malformed": "Bearer tg_nonsense",
            "scheme": "Basic dXNlcjpwYXNz",
        }.get(name, f"Bearer {self.texts.get(name, '')}")
        return {"authorization": shown} if shown else {}


def keys_in(folder: Path) -> Keys:
    keys = Keys(folder / "keys.json", {}, {})
    keys.add("good", Grant("acme"))
    keys.add("narrow", Grant("other", models=("other-*",)))
    keys.add("operator", Grant("ops", rights=("admin", "metrics")))
    keys.add("proxy", Grant("proxy", rights=("infer", "act-for-others")))
    keys.add("expired", Grant("acme"), expires_in_s=-1.0)
    keys.add("revoked", Grant("acme"))
    keys.revoke("revoked")
    return keys


@asynccontextmanager
async def guarded(
    folder: Path, keys: Keys | None = None, auth: Mapping[str, Any] | None = None, **more: Any
) -> AsyncIterator[tuple[Gateway, aiohttp.ClientSession, Keys, Far]]:
    keys = keys or keys_in(folder)
    far = Far("pool/main")
    async with running(far):
        config = configured(folder, target(far), auth={"keys_file": keys.path, **(auth or {})}, **more)
        async with Gateway(config) as gateway, aiohttp.ClientSession() as session:
            await gateway.static_targets_tried(30.0)
            yield gateway, session, keys, far
