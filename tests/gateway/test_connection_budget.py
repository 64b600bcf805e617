"""A gateway process with 1024 open files: idle connections on its other ports take nothing from inference over HTTP.

With very few files it evicts what is idle before it is out of them.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, closing
from functools import partial
from pathlib import Path

import aiohttp
import pytest
import yaml

from tests.support.gateway.app import BODY, INFER, Far, repository, running, target
from tidegate import clock
from tidegate.runtime.owned_task import cancel_and_wait

pytestmark = pytest.mark.slow
FILES = 1024
VERY_FEW = 100
IDLE = 400  # a port: more than the share of any of them, and together more than all files
OTHERS = ("metrics", "admin", "artifacts", "grpc", "link")


def limit_files(files: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))


@asynccontextmanager
async def gateway_process(folder: Path, far: Far, files: int = FILES) -> AsyncIterator[tuple[int, dict[str, str]]]:
    """A gateway with every kind of port; its process id and its addresses."""
    ports = dict.fromkeys(("http_port", "grpc_port", "metrics_port", "admin_port", "link_port"), 0)
    to = target(far)
    config = {
        **ports,
        "model_repository": str(repository(folder)),
        "mqtt": "mqtt://127.0.0.1:1",  # nothing answers there: artefacts need a broker's name, not a broker
        "artifacts": {"folder": str(folder / "artifacts"), "port": 0},
        "targets": [{"name": to.name, "tier": to.tier, "address": to.address}],
        "drain_s": 0.0,
    }
    path = folder / "gateway.yaml"
    path.write_text(yaml.safe_dump(config))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", "--config", str(path),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, preexec_fn=partial(limit_files, files),
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60.0):
            ready = json.loads(await process.stdout.readline())
        assert ready["event"] == "ready", ready
        yield process.pid, ready["addresses"]
    finally:
        process.terminate()
        await process.wait()


def place(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition("//")[2].rpartition(":")
    return host, int(port)


def open_idle(address: str, held: ExitStack, count: int) -> None:
    for _ in range(count):
        held.enter_context(closing(socket.create_connection(place(address), timeout=5.0)))


async def answered(url: str, within_s: float = 5.0) -> int:
    """The status of one inference over a connection of its own."""
    timeout = aiohttp.ClientTimeout(total=within_s)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.post(url + INFER, json=BODY) as response:
        await response.read()
        return response.status


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.fixture
def many_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(OTHERS) * IDLE + 500
    if soft < needed:
        if hard < needed:
            pytest.skip(f"this process may open {hard} files, and needs {needed}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


@pytest.mark.usefixtures("many_files")
async def test_idle_connections_on_every_other_port_leave_inference_over_http_its_own(tmp_path: Path) -> None:
    far = Far("pool/main")
    async with running(far), gateway_process(tmp_path, far) as (pid, addresses):
        assert set(OTHERS) < set(addresses)
        assert await answered(addresses["http"]) == 200

        with ExitStack() as held:
            for name in OTHERS:  # one after the other, as a flood comes; inference goes on meanwhile
                opening = asyncio.ensure_future(asyncio.to_thread(open_idle, addresses[name], held, IDLE))
                try:
                    while not opening.done():
                        assert await answered(addresses["http"]) == 200
                    await opening
                finally:
                    await cancel_and_wait(opening)
            await settled(lambda: descriptors(pid))
            assert descriptors(pid) < FILES - 100, "the process itself has files left"
            statuses = await asyncio.gather(*(answered(addresses["http"], 20.0) for _ in range(100)))

    assert statuses == [200] * 100


async def test_with_very_few_files_idle_connections_make_room_for_a_newcomer(tmp_path: Path) -> None:
    far = Far("pool/main")
    async with running(far), gateway_process(tmp_path, far, VERY_FEW) as (pid, addresses):
        with ExitStack() as held:
            open_idle(addresses["http"], held, VERY_FEW)
            await settled(lambda: descriptors(pid))
            assert descriptors(pid) < VERY_FEW, "it has files left"
            assert await answered(addresses["http"]) == 200


async def settled(count: Callable[[], int]) -> None:
    """Return once a count has not changed for a fifth of a second."""
    before = -1
    async with asyncio.timeout(10.0):
        while before != count():
            before = count()
            await clock.sleep(0.2)
