"""A small file that another process writes is read again within a second of a change.

A poll of the file's stamp (inode, size, times of content and rights) finds a file that was put in place of another one
as well as one that was written to, on any file system, without a watch that can be lost. A file that cannot be read
leaves what was read before as it is, and is logged once: a typo must neither let every caller in nor shut every caller
out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, TypeVar

import structlog

from tidegate import clock
from tidegate.config import ConfigError
from tidegate.runtime.owned_task import OwnedTask

POLL_S: Final = 0.5  # with what follows from a change, a second
Content = TypeVar("Content")
Told = TypeVar("Told")
Stamp = tuple[int, int, int, int]

log = structlog.get_logger(__name__)


class FollowedFile(Generic[Content]):
    """`async with` reads the file, and follows it until the end. Raises ConfigError at the start only.

    Args:
        read: what the file says; raises ConfigError where it cannot be said.
        on_change: called on the loop with what it says after each change; not at the start.
        what: the content in words, for the log: "the keys".
        on_unusable: called on the loop with the reason, each time another one begins to keep the file from being read.
            Once the file can be read again `on_change` is called, whether or not it says something else.
        aside: whether `read` takes long enough for a thread of its own, except at the start.
    """

    def __init__(
        self,
        path: Path,
        read: Callable[[Path], Content],
        on_change: Callable[[Content], object],
        *,
        what: str,
        on_unusable: Callable[[str], object] = lambda _: None,
        aside: bool = False,
    ) -> None:
        self.path = path
        self._read = read
        self._on_change = on_change
        self._what = what
        self._on_unusable = on_unusable
        self._aside = aside
        self._stamp: Stamp | None = None
        self._complained = ""
        self._following = OwnedTask(self._follow, name=f"follow {path.name}")

    async def __aenter__(self) -> Content:
        self._stamp = self._stamped()
        content = self._read(self.path)
        self._following.start()
        return content

    async def __aexit__(self, *_: object) -> None:
        await self._following.aclose()

    def look(self) -> None:
        """Read the file again if it is another one than last time."""
        stamp = self._stamped()
        if stamp == self._stamp and not self._complained:
            return
        try:
            content = self._read(self.path)
        except Exception as error:
            self._complain(error)
        else:
            self._take(content, stamp)

    async def _look_aside(self) -> None:
        stamp = self._stamped()
        if stamp == self._stamp and not self._complained:
            return
        try:
            content = await asyncio.to_thread(self._read, self.path)
        except Exception as error:
            self._complain(error)
        else:
            self._take(content, stamp)

    def _take(self, content: Content, stamp: Stamp | None) -> None:
        self._stamp, self._complained = stamp, ""
        self._tell(self._on_change, content)

    def _tell(self, told: Callable[[Told], object], what: Told) -> None:
        """A defect of what is told must not end the following for good: it is told of the next change again."""
        try:
            told(what)
        except Exception:
            log.exception(f"a part of this process failed when it was told of a change of {self._what}")

    def _complain(self, error: Exception) -> None:
        """Once for each reason. A defect of ours must not end the following for good either."""
        why = str(error) if isinstance(error, ConfigError) else f"internal error: {type(error).__name__}"
        if why != self._complained:
            log.error(f"{self._what} stay as they were", why=why, exc_info=not isinstance(error, ConfigError))
            self._tell(self._on_unusable, why)
        self._complained = why

    async def _follow(self) -> None:
        while True:
            await clock.sleep(POLL_S)
            if self._aside:
                await self._look_aside()
            else:
                self.look()

    def _stamped(self) -> Stamp | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    def __repr__(self) -> str:
        return f"<FollowedFile {self.path}{', unusable now' if self._complained else ''}>"
