"""What a process imports before it serves, and that no collection walks through it."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys

import pytest

from tidegate.runtime.settled_imports import absent, settled_imports

_REPORT = """
import gc, json, sys
{}
print(json.dumps({{"collects": gc.isenabled(), "frozen": gc.get_freeze_count(), "modules": sorted(sys.modules)}}))
"""


def started(imports: str, stderr: int) -> dict[str, object]:
    """What is so in a process after these imports."""
    program = [sys.executable, "-c", _REPORT.format(imports)]
    ended = subprocess.run(program, stdout=subprocess.PIPE, stderr=stderr, check=True)
    found: dict[str, object] = json.loads(ended.stdout)
    return found


@pytest.mark.slow
def test_no_part_imports_what_it_may_never_need_and_what_it_imports_is_set_aside() -> None:
    found = started("import gateway.__main__, edge_agent.__main__, cloud_pool.__main__", subprocess.DEVNULL)
    modules = found["modules"]
    assert isinstance(modules, list) and {"gateway.app", "edge_agent.app", "cloud_pool.app", "structlog"} <= set(
        modules
    )
    assert not {"torch", "onnxruntime", "transformers", "scipy", "rich.console", "dns"} & set(modules)
    assert found["collects"] is True
    assert isinstance(found["frozen"], int) and found["frozen"] > 50_000


@pytest.mark.slow
def test_on_a_terminal_tracebacks_are_drawn_as_ever() -> None:
    ours, theirs = os.openpty()
    try:
        found = started(
            "from tidegate.runtime.settled_imports import import_structlog; import_structlog(); import structlog",
            theirs,
        )
    finally:
        os.close(ours)
        os.close(theirs)
    assert isinstance(found["modules"], list) and "rich.traceback" in found["modules"]


def test_a_module_is_absent_for_the_imports_within_and_one_that_is_there_already_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "this", raising=False)
    with pytest.raises(ModuleNotFoundError), absent("this"):
        import this  # noqa: F401
    assert "this" not in sys.modules

    with absent("json"):
        import json as within
    assert within is json and sys.modules["json"] is json


@pytest.mark.slow
def test_collections_are_as_they_were_also_after_an_import_that_fails() -> None:
    before = gc.get_freeze_count()
    with pytest.raises(ModuleNotFoundError), settled_imports():
        assert not gc.isenabled()
        import tidegate.nowhere  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before
    gc.disable()
    try:
        with settled_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "there", "not_there"),
    [("onnx", "onnxruntime", "torch"), ("paced", "tidegate.engines.paced", "onnxruntime"), ("tensorrt", "gc", "torch")],
)
def test_a_worker_imports_the_runtime_of_its_engine_and_no_other(engine: str, there: str, not_there: str) -> None:
    imports = f"import tidegate.workers.child as child; child.import_runtime({engine!r})"
    found = started(imports, subprocess.DEVNULL)
    assert isinstance(found["modules"], list)
    assert there in found["modules"] and not_there not in found["modules"]


@pytest.mark.slow
def test_a_runtime_that_is_not_installed_is_left_to_the_loading_to_tell() -> None:
    blocked = "import sys; sys.modules['onnxruntime'] = None\n"
    found = started(
        f"{blocked}from tidegate.engines.engine import import_runtime; import_runtime('onnx')", subprocess.DEVNULL
    )
    assert isinstance(found["modules"], list) and "tidegate.engines.onnx" not in found["modules"]


_STARTING_CHILDREN = """
import asyncio
from tidegate.runtime.settled_imports import settled_imports

with settled_imports():
    import grpc
    import uvloop

async def main():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def calls():
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            while True:
                try:
                    await channel.unary_unary("/no/method")(b"")
                except grpc.aio.AioRpcError:
                    pass

    callers = [asyncio.create_task(calls()) for _ in range(4)]
    ends = set()
    for _ in range(300):
        child = await asyncio.create_subprocess_exec("true")
        ends.add(await child.wait())
    for one in callers:
        one.cancel()
    await asyncio.wait(callers)
    print(*ends)

asyncio.Runner(loop_factory=uvloop.new_event_loop).run(main())
"""


@pytest.mark.slow
def test_a_child_that_is_started_while_grpc_is_busy_never_dies_before_it_runs() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    program = [sys.executable, "-c", _STARTING_CHILDREN]
    ended = subprocess.run(program, capture_output=True, check=True, env=environment)
    assert ended.stdout.split() == [b"0"]
