"""Log lines of either form, at levels that can be changed, with the trace that they belong to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

import pytest
from structlog.testing import capture_logs

from tidegate import clock
from tidegate.runtime.logs import AUDIT, LEVELS, MOST_MODULES, Format, Level, Levels
from tidegate.runtime.process import until_signal

SCRIPT = """
import logging, sys, structlog
from tidegate.runtime.logs import LEVELS, configure_logging
from tidegate.trace_context import Trace, current
configure_logging("gateway/main", form=sys.argv[1])
log, other = structlog.get_logger("gateway.targets.directory"), structlog.get_logger("scheduler")
log.debug("not yet")
log.info("target is up", target="edge/a")
LEVELS.set("debug", "gateway")
log.debug("now")
other.debug("but not here")
current.set(Trace(0xabc, 1, sampled=True))
other.warning("late", ms=3.5)
logging.getLogger("aiohttp").info("too low for a library")
logging.getLogger("aiohttp").warning("odd %s", "bytes")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("a defect")
"""
TRACE_ID = f"{0xABC:032x}"


def said(form: Format) -> list[str]:
    ran = subprocess.run([sys.executable, "-c", SCRIPT, form], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "", "stdout is for events"
    return ran.stderr.splitlines()


LEAK = """
import sys, structlog
from tidegate.runtime.logs import configure_logging
configure_logging("gateway/main", form=sys.argv[1])
def ask(key):
    raise ValueError("no such server")
try:
    ask("sk-" + "secret")
except ValueError:
    structlog.get_logger("a").exception("a defect")
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["text", "json", "terminal"])
def test_a_traceback_does_not_show_the_values_of_variables(form: str) -> None:
    """Rich's and structlog's do unless told; a key for a server or a prompt is such a value."""
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as screen:
        command = [sys.executable, "-c", LEAK, "json" if form == "json" else "text"]
        with subprocess.Popen(command, stderr=theirs if form == "terminal" else subprocess.PIPE) as ran:
            os.close(theirs)
            told = b""
            with contextlib.suppress(OSError):  # a terminal whose other end is closed
                while some := (screen if ran.stderr is None else ran.stderr).read(65536):
                    told += some
    assert b"no such server" in told and b"ask" in told
    assert b"sk-secret" not in told


@pytest.mark.slow
def test_a_full_disk_under_both_streams_costs_the_lines_and_not_the_work() -> None:
    script = """
import sys, structlog
from tidegate.runtime import events
from tidegate.runtime.logs import configure_logging
configure_logging("gateway/main")
structlog.get_logger("a").warning("lost")
events.emit("served", id=1)
open(sys.argv[1], "w").write("went on")
"""
    with tempfile.NamedTemporaryFile() as told, open("/dev/full", "w") as full:
        subprocess.run([sys.executable, "-c", script, told.name], stdout=full, stderr=full, timeout=60, check=False)
        assert told.read() == b"went on"


@pytest.mark.slow
def test_whoever_reads_the_events_may_end_and_the_work_goes_on() -> None:
    script = """
import sys
from tidegate.runtime import events
events.emit("ready")
sys.stdin.readline()
for _ in range(1000):
    events.emit("served", more="x" * 100)
sys.stdout.close()
events.emit("served", more="into a stream that is closed")
print("went on", file=sys.stderr)
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as ran:
        assert ran.stdin is not None and ran.stdout is not None and ran.stderr is not None
        assert "ready" in ran.stdout.readline()
        ran.stdout.close()
        ran.stdin.write("\n")
        ran.stdin.close()
        assert ran.stderr.read() == "went on\n"


@pytest.mark.slow
@pytest.mark.parametrize("form", ["text", "json"])
def test_whoever_reads_the_log_may_end_and_the_work_goes_on(form: Format) -> None:
    script = """
import os, sys, structlog
from tidegate.runtime.logs import configure_logging
configure_logging("gateway/main", form=sys.argv[1])
log = structlog.get_logger("a")
log.warning("read")
sys.stdin.readline()
for _ in range(1000):
    log.warning("into a pipe that nothing reads", more="x" * 100)
