"""The key ring holds a running gateway's API keys, reloaded within a second of a change (`FollowedFile`)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from gateway.core.access.api_key import UNMATCHABLE_KEY, KeyRecord, KeyVerifier, parse_key
from gateway.identity.credential import UnprovedCredential
from gateway.identity.key_file import read_keys
from tidegate.caller import Identity
from tidegate.runtime.followed_file import FollowedFile

Changes = dict[str, list[str]]  # created · changed · revoked · removed → ids


class KeyRing:
    """Identifies callers by API key. `async with` reads and follows the file; ConfigError comes at the start only."""

    def __init__(self, path: Path, on_change: Callable[[Changes], None] = lambda _: None) -> None:
        self.path = path
        self._on_change = on_change
        self._verifiers: dict[str, KeyVerifier] = {}
        self._file = FollowedFile(path, read_keys, self._changed, what="the keys")

    async def __aenter__(self) -> KeyRing:
        self._take(await self._file.__aenter__())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._file.__aexit__()

    @property
    def ids(self) -> Collection[str]:
        return self._verifiers.keys()

    def identify(self, text: str, utc_s: float) -> Identity:
        """Return the identity of a key. Raises UnprovedCredential; an unknown key takes as long as a known one."""
        parts = parse_key(text)
        if parts is None:
            raise UnprovedCredential("this is no API key of this gateway", "malformed")
        verifier = self._verifiers.get(parts.id, UNMATCHABLE_KEY)
        if not verifier.opens(parts.secret, utc_s) or verifier is UNMATCHABLE_KEY:
            raise UnprovedCredential("this is no API key of this gateway", "wrong", f"key:{parts.id}")
        standing = verifier.record.standing(utc_s)
        if standing != "valid":
            verb = "has expired" if standing == "expired" else "was revoked"
            raise UnprovedCredential(f"API key {parts.id} {verb}", standing, verifier.identity.id)
        return verifier.identity

    def look(self) -> None:
        """Read the file again if it has changed since it was last read."""
        self._file.look()

    def _changed(self, records: tuple[KeyRecord, ...]) -> None:
        self._on_change(self._take(records))

    def _take(self, records: tuple[KeyRecord, ...]) -> Changes:
        before, now = {id: one.record for id, one in self._verifiers.items()}, {one.id: one for one in records}
        # Verifiers of unchanged records stay: other modules key their state by these identity objects.
        self._verifiers = {
            id: self._verifiers[id] if before.get(id) == one else KeyVerifier(one) for id, one in now.items()
        }
        changed = [id for id, one in now.items() if id in before and before[id] != one]
        revoked = [id for id in changed if now[id].revoked_at is not None and before[id].revoked_at is None]
        return {
            "created": [id for id in now if id not in before],
            "changed": [id for id in changed if id not in revoked],
            "revoked": revoked,
            "removed": [id for id in before if id not in now],
        }

    def __repr__(self) -> str:
        return f"<KeyRing {self.path} {len(self._verifiers)} keys>"
