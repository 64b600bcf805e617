"""All processes of a session are ended, those that remove shared memory last and by themselves."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from cloud_pool.vllm.session import kill_session, session_members
from tidegate import clock

pytestmark = pytest.mark.slow

SHARES = """
import subprocess, sys, time
from multiprocessing.shared_memory import SharedMemory
shared = SharedMemory(create=True, size=4096)
print(shared.name, flush=True)
time.sleep(1000)
"""
LEADS = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {SHARES!r}])
sys.exit(abs(child.wait()))
"""


async def until_empty(leader: int) -> None:
    async with asyncio.timeout(10.0):
        while set(session_members(leader)) - {leader}:
            await clock.sleep(0.01)


def has_tracker(leader: int) -> bool:
    return any(b"resource_tracker" in Path(f"/proc/{one}/cmdline").read_bytes() for one in session_members(leader))


async def until_tracked(leader: int) -> None:
    """Until the tracker is one by its command line: between fork and exec it looks like the process that shares."""
    async with asyncio.timeout(10.0):
        while not has_tracker(leader):
            await clock.sleep(0.01)


async def test_what_was_shared_is_gone_with_those_that_shared_it() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", LEADS, stdout=PIPE, start_new_session=True)
    assert process.stdout is not None
    name = (await process.stdout.readline()).decode().strip()
    await until_tracked(process.pid)
    from multiprocessing.shared_memory import SharedMemory

    assert len(session_members(process.pid)) == 3, "the leader, the one that shares, and its tracker"
    assert kill_session(process.pid, trackers=False)
    await until_empty(process.pid)
    assert await process.wait() == 9 and not kill_session(process.pid, trackers=True)
    with pytest.raises(FileNotFoundError):
        SharedMemory(name)
