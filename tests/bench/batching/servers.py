"""Everybody who is measured, as real processes: the thread that computes alone on one core, all else on the other.

The benchmark itself stays on the second core, and what it starts is born there; then whoever computes is moved: our
pool's worker from outside, the peers' model threads by themselves. With a single core nobody is moved.

Our pools serve copies of the demo model that differ in one key of the manifest: who forms the batches. `deadline`, the
default, has a pool of its own; its rivals share one, each asked alone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import yaml

from tests.bench.batching.targets import opened
from tests.bench.harness import ROOT
from tests.support.faults.fleet_stack import Part
from tidegate.testing.ports import free_port

_VERSIONS: Final = ROOT / ".tidegate" / "models" / "minilm"
# The folder of the demo model's newest version.
DEMO: Final = max(_VERSIONS.glob("[0-9]*"), key=lambda folder: int(folder.name), default=_VERSIONS / "1")
PEERS: Final = ROOT / ".venv-peers"
POLICIES: Final = ("deadline", "none", "window", "eager", "adaptive")
WINDOW_S: Final = 0.005  # what the peers wait, too
_UP_WITHIN_S: Final = 60.0
_HERE: Final = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Where:
    """How to ask somebody: for the generator."""

    kind: str
    port: int
    model: str

    def words(self) -> dict[str, Any]:
        return {"kind": self.kind, "port": self.port, "model": self.model}


def variant_of(manifest: Mapping[str, Any], *, engine: str, precision: str) -> dict[str, Any] | None:
    """The first variant like that."""
    found = (one for one in manifest["variants"] if (one["engine"], one["precision"]) == (engine, precision))
    return next(found, None)


def demo_manifest() -> dict[str, Any]:
    path = DEMO / "model.yaml"
    if not path.is_file():
        raise SystemExit("this benchmark needs the demo model: tidegate model build minilm")
    manifest: dict[str, Any] = yaml.safe_load(path.read_text())
    return manifest


def add_model(models: Path, name: str, variant: Mapping[str, Any], batching: Mapping[str, Any]) -> None:
    """A copy of the demo model of this name, with one variant, in a repository."""
    folder = models / name / "1"
    folder.mkdir(parents=True, exist_ok=True)
    manifest = demo_manifest()
    manifest |= {"name": name, "version": "1", "variants": [{**variant, "where": ["pool"]}]}
    manifest["batching"] = {**manifest["batching"], "max_batch_size": 32, **batching}
    manifest.pop("text", None)
    (folder / "model.yaml").write_text(yaml.safe_dump(manifest, sort_keys=False))
    os.link(DEMO / variant["artefact"], folder / variant["artefact"])


class Pool:
    """`tidegate pool` inside `with`. Its workers each get one of `cores`; None leaves them where they are."""

    def __init__(
        self,
        name: str,
        repository: Path,
        folder: Path,
        cores: tuple[int, ...] | None,
        device: str = "cpu",
        **config: Any,
    ) -> None:
        own = {"name": name, "grpc_port": 0, "model_repository": str(repository), "device": device, "threads": 1}
        self._part = Part(name, "cloud_pool", {**own, "log_level": "warning", **config}, folder)
        self._cores = cores

    def __enter__(self) -> Pool:
        self._part.start()
        try:
            self._part.wait_ready()
        except BaseException:
            self._part.kill()
            raise
        if self._cores is not None:
            for worker, core in zip(self._workers(), self._cores, strict=True):
                for thread in worker.threads():
                    os.sched_setaffinity(thread.id, {core})
        return self

    def __exit__(self, *_: object) -> None:
        self._part.stop()

    @property
    def port(self) -> int:
        return int(self._part.addresses["grpc"].rpartition(":")[2])

    def cpu_s(self) -> tuple[float, float]:
        """CPU seconds so far: of the server, and of its workers."""
        server = psutil.Process(self._part.pid).cpu_times()
        workers = [worker.cpu_times() for worker in self._workers()]
        return server.user + server.system, sum(one.user + one.system for one in workers)

    def _workers(self) -> list[psutil.Process]:
        everyone = psutil.Process(self._part.pid).children(recursive=True)
        return [one for one in everyone if "tidegate.workers.child" in one.cmdline()]


class Peer:
    """Somebody else's server inside `async with`, in the interpreter that has it."""

    def __init__(
        self, name: str, script: str, arguments: list[str], where: Where, log: Path, **environment: str
    ) -> None:
        self.name = name
        self.where = where
        self._environment = environment
        self._command = [str(PEERS / "bin" / "python"), str(_HERE / "peers" / script), *arguments]
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Peer:
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | self._environment,
            )
        try:
            async with asyncio.timeout(_UP_WITHIN_S):
                await self._answers()
        except BaseException:
            await self._kill()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._kill()

    async def _answers(self) -> None:
        async with opened(self.where.kind, self.where.port, self.where.model) as target:
            while not (await target.ask([101, 102], 3.0)).answered:
                assert self._process is not None
                if self._process.returncode is not None:
                    raise PeerFailed(f"{self.name} ended:\n{self._log.read_text(errors='replace')[-2000:]}")
                await asyncio.sleep(0.2)  # noqa: TID251 - real time, a foreign process

    async def _kill(self) -> None:
        """All of its processes: it is the head of its own session."""
        assert self._process is not None
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), 5)

    def __repr__(self) -> str:
        return f"<Peer {self.name} {self.where}>"


class PeerFailed(Exception):
    """It did not come up; the message holds the end of its log."""


def missing(package: str) -> str:
    """Why a peer cannot be measured here; empty when it can."""
    python = PEERS / "bin" / "python"
    if not python.exists():
        return "not installed: make peers"
    found = subprocess.run([python, "-c", f"import {package}"], capture_output=True, check=False)
    return "" if found.returncode == 0 else "not installed: make peers"


def mosec(max_batch: int, graph: Path, core: int | None, logs: Path) -> Peer:
    name, port = f"mosec-b{max_batch}", free_port()
    told = {"BENCH_MODEL": str(graph), "BENCH_CORE": _named(core), "BENCH_MAX_BATCH": str(max_batch)}
    where = Where("mosec", port, "minilm")
    return Peer(name, "mosec_server.py", ["--port", str(port)], where, logs / f"{name}.log", **told)


def triton(graph: Path, core: int | None, logs: Path) -> Peer:
    ports = [free_port() for _ in range(3)]
    arguments = [str(graph), _named(core), *map(str, ports)]
    return Peer("triton", "triton_server.py", arguments, Where("triton", ports[0], "minilm"), logs / "triton.log")


def _named(core: int | None) -> str:
    return "-1" if core is None else str(core)


def stay_on(core: int | None) -> None:
    """Keep this process, and whatever it will start, on one core."""
    if core is not None:
        os.sched_setaffinity(0, {core})
