"""API keys as a running gateway knows them: the file's, reloaded within a second of a change.

A poll of the file's stamp (inode, size, time) finds a file that was put in place of another one as well as one that was
written to, on any file system, without a watch that can be lost. A file that cannot be read leaves the keys as they
are, and says so once: a typo must neither let everybody in nor shut everybody out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final

import structlog

from gateway.core.api_key import NOBODY, KeyRecord, Lock, shown
from gateway.identity.key_file import read_keys
from gateway.identity.proof import Unproved
from tidegate import clock
from tidegate.config import ConfigError
from tidegate.identity import Identity

POLL_S: Final = 1.0
Changes = dict[str, list[str]]  # created · changed · revoked · removed → ids
Stamp = tuple[int, int, int]

log = structlog.get_logger(__name__)


class KeyRing:
    """`async with` reads the file, and follows it until the end. Raises ConfigError at the start only."""

    def __init__(self, path: Path, on_change: Callable[[Changes], None] = lambda _: None) -> None:
        self.path = path
        self._on_change = on_change
        self._locks: dict[str, Lock] = {}
        self._stamp: Stamp | None = None
        self._complained: str = ""
        self._following: asyncio.Task[None] | None = None

    async def __aenter__(self) -> KeyRing:
        self._stamp = self._stamped()
        self._take(read_keys(self.path))
        self._following = asyncio.create_task(self._follow(), name="keys-file")
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._following is not None:
            self._following.cancel()
            with suppress(asyncio.CancelledError):
                await self._following

    @property
    def ids(self) -> Collection[str]:
        return self._locks.keys()

    def identify(self, text: str, utc_s: float) -> Identity:
        """Whose key this is. Raises Unproved; the same work is done whether or not there is such a key."""
        parts = shown(text)
        if parts is None:
            raise Unproved("this is no API key of this gateway", "malformed")
        lock = self._locks.get(parts.id, NOBODY)
        if not lock.opens(parts.secret, utc_s) or lock is NOBODY:
            raise Unproved("this is no API key of this gateway", "wrong", f"key:{parts.id}")
        standing = lock.record.standing(utc_s)
        if standing != "valid":
            verb = "has expired" if standing == "expired" else "was revoked"
            raise Unproved(f"API key {parts.id} {verb}", standing, lock.identity.id)
        return lock.identity

    def look(self) -> None:
        """Read the file again if it is another one than last time."""
        stamp = self._stamped()
        if stamp == self._stamp:
            return
        try:
            records = read_keys(self.path)
        except ConfigError as error:
            if str(error) != self._complained:
                log.error("the keys stay as they were", why=str(error))
            self._complained = str(error)
            return
        self._stamp, self._complained = stamp, ""
        self._on_change(self._take(records))

    async def _follow(self) -> None:
        while True:
            await clock.sleep(POLL_S)
            self.look()

    def _take(self, records: tuple[KeyRecord, ...]) -> Changes:
        before, now = {id: lock.record for id, lock in self._locks.items()}, {one.id: one for one in records}
        # Locks of unchanged records stay: their identities are what others keep things by.
        self._locks = {id: self._locks[id] if before.get(id) == one else Lock(one) for id, one in now.items()}
        changed = [id for id, one in now.items() if id in before and before[id] != one]
        revoked = [id for id in changed if now[id].revoked_at is not None and before[id].revoked_at is None]
        return {
            "created": [id for id in now if id not in before],
            "changed": [id for id in changed if id not in revoked],
            "revoked": revoked,
            "removed": [id for id in before if id not in now],
        }

    def _stamped(self) -> Stamp | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns

    def __repr__(self) -> str:
        return f"<KeyRing {self.path} {len(self._locks)} keys>"
