"""The source `file`: a list of targets in a file that people or another program keep.

The file may be replaced, renamed into place, or written in place; while it is missing or broken, what it said last
holds, and the source is away with the reason.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from gateway.core.fleet.found_targets import Found
from gateway.discovery.reports import Report, SourceAway, SourceSaid
from gateway.discovery.targets_file import read_targets
from tidegate.runtime.followed_file import FollowedFile


class FileSource:
    """`async with` reports what the file lists, and again after each change. Raises ConfigError at the start."""

    def __init__(self, name: str, path: Path, report: Report, *, has_tls: bool) -> None:
        self.name = name
        self._report = report
        self._file = FollowedFile(
            path,
            partial(read_targets, has_tls=has_tls),
            self._said,
            what=f"the targets of {name}",
            on_unusable=lambda why: report(SourceAway(name, why)),
            aside=True,  # some thousand targets take a quarter of a second
        )

    async def __aenter__(self) -> FileSource:
        self._said(await self._file.__aenter__())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._file.__aexit__()

    def _said(self, found: tuple[Found, ...]) -> None:
        self._report(SourceSaid(self.name, found))

    def __repr__(self) -> str:
        return f"<FileSource {self._file!r}>"
