"""Operators of a test, each a process of its own: kopf, when it ends, cancels every task of its event loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tests.support.operator.cluster import OperatorCluster
from tidegate import clock

LEASE_S = 3.0
WITHIN_S = 40.0
ENDS_WITHIN_S = 40.0


@asynccontextmanager
async def operating(
    cluster: OperatorCluster, identity: str = "a", *options: str
) -> AsyncIterator[subprocess.Popen[bytes]]:
    """An operator for the length of the block; it ends by SIGTERM, and with exit code 0 unless it was killed."""
    program = "from tidegate.tools.operator.cli import operator; operator()"
    command = [sys.executable, "-c", program, "run", "--server", cluster.address.server, "--own-namespace", "prod"]
    process = _started([*command, "--identity", identity, "--lease", f"{LEASE_S}s", *options])
    try:
        yield process
        process.terminate()
        code = await asyncio.to_thread(process.wait, ENDS_WITHIN_S)
        assert code <= 0, code
    finally:
        process.kill()
        process.wait()


def _started(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


async def until(holds: Callable[[], bool], what: str, within_s: float = WITHIN_S) -> float:
    """Return the seconds that it took. Raises AssertionError: it does not become so."""
    begun = clock.now()
    while not holds():
        assert clock.now() < begun + within_s, f"not within {within_s:g} s: {what}"
        await clock.sleep(0.02)
    return clock.now() - begun