sys.stderr.close()
log.warning("into a stream that is closed")
print("went on")
"""
    command = [sys.executable, "-c", script, form]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as ran:
        assert ran.stdin is not None and ran.stdout is not None and ran.stderr is not None
        assert "read" in ran.stderr.readline()
        ran.stderr.close()
        ran.stdin.write("\n")
        ran.stdin.close()
        assert ran.stdout.read() == "went on\n"


@pytest.mark.slow
def test_json_is_an_object_a_line_with_the_trace_of_its_request() -> None:
    lines = [json.loads(line) for line in said("json")]
    assert [line["event"] for line in lines] == ["target is up", "now", "late", "odd bytes", "a defect"]
    up, _, late, foreign, defect = lines
    assert (up["level"], up["process"], up["target"]) == ("info", "gateway/main", "edge/a")
    assert "trace_id" not in up
    assert (late["trace_id"], late["ms"]) == (TRACE_ID, 3.5)
    assert (foreign["level"], foreign["logger"], foreign["trace_id"]) == ("warning", "aiohttp", TRACE_ID)
    assert defect["exception"][0]["exc_type"] == "ZeroDivisionError"


@pytest.mark.slow
def test_text_says_the_same_as_keys_and_values() -> None:
    lines = said("text")
    assert 'level=info process=gateway/main event="target is up"' in lines[0]
    assert f"trace_id={TRACE_ID}" in lines[2]
    assert 'event="odd bytes"' in lines[3] and "logger=aiohttp" in lines[3]
    assert any("ZeroDivisionError" in line for line in lines)


def test_the_longest_name_that_a_modules_begins_with_counts() -> None:
    levels = Levels("warning")
    levels.set("debug", "gateway")
    levels.set("error", "gateway.targets.directory")
    asked = {"": "warning", "scheduler": "warning", "gateway.fleet_sync.sync": "debug", "gateway": "debug"}
    asked |= {"gateway.targets.directory": "error", "gateway.targets.directory.one": "error", "gateways": "warning"}
    assert {module: levels.of(module) for module in asked} == asked
    levels.clear("gateway.targets.directory")
    assert levels.of("gateway.targets.directory") == "debug"
    assert levels.allows("gateway.fleet_sync.sync", 10) and not levels.allows("scheduler", 20)


def test_there_is_an_end_to_modules_with_levels_of_their_own() -> None:
    levels = Levels()
    for number in range(MOST_MODULES):
        levels.set("debug", f"m{number}")
    with pytest.raises(ValueError, match="levels of their own"):
        levels.set("debug", "one.more")
    levels.set("info", "m0")


async def eventually(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30.0):
        while not true():
            await clock.sleep(0.001)


@pytest.fixture
def restored() -> Iterator[None]:
    before = LEVELS.level
    yield
    LEVELS.set(before)


@pytest.mark.usefixtures("restored")
async def test_a_signal_turns_debugging_on_and_off_again() -> None:
    LEVELS.set("warning")
    seen = []

    async def serve() -> None:
        for _ in range(2):
            before = LEVELS.level
            os.kill(os.getpid(), signal.SIGRTMIN)
            await eventually(lambda before=before: LEVELS.level != before)
            seen.append(LEVELS.level)

    with capture_logs() as logs:
        await until_signal(serve())
    assert seen == ["debug", "warning"]
    assert [line["level"] for line in logs] == seen


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_no_level_drops_an_audit_line(level: Level) -> None:
    levels = Levels(level)
    levels.set("error", "tidegate")

    assert levels.allows(AUDIT, 10) and not levels.allows("tidegate.audits", 30)
    for module in (AUDIT, f"{AUDIT}.refusals"):
        with pytest.raises(ValueError, match="always written"):
            levels.set("error", module)


@pytest.mark.slow
def test_what_peers_say_of_themselves_is_logged_without_what_a_terminal_would_obey() -> None:
    script = """
import structlog
from tidegate.runtime.logs import configure_logging
configure_logging("gateway/main")
structlog.get_logger("a").warning("target is down", reason="\\x1b[2J\\rgone", target="edge/a")
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "\x1b" not in ran.stderr and "\r" not in ran.stderr and "[2J" in ran.stderr
