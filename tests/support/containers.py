"""Podman for tests, with images and containers in a folder of the test's own, also where cgroups are v1 and v2.

crun refuses machines where both versions of cgroups are mounted. There everything runs in one mount namespace that has
an empty v2 only, kept by a process that sleeps. Containers share the network of the machine: no bridge is made.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
PROGRAMS: Final = ("podman", "crun", "mmdebstrap", "unshare", "nsenter")
_UNIFIED: Final = "umount -R /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup; echo ready; exec sleep 100000"
# As closed as an image of ours can be run.
CLOSED: Final = ("--read-only", "--tmpfs=/tmp", "--cap-drop=all", "--security-opt=no-new-privileges")


def missing() -> list[str]:
    """What has to be installed first; root where namespaces need it."""
    lacks = [one for one in PROGRAMS if shutil.which(one) is None]
    return lacks if os.geteuid() == 0 else [*lacks, "root"]


class Podman:
    """Runs podman's commands on a store in `folder`."""

    def __init__(self, folder: Path, prefix: Sequence[str] = ()) -> None:
        self.command = [*prefix, "podman", f"--root={folder / 'store'}", f"--runroot={folder / 'run'}"]

    def __call__(self, *words: str, timeout_s: float = 120.0, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([*self.command, *words], capture_output=True, text=True, timeout=timeout_s, check=False)
        assert not check or done.returncode == 0, f"podman {' '.join(words)}:\n{done.stdout}\n{done.stderr}"
        return done

    def run(self, name: str, image: str, *options: str) -> None:
        """Start a container in the background."""
        # Under what this process has, since crun may not be allowed to raise them.
        limits = ("--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096")
        shared = ("--network=host", "--cgroups=disabled", *limits)
        self("run", "--detach", f"--name={name}", *shared, *CLOSED, *options, image)

    def inspect(self, thing: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self("inspect", thing).stdout)[0]
        return found

    def __repr__(self) -> str:
        return f"<Podman {self.command[-2]}>"


@contextlib.contextmanager
def podman(folder: Path) -> Iterator[Podman]:
    """Podman, and at the end none of its containers."""
    unified = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    with contextlib.ExitStack() as stack:
        prefix: list[str] = []
        if not unified:
            keeper = subprocess.Popen(
                ["unshare", "--mount", "sh", "-c", _UNIFIED], stdout=subprocess.PIPE, text=True, cwd=ROOT
            )
            stack.callback(_end, keeper)
            assert keeper.stdout is not None and keeper.stdout.readline() == "ready\n"
            prefix = ["nsenter", f"--target={keeper.pid}", "--mount", "--wd"]
        engine = Podman(folder, prefix)
        try:
            yield engine
        finally:
            engine("rm", "--force", "--all", "--time=1", check=False)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
