"""The whole system as its users start it: `tidegate up --json` as a real process, on ports of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from tidegate.mqtt.broker_url import BrokerUrl
from tidegate.testing.ports import free_ports

_BROKERS = re.compile(r"tidegate\.tools\.(broker|up\.mosquitto)\b")
READY_WITHIN_S = 180.0
# A pool measures what real models cost for ten seconds of a core, of which the last seven go into the largest sizes;
# what those take no test asks, and real calls correct what is measured roughly.
WARM_S = "1"
PORTS = 16  # as many as the largest system of these tests wants


class NotReady(Exception):
    """`tidegate up` ended or was silent; the message holds its words."""


class Stack:
    """A running system. `ready` is its ready line; `stop` or `kill_up` ends it."""

    def __init__(self, data_dir: Path, *options: str) -> None:
        self.data_dir = data_dir
        self.ports_from = free_ports(PORTS)
        data_dir.mkdir(parents=True, exist_ok=True)
        self.words_path = data_dir / "up.words"
        command = ["up", "--json", "--data-dir", str(data_dir), "--ports-from", str(self.ports_from), *options]
        self._words = open(self.words_path, "wb")  # noqa: SIM115  # open as long as the process writes there
        self.up = subprocess.Popen(
            [sys.executable, "-P", "-m", "tidegate.cli", *command],
            stdout=subprocess.PIPE,
            stderr=self._words,
            start_new_session=True,
            env={"TIDEGATE_POOL_WARMUP_BUDGET_S": WARM_S, **os.environ},
        )
        self.stdout: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._line = threading.Event()
        self._reader.start()
        self.ready: dict[str, Any] = {}

    def _read(self) -> None:
        assert self.up.stdout is not None
        for line in self.up.stdout:
            self.stdout.append(line.decode())
            self._line.set()
        self._line.set()

    def wait_ready(self) -> Stack:
        if not self._line.wait(READY_WITHIN_S) or not self.stdout:
            self.up.kill()
            raise NotReady(f"{self.words}\n{self.logs}")
        self.ready = json.loads(self.stdout[0])
        return self

    @property
    def words(self) -> str:
        """What `tidegate up` said to people."""
        return self.words_path.read_text(errors="replace")

    @property
    def logs(self) -> str:
        """The end of each child's log, for the message of a failed test."""
        logs = sorted((self.data_dir / "logs").glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in logs)

    @property
    def headers(self) -> dict[str, str]:
        """What a request needs to be let in."""
        file = self.ready.get("api_key_file")
        return {"authorization": f"Bearer {Path(file).read_text().strip()}"} if file else {}

    @property
    def http(self) -> str:
        return str(self.ready["http"])

    @property
    def grpc(self) -> str:
        return str(self.ready["grpc"])

    def state(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.ready['admin']}/v1/state", timeout=30) as answer:
            state: dict[str, Any] = json.load(answer)
            return state

    def ready_targets(self) -> set[str]:
        return {target["address"] for target in self.state()["targets"] if target["state"] == "ready"}

    def whole(self) -> bool:
        """Whether every process runs, the broker takes connections and the gateway sees every target ready."""
        wanted = {one["address"] for one in self.ready["processes"] if one["role"] in ("edge", "pool")}
        try:
            for one in self.ready["processes"]:
                self.process(one["name"])
                if one["role"] == "broker":  # one that was just started again may not listen yet
                    url = BrokerUrl.parse(one["address"])
                    socket.create_connection((url.host, url.port), timeout=5.0).close()
            return wanted <= self.ready_targets()
        except (LookupError, urllib.error.URLError, OSError):
            return False

    def process(self, name: str) -> psutil.Process:
        """The child's process as it is now: the one with its configuration on its command line."""
        for child in psutil.Process(self.up.pid).children():
            with contextlib.suppress(psutil.Error):
                line = " ".join(child.cmdline())  # empty for one that has ended and is not waited for yet
                if f"/{name}.yaml" in line or (name == "broker" and _BROKERS.search(line)):
                    return child
        raise LookupError(f"{name} is not running")

    def kill(self, name: str) -> psutil.Process:
        process = self.process(name)
        process.kill()
        return process

    def everyone(self) -> list[psutil.Process]:
        """Every process of the system, `tidegate up` and workers included."""
        up = psutil.Process(self.up.pid)
        return [up, *up.children(recursive=True)]

    def stop(self, by: signal.Signals = signal.SIGINT) -> int:
        if self.up.poll() is None:
            os.kill(self.up.pid, by)
        try:
            return self.up.wait(30)
        finally:
            self.close()

    def close(self) -> None:
        """End whatever is left."""
        if self.up.poll() is None:
            self.up.kill()
            self.up.wait(10)
        self._reader.join(10)
        assert self.up.stdout is not None
        self.up.stdout.close()
        self._words.close()

    def __repr__(self) -> str:
        return f"<Stack pid {self.up.pid} ports from {self.ports_from}>"


def eventually(true: Callable[[], bool], within_s: float, what: str, *, every_s: float = 0.05) -> float:
    """Poll until `true()`; how many seconds it took. Real processes cannot be waited for in another way.

    Args:
        every_s: the pause between two looks. A look that asks processes, or is one, takes from what is waited for.
    """
    began_at = time.perf_counter()
    while not true():
        if time.perf_counter() - began_at > within_s:
            raise AssertionError(f"not within {within_s:g} s: {what}")
        time.sleep(every_s)
    return time.perf_counter() - began_at


@contextlib.contextmanager
def running(data_dir: Path, *options: str) -> Iterator[Stack]:
    """A system for one test."""
    stack = Stack(data_dir, *options)
    try:
        yield stack.wait_ready()
    finally:
        stack.stop()
