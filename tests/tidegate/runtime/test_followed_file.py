"""A file that is followed while what is told of its changes fails."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tidegate import clock
from tidegate.config import ConfigError
from tidegate.runtime import followed_file
from tidegate.runtime.followed_file import FollowedFile
from tidegate.storage.atomic_file import write_atomically


def read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ConfigError(f"cannot read {path}") from error


@pytest.mark.parametrize("aside", [False, True])
async def test_a_part_that_fails_when_it_is_told_is_told_of_the_next_change_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aside: bool
) -> None:
    monkeypatch.setattr(followed_file, "POLL_S", 0.01)
    path, told = tmp_path / "keys", list[str]()

    def tell(what: str) -> None:
        told.append(what)
        raise BrokenPipeError

    async def is_told(what: str) -> None:
        async with asyncio.timeout(30.0):
            while what not in told:
                await clock.sleep(0.01)

    path.write_text("one")
    with capture_logs() as logs:
        async with FollowedFile(path, read, tell, what="the keys", on_unusable=tell, aside=aside):
            write_atomically(path, b"second")
            await is_told("second")
            path.unlink()
            await is_told(f"cannot read {path}")
            write_atomically(path, b"third one")
            await is_told("third one")
    assert told == ["second", f"cannot read {path}", "third one"]
    assert sum("failed when it was told" in one["event"] for one in logs) == 3
