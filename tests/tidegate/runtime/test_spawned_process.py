"""A child that is started by `vfork`: how it ends, who hears of it, and that nothing is copied for it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable

import psutil
import pytest
import uvloop

from tests.support.serving.writing_host import until
from tidegate import clock
from tidegate.runtime.spawned_process import SpawnedProcess, output_of, spawn, spawn_piped

FORKS = """
import asyncio, ctypes, uvloop

forks = []
count = ctypes.CFUNCTYPE(None)(lambda: forks.append(1))
ctypes.CDLL(None).__register_atfork(count, None, None, None)

async def main():
    {child}

with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
print(len(forks))
"""
WORKER = """
    from tidegate.workers.process import WorkerProcess
    async with WorkerProcess("w"):
        pass
"""
TEMPLATES = """
    from tidegate.generate.text.template_renderer import TemplateRenderer
    renderer = TemplateRenderer()
    await renderer.start()
    await renderer.aclose()
"""
GATEWAY = """
    from gateway.workers.gateway_process import GatewayProcess
    from gateway.workers.messages import PartAssignment
    part = PartAssignment("worker", 1, 1, sockets=[], http_port=0, grpc_port=0, folder="", generation=1)
    process = await GatewayProcess(part, None, lambda *_: None, lambda: None).start()
    assert process.pid
    await process.aclose()
"""
POOL = """
    from cloud_pool.config import PoolConfig
    from cloud_pool.servers import PoolServer
    from tidegate.config import load
    server = PoolServer(load(PoolConfig, name="pool-0"))
    starting = asyncio.create_task(server.start())
    while not server.pid:
        await asyncio.sleep(0)
    starting.cancel()
    await server.aclose()
"""
VLLM = """
    import os
    from pathlib import Path
    from cloud_pool.vllm.server_process import ServerProcess
    server = ServerProcess("s")
    await server.start(["/bin/true"], os.environ, Path("/nowhere"))
    await server.ended()
    await server.stop()
"""
ONNX_CHECK = """
    from types import SimpleNamespace as Some
    from edge_agent.delivery.failures import WorkFailed
    from edge_agent.delivery.verifying import verify
    from pathlib import Path
    from tempfile import mkdtemp
    from tests.support.models.tiny_models import tiny_repository
    from tidegate.models.repository import load_manifest
    version = tiny_repository(Path(mkdtemp())) / "double" / "1"
    (variant,) = load_manifest(version).variants
    file = Some(path=variant.artefact, sha256=variant.sha256, size_bytes=variant.size_bytes)
    plan = Some(version="1", manifest="model.yaml", files=[file], probe=Some(golden=None))
    await verify("double", plan, Some(path=lambda of: version / (of if "." in of else variant.artefact)), ("onnx",))
"""
ONNX_DEVICES = """
    from tidegate.workers.warming.onnx_devices import providers_here
    assert "CPUExecutionProvider" in await providers_here()
"""
GPU_MEMORY = """
    from cloud_pool.vllm import gpu_memory
    gpu_memory._COMMAND = ("/bin/echo", "16")
    assert await gpu_memory.gpu_memory_bytes("0") == 16 << 20
