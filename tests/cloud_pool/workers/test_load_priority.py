"""A process gives way while it loads, as long as it gets on, and counts again afterwards with all of its threads."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cloud_pool.workers.load_priority import HURRIED, LoadPriority, may_lower
from tidegate import clock

_THREADED = """
import sys, threading
stop = threading.Event()
def more(): threading.Thread(target=stop.wait, daemon=True).start()
more(); print("up", flush=True); sys.stdin.readline(); more(); print("more", flush=True); sys.stdin.readline()
"""
_BUSY = "print('up', flush=True)\nwhile True: pass"
_BUSY_BESIDE = """
import threading
def spin():
    while True: pass
one = threading.Thread(target=spin, daemon=True)
one.start(); print("up", flush=True); one.join()
"""
_CAPBSET_DROP, _CAP_SYS_NICE = 24, 23
_AS_IN_A_CONTAINER = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({_CAPBSET_DROP}, {_CAP_SYS_NICE}, 0, 0, 0)
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
"""
_TRIAL = "from cloud_pool.workers.load_priority import may_lower; print(may_lower())"

pytestmark = pytest.mark.slow
needs_the_right = pytest.mark.skipif(not may_lower(), reason="priorities cannot be set back here")


def priorities(pid: int) -> set[tuple[int, int]]:
    """The policies and nice values of all threads."""
    tasks = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    return {(os.sched_getscheduler(one), os.getpriority(os.PRIO_PROCESS, one)) for one in tasks}


IDLE, USUAL = {(os.SCHED_IDLE, 0)}, {(os.SCHED_OTHER, 0)}


@contextmanager
def child(program: str, *, core: int | None = None) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            if core is not None:
                os.sched_setaffinity(process.pid, [core])
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            yield process
        finally:
            process.kill()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30.0):
        while not holds():
            await clock.sleep(0.02)


@needs_the_right
async def test_all_threads_give_way_and_count_again_those_too_that_began_meanwhile() -> None:
    priority = LoadPriority(patience_s=60.0)
    with child(_THREADED) as process:
        assert process.stdin is not None and process.stdout is not None
        priority.lower(process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "more\n"
        assert priorities(process.pid) == IDLE
        priority.restore(process.pid)
        assert priorities(process.pid) == USUAL
    assert repr(priority) == "<LoadPriority of 0 that load, 0 hurried>"


@needs_the_right
async def test_a_load_that_gets_no_core_is_hurried_and_never_set_further_back_again() -> None:
    priority = LoadPriority(patience_s=0.1)
    core = min(os.sched_getaffinity(0))
    with child(_BUSY, core=core), child(_BUSY, core=core) as process:
        priority.lower(process.pid)
        assert priorities(process.pid) == IDLE
        await until(lambda: priorities(process.pid) == {(os.SCHED_OTHER, HURRIED)})
        assert repr(priority) == "<LoadPriority of 1 that load, 1 hurried>"
        priority.lower(process.pid)
        assert priorities(process.pid) == {(os.SCHED_OTHER, HURRIED)}
        priority.restore(process.pid)
        assert priorities(process.pid) == USUAL


@needs_the_right
async def test_a_process_that_ends_while_it_loads_is_forgotten() -> None:
    priority = LoadPriority()
    with child(_THREADED) as process:
        priority.lower(process.pid)
    await until(lambda: repr(priority) == "<LoadPriority of 0 that load, 0 hurried>")
    priority.restore(process.pid)
    priority.lower(None)


async def test_what_was_not_lowered_is_not_touched() -> None:
    with child(_THREADED) as process:
        os.setpriority(os.PRIO_PROCESS, process.pid, 3)
        LoadPriority().restore(process.pid)
        assert (os.SCHED_OTHER, 3) in priorities(process.pid)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up what a container takes from root")
def test_in_a_container_that_could_not_set_it_back_root_lowers_nothing() -> None:
    command = [sys.executable, "-c", _AS_IN_A_CONTAINER, _TRIAL]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"


@needs_the_right
async def test_a_load_is_hurried_whose_other_threads_get_no_core() -> None:
    """As where a runtime compiles with threads of its own, and its main thread waits for them."""
    priority = LoadPriority(patience_s=0.1)
    core = min(os.sched_getaffinity(0))
    with child(_BUSY, core=core), child(_BUSY_BESIDE, core=core) as process:
        priority.lower(process.pid)
        await until(lambda: priorities(process.pid) == {(os.SCHED_OTHER, HURRIED)})
        priority.restore(process.pid)
