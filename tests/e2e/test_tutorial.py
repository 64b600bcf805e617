"""The tutorial `docs/tutorial.md` is followed to the letter, in a folder and a network of its own.

Every command and every file comes from the page's code blocks, in its order: `sh` is run and ends, `terminal` is left
running, and `python` is saved under the name in its first line. What the page says in words (stop the pool, start it
again) is done between its sections. The network is a namespace, so that the page's ports are free.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.contract.pages.text import blocks, prose
from tests.e2e.stack import eventually
from tests.support.mqtt.brokers import MOSQUITTO

ROOT = Path(__file__).resolve().parents[2]
PAGE = "docs/tutorial.md"
_ALONE = ["unshare", "-n"] if os.geteuid() == 0 else ["unshare", "-rn"]
_INSIDE = ["-n"] if os.geteuid() == 0 else ["-U", "-n", "--preserve-credentials"]


def namespaces_work() -> bool:
    with suppress(OSError):
        return (
            subprocess.run([*_ALONE, "ip", "link", "set", "lo", "up"], capture_output=True, check=False).returncode == 0
        )
    return False


pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.needs_mosquitto,
    pytest.mark.skipif(MOSQUITTO is None or not namespaces_work(), reason="needs Mosquitto, and network namespaces"),
]


def sections() -> dict[str, list[tuple[str, str]]]:
    """The blocks that are to be run, under their headings."""
    headings = [(line.line, line.text.removeprefix("## ")) for line in prose(PAGE) if line.text.startswith("## ")]
    found: dict[str, list[tuple[str, str]]] = {heading: [] for _, heading in headings}
    for block in blocks(PAGE, "sh", "python", "terminal"):
        under = [heading for line, heading in headings if line < block.line][-1]
        found[under].append((block.kind, block.text))
    return found


class Reader:
    """A reader of the page, at a machine with several terminals."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        programs = folder / "bin"
        programs.mkdir()
        assert MOSQUITTO is not None
        for name, line in (
            ("tidegate", f'PYTHONPATH={ROOT} exec {sys.executable} -P -m tidegate.cli "$@"'),
            ("python", f'PYTHONPATH={ROOT} exec {sys.executable} "$@"'),
            ("mosquitto", f'exec {MOSQUITTO} "$@"'),
        ):
            (programs / name).write_text(f"#!/bin/sh\n{line}\n")
            (programs / name).chmod(0o755)
        self._environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "COLUMNS": "200"}
        self._terminals: dict[str, subprocess.Popen[bytes]] = {}
        self._network = subprocess.Popen(
            [*_ALONE, "sh", "-ec", "ip link set lo up; echo up; exec sleep infinity"], stdout=subprocess.PIPE
        )
        assert self._network.stdout is not None
        assert self._network.stdout.readline() == b"up\n"

    def follow(self, section: str) -> list[str]:
        """Do what this section's blocks say; returns what each command printed."""
        printed = []
        for kind, text in sections()[section]:
            if kind == "python":
                name = re.match(r"# (\w+\.py)\n", text)
                assert name is not None, f"not said where to save it: {text}"
                (self._folder / name[1]).write_text(text)
            elif kind == "terminal":
                self.start(text)
            else:
                printed.append(self.run(text))
        return printed

    def run(self, script: str) -> str:
        ran = subprocess.run(
            self._within(["sh", "-euc", script]), cwd=self._folder, env=self._environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=120, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, f"{script}\n{ran.stdout}\n{self._said()}"
        return ran.stdout

    def start(self, command: str) -> None:
        """In a terminal of its own; returns when it serves."""
        out = self._folder / f"{command.rpartition(' ')[2]}.out"
        with out.open("wb") as written:
            self._terminals[command] = subprocess.Popen(
                self._within(["sh", "-euc", f"exec {command}"]), cwd=self._folder, env=self._environment,
                stdin=subprocess.DEVNULL, stdout=written, stderr=subprocess.STDOUT,
            )  # fmt: skip
        if command.startswith("tidegate"):
            self._until(lambda: any(is_ready(line) for line in out.read_text(errors="replace").splitlines()), command)

    def stop(self, word: str) -> None:
        """Ctrl-C in the terminal whose command has this word."""
        (command,) = (one for one in self._terminals if word in one)
        process = self._terminals.pop(command)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0, self._said()

    def until_status(self, words: str) -> None:
        self._until(lambda: words in self.run("tidegate status"), words)

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
            f"{path.name}: {path.read_text(errors='replace')[-2000:]}" for path in self._folder.glob("*.out")
        )

    def _until(self, happened: Callable[[], bool], what: str) -> None:
        try:
            eventually(happened, 60, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._said()}") from None


def is_ready(line: str) -> bool:
    """Whether by this line a process says that it serves."""
    return line.startswith("{") and json.loads(line).get("event") == "ready"


def served(told: str) -> tuple[dict[str, int], float]:
    """What `ask.py` printed: answers by their reason and target, and how many of a hundred are right."""
    right = re.search(r"([\d.]+) % right", told)
    assert right is not None, told
    return {who: int(count) for count, who in re.findall(r"(\d+) answers from (.+)", told)}, float(right[1])


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    made = Reader(tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_the_tutorial_goes_as_it_says(reader: Reader) -> None:
    done = ["Two models", "Add them as one", "Configure four processes", "Start them", "Ask", "The pool goes"]
    done.append("The devices go")
    assert [heading for heading, steps in sections().items() if steps] == done, "a section is not followed here"

    (trained,) = reader.follow("Two models")
    assert len(re.findall(r"wide: 9\d\.\d% of 540 unseen digits", trained)) == 2

    added, calibrated = reader.follow("Add them as one")
    assert "quality  top-1" in added
    assert "pool: top1 0.9" in added
    assert "held out" in calibrated

    reader.follow("Configure four processes")
    reader.follow("Start them")
    everywhere = "edge/edge-1, edge/edge-2, pool/cloud"  # offer the model
    reader.until_status(everywhere)

    answers, explained, by_curl = reader.follow("Ask")
    by, right = served(answers)
    assert sum(by.values()) == 200
    assert by["pool/cloud (escalated)"] > 5
    assert sum(count for who, count in by.items() if who.startswith("edge/")) > 100
    assert right > 95
    assert "reader 1 x 64" in explained
    assert "200 OK" in by_curl
    assert "tidegate-served-by: edge/" in by_curl.lower()

    reader.stop("tidegate pool")
    (answers,) = reader.follow("The pool goes")
    by, right = served(answers)
    assert sum(by.values()) == 200
    assert all(who.startswith("edge/") for who in by)
    assert right > 90

    reader.start(next(text for _, text in sections()["Start them"] if text.startswith("tidegate pool")))
    reader.until_status(everywhere)
    reader.stop("edge-1.yaml")
    reader.stop("edge-2.yaml")
    (answers,) = reader.follow("The devices go")
    by, right = served(answers)
    assert sum(by.values()) == 200
    assert all(who.startswith("pool/cloud") for who in by)
    assert right > 95
    for part in ("gateway", "tidegate pool"):
        reader.stop(part)
