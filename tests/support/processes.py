"""Whether processes have ended, asked without a race.

A process can go between two questions about it, so "does it exist, and is it a zombie?" is one question here. A zombie
has ended: its parent has not asked for its exit code yet, and in a container none may.
"""

import asyncio

import psutil

from tidegate import clock


def has_ended(process: int | psutil.Process) -> bool:
    """Whether the process of that id has ended. A handle also knows an id that another process has by now."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return not found.is_running() or found.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def until_ended(*processes: int | psutil.Process, within_s: float = 30.0) -> None:
    """Return once all of them have ended (a process of another parent can only be polled)."""
    async with asyncio.timeout(within_s):
        while not all(map(has_ended, processes)):
            await clock.sleep(0.01)