"""
CHILDREN = {
    "worker": WORKER, "templates": TEMPLATES, "gateway": GATEWAY, "pool": POOL, "vllm": VLLM, "onnx check": ONNX_CHECK,
    "onnx devices": ONNX_DEVICES, "gpu memory": GPU_MEMORY,
}  # fmt: skip


def started(*command: str) -> SpawnedProcess:
    return spawn(command, pass_fds=(), env=os.environ)


def no_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError("not here")

    monkeypatch.setattr(os, "pidfd_open", refuse, raising=False)


@pytest.mark.parametrize("has_pidfd", [True, False])
async def test_an_end_is_told_with_its_status_to_each_who_waits(
    monkeypatch: pytest.MonkeyPatch, has_pidfd: bool
) -> None:
    if not has_pidfd:
        no_pidfd(monkeypatch)
    before = len(os.listdir("/proc/self/fd"))
    reading, writing = os.pipe()
    stays = f"read _ < /proc/self/fd/{reading}; exit 7"
    child = spawn(["/bin/sh", "-c", stays], pass_fds=(reading,), env=os.environ)
    left = asyncio.ensure_future(child.wait())
    await clock.sleep(0)
    left.cancel()
    os.close(reading)
    os.close(writing)
    assert list(await asyncio.gather(child.wait(), child.wait())) == [7, 7]
    assert await child.wait() == 7 and left.cancelled()
    assert repr(child) == f"<SpawnedProcess {child.pid} ended with 7>"
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


@pytest.mark.parametrize("has_pidfd", [True, False])
async def test_a_killed_child_ends_with_the_signals_number(monkeypatch: pytest.MonkeyPatch, has_pidfd: bool) -> None:
    if not has_pidfd:
        no_pidfd(monkeypatch)
    child = started("/bin/cat", "/dev/zero")
    assert repr(child) == f"<SpawnedProcess {child.pid} running>"
    child.kill()
    child.kill()
    assert await child.wait() == -signal.SIGKILL
    child.kill()  # of an end that is known: no signal to whoever has its id now


async def test_a_program_that_is_not_there_is_an_error_and_leaves_nothing() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        started("/nowhere/python")
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_child_has_the_descriptors_and_the_environment_that_it_is_given() -> None:
    reading, writing = os.pipe()
    says = f"echo $SAID > /proc/self/fd/{writing}"
    child = spawn(["/bin/sh", "-c", says], pass_fds=(writing,), env={"SAID": "the tide is high"})
    os.close(writing)
    assert await child.wait() == 0
    assert os.read(reading, 100) == b"the tide is high\n"
    os.close(reading)


def child_ids() -> set[int]:
    """Of the children that there are, those included that have ended and were not waited for."""
    return {child.pid for child in psutil.Process().children()}


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def leaves_nothing(request: pytest.FixtureRequest) -> Callable[[Callable[[], Awaitable[None]]], None]:
    """Runs a body on a loop of each kind; afterwards there are no more descriptors and no more children than before."""

    async def watched(body: Callable[[], Awaitable[None]]) -> None:
        children = child_ids()  # another test's file may have left one in this process
        first = await spawn_piped(["/bin/true"])  # for which the loop opens descriptors of its own
        first.close()
        await first.wait()
        await clock.sleep(0.001)
        before = open_descriptors()
        await body()
        await until(lambda: open_descriptors() == before)
        assert child_ids() <= children

    def run(body: Callable[[], Awaitable[None]]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(watched(body))

    return run


def open_descriptors() -> set[str]:
    return {one for one in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{one}")}


def test_a_child_answers_through_its_pipes_and_what_it_said_last_is_read_after_its_end(
    leaves_nothing: Callable[..., None],
) -> None:
    async def body() -> None:
        child = await spawn_piped(["/bin/sh", "-c", "read said; echo $said; read _; printf last; exit 3"])
        await child.write(b"the tide is high\n")
        assert await child.stdout.readline() == b"the tide is high\n"
        assert child.returncode is None and repr(child) == f"<PipedProcess {child.pid} running>"
        child.write_eof()
        assert await child.wait() == child.returncode == 3
        assert await child.stdout.read() == b"last"

    leaves_nothing(body)


def test_a_child_that_reads_nothing_and_prints_too_much_is_waited_for_within_bounds(
    leaves_nothing: Callable[..., None],
) -> None:
    async def body() -> None:
        child = await spawn_piped(["/bin/cat", "/dev/zero"], line_bytes=1000)
        with pytest.raises(ValueError, match="limit"):
            await child.stdout.readline()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await child.write(bytes(2**20))
        child.kill()
        assert await child.wait() == -signal.SIGKILL
        with pytest.raises(OSError):
            await child.write(b"more")
        child.close()
        child.close()

    leaves_nothing(body)


def test_a_caller_that_leaves_while_a_child_is_started_leaves_none(leaves_nothing: Callable[..., None]) -> None:
    async def body() -> None:
        for turns in range(8):
            starting = asyncio.ensure_future(spawn_piped(["/bin/cat"]))
            for _ in range(turns):
                await clock.sleep(0)
            starting.cancel()
            await asyncio.wait([starting])
            if not starting.cancelled():  # it was there by then
                child = starting.result()
                child.close()
                assert await child.wait() == 0

    leaves_nothing(body)


def test_a_piped_program_that_is_not_there_is_an_error(leaves_nothing: Callable[..., None]) -> None:
    async def body() -> None:
        with pytest.raises(FileNotFoundError):
            await spawn_piped(["/nowhere/python"])

    leaves_nothing(body)


def test_a_child_that_ends_at_once_is_a_child_that_has_ended(leaves_nothing: Callable[..., None]) -> None:
    async def body() -> None:
        child = await spawn_piped(["/bin/true"])
        assert await child.stdout.read() == b""
        assert await child.wait() == 0
        with pytest.raises(OSError):
            await child.write(b"too late")

    leaves_nothing(body)


def test_the_output_of_a_program_is_had_with_its_end_within_bounds(leaves_nothing: Callable[..., None]) -> None:
    async def body() -> None:
        assert await output_of(["/bin/sh", "-c", "read _; echo said; exit 3"], within_s=10.0) == (b"said\n", 3)
        much = await output_of(["/usr/bin/head", "-c", "300000", "/dev/zero"], within_s=10.0)
        assert much == (bytes(2**16), 0)
        both = ["/bin/sh", "-c", "echo said; echo warned >&2"]
        assert (await output_of(both, within_s=10.0)).output == b"said\n"
        assert (await output_of(both, within_s=10.0, stderr=subprocess.STDOUT)).output == b"said\nwarned\n"
        with pytest.raises(TimeoutError):
            await output_of(["/bin/cat", "/dev/zero"], within_s=0.02)
        with pytest.raises(FileNotFoundError):
            await output_of(["/nowhere/python"], within_s=10.0)

    leaves_nothing(body)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts forks as glibc tells of them")
@pytest.mark.parametrize("child", CHILDREN.values(), ids=CHILDREN)
def test_no_child_is_started_by_a_fork_under_uvloop(child: str) -> None:
    program = FORKS.replace("{child}", child)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "0\n"
