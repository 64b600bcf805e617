"""Children whose parent is killed: none outlives it, whatever it is at.

The parent is a program of a test's own that starts a child as the product does, says who its children are, and is
killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.processes import until_ended

PARENT = """
import asyncio, psutil, sys, time, uvloop
from pathlib import Path

folder = Path(sys.argv[1])

def wait_for(names):
    until = time.monotonic() + 30.0
    while sum(any(name in one.cmdline() for name in names) for one in children()) < len(names):
        if time.monotonic() > until:
            sys.exit("no such child")
        time.sleep(0.01)
    print(*[one.pid for one in children()], flush=True)

def children():
    return psutil.Process().children(recursive=True)

async def main():
    {child}

with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
"""
TEMPLATES = """
    from tidegate.generate.text.template_renderer import TemplateRenderer
    renderer = TemplateRenderer(render_s=1000.0)
    await renderer.start()
    asyncio.get_running_loop().call_later(0.1, wait_for, ["tidegate.generate.text.template_process"])
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    await renderer.render(endless, {})
"""
ONNX_CHECK = """
    from types import SimpleNamespace as Some
    from edge_agent.delivery.verifying import verify
    from tests.support.models.tiny_models import tiny_repository
    from tidegate.models.repository import load_manifest
    version = tiny_repository(folder) / "double" / "1"
    manifest = load_manifest(version)
    (variant,) = manifest.variants
    file = Some(path=variant.artefact, sha256=variant.sha256, size_bytes=variant.size_bytes)
    plan = Some(version="1", manifest="model.yaml", files=[file], probe=Some(golden=None))
    (version / variant.sha256).symlink_to(folder / "stuck")
    asyncio.get_running_loop().call_later(0.1, wait_for, ["tidegate.engines.onnx_check"])
    await verify("double", plan, Some(path=lambda digest: version / digest), ("onnx",))
"""
ONNX_DEVICES = """
    from tidegate.workers.warming.onnx_devices import providers_here
    asyncio.get_running_loop().call_later(0.1, wait_for, ["-c"])
    await providers_here()
"""
GATEWAY = """
    from gateway.workers.gateway_process import GatewayProcess
    from gateway.workers.messages import PartAssignment
    part = PartAssignment("worker", 1, 1, sockets=[], http_port=0, grpc_port=0, folder="", generation=1)
    process = await GatewayProcess(part, None, lambda *_: None, lambda: None).start()
    wait_for(["gateway"])
    await process.over.wait()
"""
POOL = """
    from cloud_pool.config import PoolConfig
    from cloud_pool.servers import PoolServer
    from tidegate.config import load
    asyncio.get_running_loop().call_later(0.1, wait_for, ["cloud_pool"])
    await PoolServer(load(PoolConfig, name="pool-0", grpc_port=0)).start()
"""
VLLM = """
    import os
    from cloud_pool.vllm.server_process import ServerProcess
    server = ServerProcess("s")
    await server.start(["/bin/sleep", "1000"], os.environ, folder / "shared")
    wait_for(["cloud_pool.vllm.warden", "/bin/sleep"])
    await server.ended()
"""
WORKER = """
    from tidegate.workers.process import WorkerProcess
    async with WorkerProcess("w") as worker:
        wait_for(["tidegate.workers.child"])
        await worker.died()
"""
BUILDER = """
    import threading
    from tidegate.tools.build.convert.genai import convert_to_genai
    threading.Timer(0.1, wait_for, [["-c"]]).start()
    convert_to_genai(folder, folder)
"""
CHILDREN = {
    "templates": TEMPLATES, "onnx check": ONNX_CHECK, "onnx devices": ONNX_DEVICES, "gateway": GATEWAY, "pool": POOL,
    "vllm": VLLM, "worker": WORKER, "builder": BUILDER,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends a child with its parent")
@pytest.mark.parametrize("child", CHILDREN.values(), ids=CHILDREN)
async def test_no_child_outlives_a_parent_that_is_killed(child: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "stuck")  # who opens it to read waits for ever
    for name in ("onnxruntime.py", "onnxruntime_genai/models/builder.py"):  # in the place of packages
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("import time; time.sleep(1000)")
    (tmp_path / "onnxruntime_genai" / "__init__.py").touch()
    program = PARENT.replace("{child}", child.strip())
    command = [sys.executable, "-c", program, str(tmp_path)]
    beside = str(tmp_path) if child in (ONNX_DEVICES, BUILDER) else ""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [beside, os.getcwd()]))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:  # noqa: ASYNC220
        try:
            assert parent.stdout is not None
            pids = [int(pid) for pid in parent.stdout.readline().split()]
            assert pids
        finally:
            parent.kill()
    await until_ended(*pids, within_s=10.0)


ALONE = """
import os, sys
from tidegate.runtime.lifeline import die_with_pipe
die_with_pipe(0)
print("begun", flush=True)
while True:
    pass
"""


@pytest.mark.slow
def test_a_process_that_watches_its_pipe_ends_with_it_though_it_is_at_work() -> None:
    with subprocess.Popen([sys.executable, "-c", ALONE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        try:
            assert child.stdout.readline() == b"begun\n"
            child.stdin.close()
            assert child.wait(10.0) == 1
        finally:
            child.kill()


HANGING = """
import os, sys
from edge_agent.config import EdgeConfig
from tidegate.runtime import process

async def serve(config):
    print(os.getpid(), flush=True)
    while True:
        pass

process.EXITS_WITHIN_S = 0.3
process.run("edge", EdgeConfig, serve, path=None, parent_pid=int(sys.argv[1]))
"""
PARENT_OF_HANGING = "import os, subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1], str(os.getpid())])"


@pytest.mark.slow
@pytest.mark.parametrize("has_pidfd", [True, False])
async def test_a_process_whose_loop_hangs_does_not_outlive_its_parent_for_long(has_pidfd: bool) -> None:
    hanging = HANGING if has_pidfd else HANGING.replace("import os, sys", "import os, sys; del os.pidfd_open")
    command = [sys.executable, "-c", PARENT_OF_HANGING, hanging]
    environment = os.environ | {"TIDEGATE_EDGE_NAME": "e", "TIDEGATE_EDGE_DRAIN_S": "0.2"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:  # noqa: ASYNC220
        try:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
        finally:
            parent.kill()
    try:
        await until_ended(pid, within_s=10.0)
    finally:
        with suppress(ProcessLookupError):  # else it would take a core for ever
            os.kill(pid, signal.SIGKILL)
