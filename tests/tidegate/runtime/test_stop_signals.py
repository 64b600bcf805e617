"""Each signal that asks a process to end lets it end in order, with the answers that are under way."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, signal
from tidegate.runtime.process import until_signal

async def serve():
    print("serves", flush=True)
    try:
        await asyncio.sleep(30)
    finally:
        print("drained", flush=True)

{before}
asyncio.run(until_signal(serve()))
"""
pytestmark = pytest.mark.slow


def started(before: str = "") -> subprocess.Popen[str]:
    program = PROGRAM.format(before=before)
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "serves\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_the_process_end_in_order(number: signal.Signals) -> None:
    process = started()
    process.send_signal(number)
    assert (process.communicate(timeout=30)[0], process.returncode) == ("drained\n", 0)


def test_a_process_that_was_started_to_outlive_its_terminal_does() -> None:
    process = started("signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does")
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.3)
    process.send_signal(signal.SIGTERM)
    assert (process.communicate(timeout=30)[0], process.returncode) == ("drained\n", 0)
