"""One node of a Ray cluster, which can be lost as a whole and come back.

Every process of a node is in a PID namespace of its own. So SIGKILL for its first one is what a power cut is: all end
at once, whatever session and parent they gave themselves, and nothing is left behind. Nodes of one cluster differ in
their address, as several machines do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

ROOT: Final = Path(__file__).parents[3]
PYTHON: Final = ROOT / ".venv-ray" / "bin" / "python"
_USUAL: Final = (
    *("--object-store-memory", "80000000", "--disable-usage-stats"),
    *("--min-worker-port", "20000", "--max-worker-port", "20999"),
)
_ALONE: Final = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
_GONE_WITHIN_S: Final = 20.0


class RayNode:
    """`start` it, `kill` it, `start` it again.

    Args:
        folder: for what `ray start` says.
        words: of `ray start`, beside the address, the folder and the usual.
        environment: for all its processes, beside this process's own.
        supervised: as with `ray start --block`, where Ray ends the node once one of its processes has ended, and leaves
            it to a supervisor to start the node again. Otherwise what has ended stays away and the rest goes on. May be
            set before each start.
    """

    def __init__(
        self,
        name: str,
        address: str,
        folder: Path,
        words: list[str],
        environment: Mapping[str, str],
        *,
        supervised: bool = True,
    ) -> None:
        self.name = name
        self.supervised = supervised
        self.sessions: list[Path] = []
        self._log_path = folder / f"ray-{name}.log"
        self._words = ["--node-ip-address", address, *words]
        self._environment = {**os.environ, **environment}
        self._outer: subprocess.Popen[bytes] | None = None
        self._added: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Begin with an empty disk, as a machine does that takes the place of one that was lost."""
        # Names of sockets are within: a system takes 107 bytes of them, and a test's own folder is long.
        self.sessions.append(Path(tempfile.mkdtemp(prefix=f"ray-{self.name[0]}")))
        ray = [str(PYTHON.with_name("ray")), "start", *_USUAL, "--temp-dir", str(self.sessions[-1]), *self._words]
        inner = [*ray, "--block"] if self.supervised else ["sh", "-c", '"$@" && exec sleep infinity', "sh", *ray]
        self._outer = self._run([*_ALONE, *inner], self._environment)

    def kill(self) -> None:
        """Take the power and the disk away; returns once nothing of the node runs."""
        if self._outer is None:
            return
        with suppress(psutil.NoSuchProcess):
            outer = psutil.Process(self._outer.pid)
            for one in outer.children() or [outer]:  # it may not have forked yet
                one.kill()  # the first of a namespace, and with it the whole
        for process in (self._outer, *self._added):
            process.wait(_GONE_WITHIN_S)
        self._outer, self._added = None, []
        shutil.rmtree(self.sessions[-1], ignore_errors=True)

    @property
    def alive(self) -> bool:
        return self._outer is not None and self._outer.poll() is None

    def process(self, pid: int) -> psutil.Process:
        """The one that has this number within the node, which is how Ray knows it. Raises LookupError."""
        for one in self._processes():
            with suppress(OSError):
                lines = Path(f"/proc/{one.pid}/status").read_text().splitlines()
                if next(line for line in lines if line.startswith("NSpid:")).split()[-1] == str(pid):
                    return one
        raise LookupError(f"{self.name} has no process {pid}")

    def program(self, name: str) -> psutil.Process:
        """The process that runs it. Raises LookupError."""
        for one in self._processes():
            with suppress(psutil.Error, IndexError):
                if Path(one.cmdline()[0]).name == name:
                    return one
        raise LookupError(f"{self.name} runs no {name}")

    def add(self, words: list[str], environment: Mapping[str, str]) -> None:
        """Start a program within the node, as a supervisor of that program alone would."""
        assert self._outer is not None, f"{self.name} was not started"
        (first,) = psutil.Process(self._outer.pid).children()
        self._added.append(self._run(["nsenter", "--target", str(first.pid), "--pid", "--mount", *words], environment))

    def _processes(self) -> list[psutil.Process]:
        assert self._outer is not None, f"{self.name} was not started"
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self._outer.pid).children(recursive=True)
        return []

    def _run(self, words: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with open(self._log_path, "ab") as log:
            return subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=ROOT,
                env=dict(environment),
            )

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")[-3000:]

    def __repr__(self) -> str:
        return f"<RayNode {self.name} {'up' if self.alive else 'down'}>"
