"""A process that gives way while it loads, and counts again afterwards with all of its threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cloud_pool.workers import load_priority

_THREADED = """
import sys, threading
stop = threading.Event()
def more(): threading.Thread(target=stop.wait, daemon=True).start()
more(); print("up", flush=True); sys.stdin.readline(); more(); print("more", flush=True); sys.stdin.readline()
"""


def nice_values(pid: int) -> set[int]:
    return {os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in Path(f"/proc/{pid}/task").iterdir()}


@pytest.mark.slow
@pytest.mark.skipif(not load_priority.may_lower(), reason="priorities cannot be set back here")
def test_all_threads_give_way_and_count_again_those_too_that_began_meanwhile() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _THREADED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == "up\n"
        load_priority.lower(child.pid)
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "more\n"
        assert nice_values(child.pid) == {load_priority.LOADING}
        load_priority.restore(child.pid)
        assert nice_values(child.pid) == {0}
        child.stdin.close()
    load_priority.restore(child.pid)  # it has ended: nothing to do
    load_priority.lower(None)


def test_without_the_right_to_set_it_back_nothing_is_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("resource.getrlimit", lambda _which: (0, 0))
    assert not load_priority.may_lower()
    monkeypatch.setattr("resource.getrlimit", lambda _which: (20, 20))
    assert load_priority.may_lower()
