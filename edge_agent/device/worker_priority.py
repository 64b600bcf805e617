"""Worker priority lowers the workers beneath the device's own programs, by nice value and by control group.

A device often exists for something else (a till, a camera), and answering requests comes second. The agent itself keeps
its priority: it costs next to nothing, and a heartbeat that is late makes a device look dead. Its workers, which
compute, are lowered before they load anything, so that every thread of their runtime inherits it.

    nice     the scheduler's share against other programs on the same core: 0 is equal, 19 is only idle time
    cgroup   a folder of cgroup v2 that systemd or a container runtime has made and delegated: its cpu.max and
             memory.max hold for all workers together, also where the agent itself is outside

Costs measured at warm-up stay valid, since they are measured under both.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from tidegate.runtime.process import StartError
from tidegate.workers.process import WorkerProcess
from tidegate.workers.sandbox import SandboxMode


def worker_starter(
    *, nice: int, cgroup: Path | None, sandbox: SandboxMode = "auto"
) -> Callable[[str], AbstractAsyncContextManager[WorkerProcess]]:
    """A function that starts a worker of a name under this nice value and control group.

    Raises:
        StartError: no process can be put into `cgroup`.
    """
    if cgroup is not None and not os.access(cgroup / "cgroup.procs", os.W_OK):
        raise StartError(
            f"key 'cgroup': {cgroup / 'cgroup.procs'} cannot be written; with systemd, `Delegate=yes` in the unit "
            "makes a folder below /sys/fs/cgroup that can"
        )

    @asynccontextmanager
    async def start(name: str) -> AsyncIterator[WorkerProcess]:
        async with WorkerProcess(name, sandbox=sandbox) as worker:
            if worker.pid is not None:
                _settle(worker.pid, nice, cgroup)
            yield worker

    return start


def _settle(pid: int, nice: int, cgroup: Path | None) -> None:
    """Set nice value and control group. Raises OSError, as a failed start does: such a worker must not compute."""
    if cgroup is not None:
        (cgroup / "cgroup.procs").write_text(f"{pid}\n", encoding="ascii")
    if nice:
        os.setpriority(os.PRIO_PROCESS, pid, nice)
