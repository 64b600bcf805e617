"""A fleet as real processes on loopback: Mosquitto, edge agents, a pool and a gateway, each started as in production.

Unlike `tests/e2e/stack.py`, which drives `tidegate up`, every part here has a configuration of its own: edges of mixed
speed (`paced_slow`), other addresses where a proxy stands between two parts, another policy. Ports are the system's to
choose; a part that is started again keeps the ones it got.

    with FleetStack(folder, models, edges={"a": {}, "b": {"paced_slow": 2}}, pool={}) as fleet:
        fleet.http, fleet.targets(), fleet.part("a").kill(), fleet.restart_gateway(policy="value")

Parts warm up `at_once` at a time. With paced models that may be many, since warming up uses no CPU; models that compute
must warm up one after another, or each measures the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.support.models.staged import Staged
from tests.support.mqtt.brokers import Mosquitto
from tidegate.testing.ports import free_port

Config = Mapping[str, Any]
ROOT = Path(__file__).parents[3]
READY_WITHIN_S = 120.0
WHOLE_WITHIN_S = 60.0


class PartFailed(Exception):
    """A part ended or was silent; the message holds the end of its log."""


class Part:
    """One process: `start` it, `wait_ready`, `signal` or `kill` it, `start` it again."""

    def __init__(self, name: str, module: str, config: Config, folder: Path) -> None:
        self.name = name
        self.addresses: dict[str, str] = {}
        self.config = dict(config)
        self.config_path = folder / f"{name}.yaml"
        self._module = module
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader: threading.Thread | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} was not started"
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def start(self) -> None:
        """Begin a new life, with `config` as it is now."""
        self.config_path.write_text(yaml.safe_dump(self.config))
        command = [sys.executable, "-P", "-m", self._module, "--config", str(self.config_path)]
        with open(self._log_path, "ab") as log:
            self._process = subprocess.Popen(
                [*command, "--die-with-parent", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)} if self._module.startswith("tests.") else None,
            )
        self._events = queue.Queue()
        self._reader = threading.Thread(target=self._read, args=(self._process, self._events), daemon=True)
        self._reader.start()

    def wait_ready(self) -> None:
        give_up_at = time.perf_counter() + READY_WITHIN_S
        while True:
            try:
                event = self._events.get(timeout=max(0.0, give_up_at - time.perf_counter()))
            except queue.Empty:
                event = None
            if event is None:
                raise PartFailed(f"{self.name} did not become ready:\n{self.log[-4000:]}")
            if event["event"] == "ready":
                self._keep_ports(event["addresses"])
                return

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def signal_all(self, number: signal.Signals) -> None:
        """The process and its workers, at once."""
        os.killpg(self.pid, number)

    def everyone(self) -> list[psutil.Process]:
        """The process and its workers."""
        process = psutil.Process(self.pid)
        return [process, *process.children(recursive=True)]

    def kill(self) -> None:
        """SIGKILL for the process and its workers; returns when they are gone."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._reap()

    def stop(self, within_s: float = 10.0) -> int:
        """SIGTERM; its exit code. SIGKILL for what is left after `within_s`."""
        assert self._process is not None
        self.signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        code = self._process.returncode
        self.kill()
        return -signal.SIGKILL if code is None else code

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def cpu_s(self) -> float:
        """CPU seconds so far, workers included."""
        times = [one.cpu_times() for one in self.everyone()]
        return float(sum(one.user + one.system for one in times))

    @property
    def _log_path(self) -> Path:
        return self._folder / f"{self.name}.log"

    @staticmethod
    def _read(process: subprocess.Popen[bytes], events: queue.Queue[dict[str, Any] | None]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            events.put(json.loads(line))
        events.put(None)

    def _keep_ports(self, addresses: Mapping[str, str]) -> None:
        self.addresses = dict(addresses)
        for protocol, address in addresses.items():
            port = int(address.rpartition(":")[2])
            if protocol == "artifacts":
                self.config["artifacts"] = {**self.config["artifacts"], "port": port}
            else:
                self.config[f"{protocol}_port"] = port

    def _reap(self) -> None:
        assert self._process is not None and self._process.stdout is not None and self._reader is not None
        self._process.wait(10)
        self._reader.join(10)
        self._process.stdout.close()
        self._process = None

    def __repr__(self) -> str:
        return f"<Part {self.name} {f'pid {self.pid}' if self.alive else 'down'} {self.addresses}>"


class FleetStack(Staged):
    """All parts, running inside `with`.

    Args:
        folder: for configurations, logs and state; kept afterwards.
        edges: by name, what each one's configuration has beside the usual.
        pool: the same for the pool; None starts none.
        gateway: the same for the gateway.
        via: for an edge's or the pool's name and own address, the one by which the gateway reaches it: a proxy's.
        broker_via: the same for the broker, for the gateway and the edges alike.
        modules: by part, the module that is run in the place of its own: one of our tests', with a fault built in.
        foreign: the model for which the pool is a server of the Open Inference Protocol that is none of ours.
    """

    def __init__(
        self,
        folder: Path,
        models: Path,
        *,
        edges: Mapping[str, Config],
        pool: Config | None = None,
        gateway: Config | None = None,
        via: Callable[[str, str], str] | None = None,
        broker_via: Callable[[str], str] = lambda url: url,
        modules: Mapping[str, str] | None = None,
        at_once: int = 3,
        foreign: str = "",
    ) -> None:
        super().__init__()
        self.broker = Mosquitto(folder)
        self.parts: dict[str, Part] = {}
        self._folder = folder
        self._models = models
        self._edges = edges
        self._pool = pool
        self._gateway_config = gateway or {}
        self._via = via
        self._broker_via = broker_via
        self._modules = modules or {}
        self._at_once = at_once
        self._foreign = foreign

    def part(self, name: str) -> Part:
        return self.parts[name]

    @property
    def gateway(self) -> Part:
        return self.parts["gateway"]

    @property
    def http(self) -> str:
        return self.gateway.addresses["http"]

    def state(self) -> dict[str, Any]:
        """The gateway's own account of its targets."""
        with urllib.request.urlopen(f"http://{_bare(self.gateway.addresses['admin'])}/v1/state", timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def targets(self) -> dict[str, dict[str, Any]]:
        return {target["id"]: target for target in self.state()["targets"]}

    def wait_whole(self, within_s: float = WHOLE_WITHIN_S) -> None:
        """Return once the gateway sees every edge and the pool ready.

        Raises PartFailed: it does not within this time. One whose breaker is open stays so while nobody asks anything.
        """
        wanted = {f"edge/{name}" for name in self._edges} | ({"pool/pool"} if self._pool is not None else set())
        give_up_at = time.perf_counter() + within_s
        while True:
            with contextlib.suppress(OSError, urllib.error.URLError):
                if wanted <= {id for id, target in self.targets().items() if target["state"] == "ready"}:
                    return
            if time.perf_counter() > give_up_at:
                raise PartFailed(f"the gateway does not see all of {sorted(wanted)} ready:\n{self.logs}")
            time.sleep(0.05)

    def restart_gateway(self, **changes: Any) -> None:
        """A gateway that has learned nothing yet, with these keys changed; whole when this returns."""
        self.gateway.stop()
        self.gateway.config |= changes
        self.gateway.start()
        self.gateway.wait_ready()
        self.wait_whole()

    @property
    def logs(self) -> str:
        """The end of each part's log, for the message of a failed test."""
        return "\n".join(f"--- {part.name}\n{part.log[-2000:]}" for part in self.parts.values())

    def _start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._stack.enter_context(self.broker)
        self._mqtt = self._broker_via(self.broker.url)
        behind = [self._edge(name, config) for name, config in self._edges.items()]
        if self._pool is not None:
            behind.append(
                self._add("pool", "cloud_pool", {"name": "pool", "threads": 1, **self._usual(), **self._pool})
            )
        self._start_all(behind)
        gateway = self._add("gateway", "gateway", self._gateway_keys())
        gateway.start()
        gateway.wait_ready()
        self.wait_whole()

    def _start_all(self, parts: list[Part]) -> None:
        # All in this thread: a child dies with the thread that started it, not with its process.
        starting: deque[Part] = deque()
        for part in parts:
            if len(starting) >= self._at_once:
                starting.popleft().wait_ready()
            part.start()
            starting.append(part)
        for part in starting:
            part.wait_ready()

    def _edge(self, name: str, config: Config) -> Part:
        keys = {"name": name, "http_port": free_port(), "mqtt": self._mqtt, "state_dir": str(self._folder / name)}
        if self._via is not None:  # what an edge tells the fleet is settled before it has started
            port = free_port()
            config = {"grpc_port": port, "advertise": self._via(name, f"127.0.0.1:{port}"), **config}
        return self._add(name, "edge_agent", {**keys, **self._usual(), **config})

    def _usual(self) -> dict[str, Any]:
        return {"grpc_port": free_port(), "model_repository": str(self._models), "log_level": "warning"}

    def _gateway_keys(self) -> dict[str, Any]:
        ports = {f"{door}_port": free_port() for door in ("http", "metrics", "admin")}
        keys = {"name": "gateway", "mqtt": self._mqtt, "targets": self._targets(), **ports, **self._usual()}
        return {**keys, **self._gateway_config}

    def _targets(self) -> list[dict[str, Any]]:
        if self._pool is None:
            return []
        own = self.parts["pool"].addresses["grpc"]
        found: dict[str, Any] = {"name": "pool", "address": own if self._via is None else self._via("pool", own)}
        return [found | ({"foreign": True, "models": [self._foreign]} if self._foreign else {})]

    def _add(self, name: str, module: str, config: Config) -> Part:
        part = self.parts[name] = Part(name, self._modules.get(name, module), config, self._folder)
        self._stack.callback(part.kill)
        return part

    def __repr__(self) -> str:
        return f"<FleetStack {self.broker.url} {list(self.parts.values())}>"


def _bare(address: str) -> str:
    return address.removeprefix("http://")


@contextlib.contextmanager
def standing_still(part: Part) -> Iterator[None]:
    """The process and its workers are stopped (SIGSTOP) for the duration."""
    everyone = part.everyone()
    for one in everyone:
        one.suspend()
    try:
        yield
    finally:
        for one in everyone:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.resume()
