"""The guide `docs/simulator.md` is followed to the letter: its first two blocks, line by line, in an empty folder.

Each run is told to be one world of two seconds, so that it ends soon; links, devices and rates are those of the page.
`pip install` is left out, since the tests run in what it makes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.pages.text import blocks

ROOT = Path(__file__).resolve().parents[3]
PAGE = "docs/simulator.md"
SHORT = "--seeds 1 --seconds 2"
TRACE = "".join(f"{millisecond}\n" for millisecond in range(1, 1000))  # Mahimahi: a packet may leave in each

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(300)]


def commands() -> list[str]:
    """Each line of the first two blocks of `sh`, without its comment."""
    first, second, *_ = blocks(PAGE, "sh")
    lines = [line.partition("  #")[0].strip() for block in (first, second) for line in block.text.splitlines()]
    return [line for line in lines if line and not line.startswith("pip ")]


def test_the_page_has_the_runs_that_are_followed() -> None:
    found = commands()
    assert found[0] == "tidegate simulate --list"
    assert sum(line.startswith("tidegate simulate mine.yaml") for line in found) == 4


def test_the_guide_to_the_simulator_can_be_followed(tmp_path: Path) -> None:
    programs, folder = tmp_path / "bin", tmp_path / "folder"
    programs.mkdir()
    folder.mkdir()
    for name, words in (("tidegate", "-P -m tidegate.cli"), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} {words} "$@"\n')
        (programs / name).chmod(0o755)
    for name in ("up", "down"):
        (folder / f"{name}.trace").write_text(TRACE)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "COLUMNS": "200"}

    for command in commands():
        is_run = command.startswith("tidegate simulate ") and "--list" not in command
        ran = subprocess.run(
            ["sh", "-euc", f"{command} {SHORT}" if is_run else command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
        if is_run:
            assert "tidegate" in ran.stdout and "in time" in ran.stdout, command
