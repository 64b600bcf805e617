"""A bench without one of its packages says in one line what brings it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.missing import words_of
from tests.lint.tree import ROOT


@pytest.mark.slow
def test_a_bench_without_its_package_ends_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "paho.py").write_text("raise ModuleNotFoundError('No module named paho', name='paho')\n")
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "tests.bench.fleet", "--quick"],
        env={**os.environ, "PYTHONPATH": path}, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert ended.stderr == "this bench needs paho: `make setup` installs all that benches need\n"


def test_only_what_an_installation_mends_is_said_without_a_traceback() -> None:
    assert words_of(ModuleNotFoundError("No module named 'tests.bench.gone'", name="tests.bench.gone")) == ""
    assert words_of(ZeroDivisionError("ours")) == ""
    assert words_of(RuntimeError("torch is not installed: pip install 'tidegate[cloud]'")).startswith("torch")
