"""A reader of a page, who does what the page's blocks say, in a folder and a network of its own.

Every command and every file comes from the blocks: `sh` is run and ends, `terminal` is left running, and `python` is
saved under the name in its first line. The network is a namespace, so that the pages' ports are free.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from tests.contract.pages.text import Piece, blocks, prose
from tests.e2e.guides.terminal import Terminal
from tests.e2e.stack import eventually
from tests.support.mqtt.brokers import MOSQUITTO

ROOT = Path(__file__).resolve().parents[3]
LOOK_S: Final = 0.5  # most looks are commands
_ALONE = ["unshare", "-n"] if os.geteuid() == 0 else ["unshare", "-rn"]
# Few machines of tests have it; ours reads the options that the page shows.
_DNSMASQ = shutil.which("dnsmasq") or f"{sys.executable} -m tests.support.discovery.as_dnsmasq"
_INSIDE = ["-n"] if os.geteuid() == 0 else ["-U", "-n", "--preserve-credentials"]


def namespaces_work() -> bool:
    """Whether a process may have a network of its own here."""
    with suppress(OSError):
        return (
            subprocess.run([*_ALONE, "ip", "link", "set", "lo", "up"], capture_output=True, check=False).returncode == 0
        )
    return False


NEEDS_A_NETWORK: Final = pytest.mark.skipif(
    MOSQUITTO is None or not namespaces_work(), reason="needs Mosquitto, and network namespaces"
)


def sections(page: str, *kinds: str) -> dict[str, list[Piece]]:
    """The blocks of these kinds (all kinds without any), under the page's headings `##`; before the first: ``""``."""
    headings = [(0, ""), *((one.line, one.text[3:]) for one in prose(page) if one.text.startswith("## "))]
    found: dict[str, list[Piece]] = {heading: [] for _, heading in headings}
    for block in blocks(page, *kinds):
        under = [heading for line, heading in headings if line < block.line][-1]
        found[under].append(block)
    return found


class Reader:
    """One who reads at a machine with several terminals, where `tidegate`, `python` and `mosquitto` are installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir()
        assert MOSQUITTO is not None
        for name, line in (
            ("tidegate", f'PYTHONPATH={ROOT} exec {sys.executable} -P -m tidegate.cli "$@"'),
            ("python", f'PYTHONPATH={ROOT} exec {sys.executable} "$@"'),
            ("python3", f'PYTHONPATH={ROOT} exec {sys.executable} "$@"'),
            ("mosquitto", f'exec {MOSQUITTO} "$@"'),
            ("dnsmasq", f'PYTHONPATH={ROOT} exec {_DNSMASQ} "$@"'),
        ):
            (programs / name).write_text(f"#!/bin/sh\n{line}\n")
            (programs / name).chmod(0o755)
        # A gateway's operator's token is named by its port, and readers that follow pages side by side use the same.
        alone = {"XDG_RUNTIME_DIR": str(folder), "COLUMNS": "200"}
        self._environment = {**os.environ, **alone, "PATH": f"{programs}:{os.environ['PATH']}"}
        self._opened = 0
        self._terminals: dict[str, subprocess.Popen[bytes]] = {}
        self._network = subprocess.Popen(
            [*_ALONE, "sh", "-ec", "ip link set lo up; echo up; exec sleep infinity"], stdout=subprocess.PIPE
        )
        assert self._network.stdout is not None
        assert self._network.stdout.readline() == b"up\n"

    def follow(self, steps: list[Piece]) -> list[str]:
        """Do what these blocks of `sh`, `python` and `terminal` say; returns what each command printed."""
        printed = []
        for step in steps:
            if step.kind == "python":
                name = re.match(r"# (\w+\.py)\n", step.text)
                assert name is not None, f"not said where to save it: {step.text}"
                (self.folder / name[1]).write_text(step.text)
            elif step.kind == "terminal":
                self.start(step.text)
            else:
                printed.append(self.run(step.text))
        return printed

    def run(self, script: str) -> str:
        """Run a command that ends, and well; returns what it printed, errors too."""
        ran = subprocess.run(
            self._within(["sh", "-euc", script]), cwd=self.folder, env=self._environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=120, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, f"{script}\n{ran.stdout}\n{self._said()}"
        return ran.stdout

    def start(self, command: str) -> None:
        """In a terminal of its own; returns when it serves."""
        out = self.folder / f"{command.rpartition(' ')[2]}.out"
        with out.open("wb") as written:
            self._terminals[command] = subprocess.Popen(
                self._within(["sh", "-euc", f"exec {command}"]), cwd=self.folder, env=self._environment,
                stdin=subprocess.DEVNULL, stdout=written, stderr=subprocess.STDOUT,
            )  # fmt: skip
        if command.startswith("tidegate"):
            self.until(lambda: any(is_ready(line) for line in out.read_text(errors="replace").splitlines()), command)

    def terminal(self) -> Terminal:
        """A terminal in which a page's commands are typed one by one; its caller closes it."""
        self._opened += 1
        shell = self._within(["bash", "--norc", "--noprofile"])
        return Terminal(shell, self.folder / f"terminal-{self._opened}", self.folder, self._environment)

    def stop(self, word: str) -> None:
        """Ctrl-C in the terminal whose command has this word."""
        (command,) = (one for one in self._terminals if word in one)
        process = self._terminals.pop(command)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0, self._said()

    def until_status(self, words: str) -> None:
        self.until(lambda: words in self.run("tidegate status"), words)

    def until(self, happened: Callable[[], bool], what: str) -> None:
        """Wait for it; what the terminals said is part of the failure."""
        try:
            eventually(happened, 60, what, every_s=LOOK_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._said()}") from None

    def close(self) -> None:
        for process in [*self._terminals.values(), self._network]:
            process.terminate()
        for process in [*self._terminals.values(), self._network]:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._network.stdout is not None:
            self._network.stdout.close()

    def _within(self, command: list[str]) -> list[str]:
        return ["nsenter", "-t", str(self._network.pid), *_INSIDE, *command]

    def _said(self) -> str:
        return "\n".join(
            f"{path.name}: {path.read_text(errors='replace')[-2000:]}" for path in self.folder.glob("*.out")
        )


def is_ready(line: str) -> bool:
    """Whether by this line a process says that it serves."""
    return line.startswith("{") and json.loads(line).get("event") == "ready"
