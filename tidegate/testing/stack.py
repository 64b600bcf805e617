"""A whole Tidegate for a test: `tidegate up` as a process, with simulated links between its parts.

The models only take their time (`engine: paced`), unless a repository is given: a stack of processes is about what
happens between them. Each link is controlled over its own HTTP, as any client would.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

import tidegate
from tidegate.netsim.proxy.scenario import names
from tidegate.testing.ports import NoPorts, free_ports

READY_WITHIN_S: Final = 120.0
STOPS_WITHIN_S: Final = 10.0
_DIES_WITHIN_S: Final = 0.25  # after SIGKILL, on a busy machine; a test that reuses a stack waits as long
MODEL: Final = "encoder"
_PORTS_BEFORE_EDGES, _PORTS_PER_PART = 6, 2


class StackFailed(Exception):
    """The stack did not start; the message holds its output."""


class ControlledLink:
    """One link of a running stack, over its HTTP control."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url

    def partition(self, kind: str = "blackhole", direction: str = "both", *, for_s: float | None = None) -> None:
        self._ask("PUT", "partition", {"kind": kind, "direction": direction, "for_s": for_s})

    def heal(self) -> None:
        self._ask("DELETE", "partition")

    def play(self, scenario: str | Mapping[str, Any]) -> None:
        """Apply a scenario; its timeline begins now."""
        self._ask("PUT", "scenario", {"name": scenario} if isinstance(scenario, str) else dict(scenario))

    def apply(self, **profile: Any) -> None:
        self._ask("PUT", "link", {"delay_ms": 0.0, **profile})

    def toxic(self, name: str, direction: str, **profile: Any) -> None:
        self._ask("PUT", f"toxics/{name}", {"direction": direction, **profile})

    def remove(self, name: str) -> None:
        self._ask("DELETE", f"toxics/{name}")

    def state(self) -> dict[str, Any]:
        return self._ask("GET", "state")

    def events(self) -> list[dict[str, Any]]:
        """The events that are kept, oldest first."""
        found: list[dict[str, Any]] = []
        after = 0
        while (page := self._ask("GET", f"events?after={after}"))["events"]:
            found += page["events"]
            after = page["next"]
        return found

    def __repr__(self) -> str:
        return f"<ControlledLink {self.name} at {self.url}>"

    def _ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(f"{self.url}/{path}", data=data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except urllib.error.HTTPError as error:
            with error:
                raise ValueError(f"{self.name}: {json.load(error)['error']}") from error


class Stack:
    """A running stack: `wait_ready`, then use it; `stop` ends every process.

    Args:
        links: the scenario in front of each part: pool, edge-1, … or broker.
        models: a repository; None: one paced model called "encoder".
    """

    def __init__(
        self, folder: Path, *, links: Mapping[str, str], edges: int = 2, models: Path | None = None, seed: int = 1
    ) -> None:
        self.folder = folder
        self.links: dict[str, ControlledLink] = {}
        self._scenarios = {part: one if one in names() else str(Path(one).absolute()) for part, one in links.items()}
        self._ready: dict[str, Any] = {}
        self._running: list[int] = []  # a pidfd of each part
        self._answered = threading.Event()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            ports = free_ports(_PORTS_BEFORE_EDGES + _PORTS_PER_PART * (edges + len(links)))
        except NoPorts as error:
            raise StackFailed(str(error)) from error
        options = [f"--link={part}={scenario}" for part, scenario in links.items()]
        command = [
            sys.executable, "-P", "-m", "tidegate.cli", "--die-with-parent", str(os.getpid()),
            "up", "--json", "--edges", str(edges), "--ports-from", str(ports), "--seed", str(seed),
            "--data-dir", str(folder), "--models", str(models or _paced(folder / "paced")), *options,
        ]  # fmt: skip
        self._output_path = folder / "up.words"
        with self._output_path.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=output, start_new_session=True, env=_environment()
            )
        self._reader = threading.Thread(target=self._read, name="tidegate up", daemon=True)
        self._reader.start()

    def wait_ready(self) -> Stack:
        """Raises StackFailed."""
        if not self._answered.wait(READY_WITHIN_S) or not self._ready:
            output = self._output_path.read_text(errors="replace")
            self.stop()
            raise StackFailed(f"`tidegate up` did not get ready:\n{output}")
        self.links = {name: ControlledLink(name, url) for name, url in self._ready["links"].items()}
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                self._running.append(os.pidfd_open(pid))  # a number alone may be another process's one day
        return self

    @property
    def http(self) -> str:
        """The gateway's HTTP endpoint."""
        return str(self._ready["http"])

    @property
    def grpc(self) -> str:
        return str(self._ready["grpc"])

    @property
    def admin(self) -> str:
        return str(self._ready["admin"])

    @property
    def metrics(self) -> str:
        return str(self._ready["metrics"])

    @property
    def pids(self) -> dict[str, int]:
        """The process id of each part, for faults of processes: `os.kill(stack.pids["edge-1"], signal.SIGSTOP)`."""
        return {one["name"]: one["pid"] for one in self._ready["processes"]}

    def state(self) -> dict[str, Any]:
        """The gateway's state of its targets, from its admin endpoint."""
        with urllib.request.urlopen(f"{self.admin}/v1/state", timeout=10) as answer:
            state: dict[str, Any] = json.load(answer)
            return state

    def infer(self, units: int = 8, *, budget_ms: float = 2000.0) -> tuple[int, Mapping[str, str]]:
        """Send a request of so many tokens to the paced model; (HTTP status, headers of the answer)."""
        shape = [1, units]
        body = {
            "inputs": [
                {"name": name, "datatype": "INT64", "shape": shape, "data": [1] * units}
                for name in ("input_ids", "attention_mask")
            ]
        }
        request = urllib.request.Request(
            f"{self.http}/v2/models/{MODEL}/infer",
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json", "tidegate-budget-ms": f"{budget_ms:g}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, dict(answer.headers)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, dict(error.headers)

    def is_whole(self) -> bool:
        """Whether each part still runs as the process that it was at first; one just killed ends meanwhile."""
        if self._process.poll() is not None or len(self._running) < len(self.pids):
            return False
        ends = select.poll()
        for descriptor in self._running:
            ends.register(descriptor, select.POLLIN)
        return not ends.poll(_DIES_WITHIN_S * 1000)

    def mend(self) -> None:
        """Let stopped processes go on, and have each link play its first scenario from the beginning."""
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        for name, link in self.links.items():
            scenario = self._scenarios[name]
            try:
                link.play(scenario if scenario in names() else yaml.safe_load(Path(scenario).read_text()))
            except ValueError:  # it names recordings, which are not read over HTTP
                link.heal()
                for layer in link.state()["layers"]:
                    if layer != "base":
                        link.remove(layer)

    def log(self) -> str:
        """The events of every link, as text."""
        lines = []
        for link in self.links.values():
            with contextlib.suppress(OSError):
                lines += [f"{link.name}: {json.dumps(event)}" for event in link.events()]
        return "\n".join(lines)

    def stop(self) -> None:
        """Stop every process: SIGINT, then SIGKILL."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STOPS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        while self._running:
            os.close(self._running.pop())
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __repr__(self) -> str:
        return f"<Stack pid {self._process.pid} {self._ready.get('http', 'starting')}>"

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not self._ready:
                self._ready = json.loads(line)
                self._answered.set()
        self._answered.set()


def _environment() -> dict[str, str]:
    """This process's environment, in which Tidegate's packages are found before a user's packages of the same name.

    `-P` keeps the working folder out of a child's path; a PYTHONPATH, which children inherit, may still name it.
    """
    theirs = os.environ.get("PYTHONPATH")
    ours = str(Path(tidegate.__file__).parents[1])
    return dict(os.environ) if not theirs else {**os.environ, "PYTHONPATH": os.pathsep.join([ours, theirs])}


def _paced(folder: Path) -> Path:
    """A model repository with one paced model."""
    from tidegate.tools.build.demo.paced import PacedCosts, add_paced

    costs = PacedCosts(edge_ms=((1, 5), (128, 30)), pool_ms=((1, 10), (1024, 40)), edge_max_units=128)
    add_paced(MODEL, costs, folder)
    return folder
