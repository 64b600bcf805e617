"""A worker in the sandbox serves, and reaches neither the network nor the disk."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cloud_pool.workers_support import rows_of_ones, write_hungry_model
from tidegate.runtime.process import StartError
from tidegate.workers import sandbox, sandbox_check
from tidegate.workers.process import EngineSpec, WorkerProcess
from tidegate.workers.sandbox_check import check_sandbox, sandbox_gaps, sandbox_parts

here = pytest.mark.skipif(bool(sandbox.missing_here()), reason=f"no whole sandbox here: {sandbox.missing_here()}")

_TRIES = (
    """
import os, signal, socket, subprocess, sys, threading
from pathlib import Path
from tidegate.workers import sandbox
scratch, home, port, parent = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), os.getppid()
sandbox.enter(scratch)

def tried(what, attempt):
    try:
        attempt()
        print(what, "done")
    except OSError as error:
        print(what, type(error).__name__)

tried("tcp", lambda: socket.create_connection(("127.0.0.1", port), 1))
tried("udp", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
tried("home", lambda: (home / "mine").write_text("x"))
tried("overwrite", lambda: (home / "theirs").write_text("x"))
tried("truncate", lambda: os.truncate(home / "theirs", 0))
tried("remove", lambda: (home / "theirs").unlink())
tried("rename", lambda: (home / "theirs").rename(scratch / "theirs"))
tried("mkdir", lambda: (home / "folder").mkdir())
tried("link", lambda: (home / "link").symlink_to("/"))
tried("kill", lambda: os.kill(parent, signal.SIGUSR1))
tried("memory", lambda: open(f"/proc/{parent}/mem", "rb+"))
tried("sysctl", lambda: open("/proc/sys/kernel/core_pattern", "w"))
tried("child", lambda: subprocess.run(
    [sys.executable, "-c", f"open({str(home / 'child')!r}, 'w')"], check=True, stderr=subprocess.DEVNULL))
""".replace("subprocess.run(", "_child(").replace(
        "\ndef tried",
        """
def _child(*arguments, **more):
    try:
        subprocess.run(*arguments, **more)
    except subprocess.CalledProcessError:
        raise PermissionError

def tried""",
        1,
    )
    + """
tried("scratch", lambda: (scratch / "mine").write_text("x"))
tried("thread", lambda: threading.Thread(target=(scratch / "t").mkdir).start())
tried("null", lambda: open(os.devnull, "w").write("x"))
tried("read", lambda: (home / "theirs").read_text())
tried("name", lambda: Path(f"/proc/self/task/{os.getpid()}/comm").write_text("worker"))
tried("pair", lambda: socket.socketpair())
"""
)


@here
@pytest.mark.slow
def test_inside_of_it_neither_the_network_nor_the_disk_is_reached(tmp_path: Path) -> None:
    scratch, home = tmp_path / "scratch", tmp_path / "home"
    scratch.mkdir()
    home.mkdir()
    (home / "theirs").write_text("theirs")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        arguments = [str(scratch), str(home), str(listening.getsockname()[1])]
        done = subprocess.run([sys.executable, "-c", _TRIES, *arguments], capture_output=True, text=True, check=False)
    found = dict(line.split() for line in done.stdout.splitlines())
    may = ("scratch", "thread", "null", "read", "name", "pair")
    assert [what for what, how in found.items() if how == "done"] == list(may), done.stderr
    assert len(found) == 13 + len(may), done.stderr
    assert (home / "theirs").read_text() == "theirs"
    assert os.listdir(home) == ["theirs"]


@here
@pytest.mark.slow
async def test_a_worker_is_inside_and_its_scratch_folder_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = write_hungry_model(tmp_path / "m.onnx", floats_per_row=4)
    async with WorkerProcess("w") as worker:
        await worker.load(EngineSpec("m", "onnx", model, ("y",)))
        assert (await worker.infer("m", rows_of_ones(2))).outputs["y"].tolist() == [[4.0]] * 2
        status = status_of(worker.pid)
        assert "\nSeccomp:\t2\n" in status and "\nNoNewPrivs:\t1\n" in status
        assert any(name.startswith("tidegate-worker-") for name in os.listdir(tmp_path))
    assert not any(name.startswith("tidegate-worker-") for name in os.listdir(tmp_path))


@pytest.mark.slow
async def test_without_it_a_worker_has_no_filter() -> None:
    async with WorkerProcess("w", sandbox="off") as worker:
        assert f"\nSeccomp:\t{_own_filter()}\n" in status_of(worker.pid)


def status_of(pid: int | None) -> str:
    return Path(f"/proc/{pid}/status").read_text()


def _own_filter() -> str:
    return status_of(os.getpid()).partition("\nSeccomp:\t")[2].partition("\n")[0]


def test_require_does_not_start_where_a_part_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_check, "missing_here", lambda: ("files: Landlock ABI 3, here none",))
    check_sandbox("auto")
    check_sandbox("off")
    with pytest.raises(StartError, match="key 'sandbox': 'require', but this machine has not files: Landlock"):
        check_sandbox("require")
    assert sandbox_parts("auto") == {"files": False, "network": True}
    assert sandbox_parts("off") == {"files": False, "network": False}
    assert (sandbox_gaps("auto"), sandbox_gaps("off")) == (
        "files: Landlock ABI 3, here none",
        "the key `sandbox` is off",
    )
    monkeypatch.setattr(sandbox_check, "missing_here", lambda: ())
    assert sandbox_gaps("auto") == ""
    check_sandbox("require")
    assert sandbox_parts("require") == {"files": True, "network": True}
