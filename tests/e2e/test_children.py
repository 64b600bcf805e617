"""A child of `tidegate up`: real processes that start, fail, die, come back and end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.processes import until_ended
from tidegate.tools.up import children
from tidegate.tools.up.children import Child, ChildFailed, describe_exit, parse_event
from tidegate.tools.up.plan import ProcessPlan

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


@pytest.fixture(autouse=True)
def _restarts_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "RESTART_AFTER_S", 0.05)


class Heard:
    """What a child told, with a way to wait for it."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.changes: list[str] = []
        self._more = asyncio.Event()

    def event(self, plan: ProcessPlan, event: Any) -> None:
        self.events.append(event)
        self._more.set()

    def change(self, words: str) -> None:
        self.changes.append(words)
        self._more.set()

    async def until(self, happened: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not happened():
                self._more.clear()
                await self._more.wait()


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def make(tmp_path: Path, heard: Heard) -> Callable[..., Child]:
    def make(*, restart: bool = True, module: str = "tests.e2e.fake_part", **behaviour: Any) -> Child:
        plan = ProcessPlan(
            role="edge",
            name="fake",
            module=module,
            address="",
            ports=(),
            log_path=tmp_path / "logs" / "fake.log",
            config=behaviour,
            config_path=tmp_path / "run" / "fake.yaml",
        )
        return Child(plan, on_event=heard.event, on_change=heard.change, restart=restart)

    return make


async def test_a_child_is_ready_when_it_says_so_and_its_progress_is_heard(
    make: Callable[..., Child], heard: Heard
) -> None:
    async with make() as child:
        await child.ready()
        assert child.ready_event["name"] == "fake"
        assert heard.events == [{"event": "progress", "what": "warming up"}]
        assert repr(child) == f"<Child fake pid {child.pid}>"


async def test_a_child_that_says_why_it_cannot_start_is_quoted(make: Callable[..., Child]) -> None:
    async with make(before_ready="fail") as child:
        with pytest.raises(ChildFailed, match=r"fake did not start: port 8005 is taken \(key grpc_port\)"):
            await child.ready()


async def test_a_child_that_crashes_before_it_is_ready_is_not_tried_again_and_its_last_words_are_shown(
    make: Callable[..., Child], heard: Heard
) -> None:
    async with make(before_ready="crash") as child:
        with pytest.raises(ChildFailed, match=r"(?s)ended with exit code 3.*fake\.log:\n  first words\n  last words"):
            await child.ready()
        await child.gone()
    assert heard.changes == []


async def test_a_child_without_a_package_of_an_extra_says_what_to_install(make: Callable[..., Child]) -> None:
    async with make(before_ready="import") as child:
        with pytest.raises(ChildFailed) as failed:
            await child.ready()
    words = str(failed.value)
    assert words.startswith("fake did not start: it needs package_of_an_extra: pip install 'tidegate[demo]'\n(log: ")
    assert "Traceback" not in words


async def test_a_program_that_does_not_exist_fails_with_what_python_says(make: Callable[..., Child]) -> None:
    async with make(module="tests.e2e.no_such_part") as child:
        with pytest.raises(ChildFailed, match=r"No module named tests\.e2e\.no_such_part"):
            await child.ready()


async def test_a_child_that_is_killed_is_started_again(make: Callable[..., Child], heard: Heard) -> None:
    async with make() as child:
        await child.ready()
        first = child.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await heard.until(lambda: heard.changes[-1:] == ["fake is back"])
        assert child.pid not in (None, first)
        assert "was ended by SIGKILL; starting it again in 0.05 s" in heard.changes[0]


async def test_a_child_whose_log_was_deleted_is_started_again(make: Callable[..., Child], heard: Heard) -> None:
    async with make() as child:
        await child.ready()
        first = child.pid
        child.plan.log_path.unlink()
        os.kill(first, signal.SIGKILL)
        await heard.until(lambda: heard.changes[-1:] == ["fake is back"])
        assert child.pid not in (0, first)


def test_of_a_long_log_the_last_lines_are_read(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"before\n" + b"x" * 10_000_000 + b"\nlast\n")
    assert children.log_tail(log, 7)[-1] == "last" and len("".join(children.log_tail(log, 7))) < 100_000
    assert children.log_tail(tmp_path / "gone.log", 0) == []


async def test_a_child_that_is_not_to_be_restarted_stays_down(make: Callable[..., Child], heard: Heard) -> None:
    async with make(restart=False) as child:
        await child.ready()
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        await child.gone()
        assert child.pid is None
        assert child.ended
        assert "it stays down" in heard.changes[0]
        assert repr(child) == "<Child fake down>"


async def test_a_child_that_ends_when_told_is_not_mourned(make: Callable[..., Child], heard: Heard) -> None:
    async with make() as child:
        await child.ready()
        child.terminate()
        await child.gone()
    assert heard.changes == []


async def test_a_child_that_does_not_listen_is_killed_with_its_workers(
    make: Callable[..., Child], heard: Heard
) -> None:
    async with make(deaf=True, worker=True) as child:
        await child.ready()
        worker = psutil.Process(heard.events[0]["pid"])
        child.terminate()
        assert child.pid is not None
    assert child.ended
    await until_ended(worker)


async def test_the_workers_of_a_child_that_is_killed_do_not_outlive_it(
    make: Callable[..., Child], heard: Heard
) -> None:
    async with make(worker=True) as child:
        await child.ready()
        worker = psutil.Process(heard.events[0]["pid"])
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        await heard.until(lambda: heard.changes[-1:] == ["fake is back"])
        await until_ended(worker)


async def test_what_a_library_prints_goes_to_the_log(make: Callable[..., Child], heard: Heard) -> None:
    async with make(print="a banner") as child:
        await child.ready()
        assert child.plan.log_path.read_text() == "a banner\n"
    assert [event["event"] for event in heard.events] == ["progress"]


async def test_a_line_longer_than_any_event_is_skipped(
    make: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "EVENT_LINE_MAX_BYTES", 1000)
    async with make(print="x" * 5000) as child:
        await child.ready()


async def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    config = tmp_path / "fake.yaml"
    config.write_text("{}")
    program = (
        "import os, subprocess, sys; "
        "child = subprocess.Popen([sys.executable, '-m', 'tests.e2e.fake_part', '--config', sys.argv[1],"
        " '--die-with-parent', str(os.getpid())], stdout=subprocess.PIPE, start_new_session=True);"
        "child.stdout.readline(); print(child.pid, flush=True); child.wait()"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, config, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    child = psutil.Process(int(await parent.stdout.readline()))
    parent.kill()
    await parent.wait()
    await until_ended(child)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "ended with exit code 0"),
        (-9, "was ended by SIGKILL"),
        (-64, "was ended by SIGRTMAX"),
        (-99, "was ended by signal 99"),
    ],
)
def test_an_exit_is_told_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words


@pytest.mark.parametrize("line", [b"words\n", b"[1]\n", b'{"no": "event"}\n', b'{"event": 3}\n', b"\xff\n", b""])
def test_a_line_that_is_no_event_is_not_taken_for_one(line: bytes) -> None:
    assert parse_event(line) is None


async def test_a_log_that_cannot_be_written_is_a_failure_that_names_it(make: Callable[..., Child]) -> None:
    child = make()
    child.plan.log_path.mkdir(parents=True)
    async with child:
        with pytest.raises(ChildFailed, match=r"Is a directory: .*fake\.log"):
            await child.ready()
