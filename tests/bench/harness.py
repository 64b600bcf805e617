"""What every benchmark shares: children under measurement, interleaved repeats, goals, and a file of results.

A figure from one run on a shared machine says little. So every configuration is measured in turn within each repeat
(what disturbs one disturbs its neighbours too), ratios are taken within a repeat, and what is printed is the median
with the lowest and highest beside it. CPU time per request is the portable number: it does not care who else was
running.

A goal prints as one line that a script can read:

    goal NAME: FIGURE (aim >= X): met|short|skipped

and everything measured goes to `tests/bench/results/NAME.json` with the commit, the configuration and the machine:
`figures` are plain numbers by name, `detail` holds the spreads and samples behind them. These files are committed, and
the figures of README and docs are taken from them (`tests/bench/figures.py`). `--quick` takes few and short
measurements: it proves that the benchmark runs, its figures are noise; they go to `results/quick`, which git ignores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Literal

import psutil

from tests.bench.provenance import measured_at

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[2]
_SILENT_S = 60.0  # a child that says nothing for so long has failed
_PACKAGES = ("aiohttp", "grpcio", "numpy", "onnxruntime", "protobuf", "torch", "uvloop")


@dataclass(frozen=True)
class Spread:
    """Repeated measurements of one thing."""

    median: float
    low: float
    high: float
    samples: tuple[float, ...]

    @classmethod
    def of(cls, samples: Iterable[float]) -> Spread:
        values = tuple(samples)
        return cls(median(values), min(values), max(values), values)

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} ({self.low:{spec}}..{self.high:{spec}})"


@dataclass(frozen=True)
class Goal:
    """A figure with an aim. `figure` None: it could not be measured here, and `why` says so."""

    name: str
    figure: float | None
    aim: float
    sense: Literal[">=", "<="] = ">="
    why: str = ""

    @property
    def verdict(self) -> Literal["met", "short", "skipped"]:
        if self.figure is None:
            return "skipped"
        reached = self.figure >= self.aim if self.sense == ">=" else self.figure <= self.aim
        return "met" if reached else "short"

    def __str__(self) -> str:
        figure = "-" if self.figure is None else f"{self.figure:.3g}"
        why = f" ({self.why})" if self.why else ""
        return f"goal {self.name}: {figure} (aim {self.sense} {self.aim:g}): {self.verdict}{why}"


@dataclass
class Report:
    """All that one benchmark found. `write` leaves it in the results folder."""

    name: str
    config: dict[str, Any]
    figures: dict[str, Any] = field(default_factory=dict)
    goals: list[Goal] = field(default_factory=list)
    measured: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.measured = measured_at(self.name)  # now, and not at the end: commits may come while it runs

    def goal(self, goal: Goal) -> None:
        self.goals.append(goal)
        print(goal, flush=True)

    def write(self, folder: Path | None = None) -> Path:
        folder = folder or (RESULTS / "quick" if "--quick" in sys.argv else RESULTS)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        found = {
            "name": self.name,
            "measured": self.measured,
            "machine": machine(),
            "config": self.config,
            "figures": numbers(self.figures),
            "detail": self.figures,
            "goals": [{**asdict(goal), "verdict": goal.verdict} for goal in self.goals],
        }
        path.write_text(json.dumps(found, indent=2, default=_plain) + "\n")
        print(f"results in {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
        return path


def numbers(figures: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Every figure by its full name ("link.throughput_c64"), a spread by its median; words are left to the detail."""
    flat: dict[str, float] = {}
    for name, value in figures.items():
        if isinstance(value, Mapping):
            flat |= numbers(value, f"{prefix}{name}.")
        elif isinstance(value, Spread):
            flat[prefix + name] = value.median
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[prefix + name] = value
    return flat


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average": os.getloadavg(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--quick", action="store_true", help="few, short measurements: whether it runs, not how fast")
    options.add_argument("--repeats", type=int, help="measurements of each point")
    options.add_argument("--seconds", type=float, help="length of each measurement")
    return options


class Child:
    """A process under measurement that speaks JSON lines: one on stdout when it is ready, then one per command.

    `core` keeps all its threads on one core, where the machine has enough of them. `python`: another interpreter.
    """

    def __init__(
        self,
        name: str,
        *command: str,
        core: int | None = None,
        log: Path | None = None,
        python: Path = Path(sys.executable),
    ) -> None:
        self.name = name
        self.ready: dict[str, Any] = {}
        self._command = command
        self._core = core
        self._log = log
        self._python = python
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Child:
        log = self._log.open("wb") if self._log else None
        try:
            self._process = await asyncio.create_subprocess_exec(
                str(self._python),
                *self._command,
                cwd=ROOT,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, "GRPC_VERBOSITY": "ERROR"},
                preexec_fn=None if self._core is None else self._pin,  # a fork beside threads of gRPC may crash
            )
        finally:
            if log is not None:
                log.close()
        self.ready = await self.line()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.terminate()
        try:
            async with asyncio.timeout(10):
                await self._process.communicate()
        except TimeoutError:
            self._process.kill()
            await self._process.communicate()

    async def command(self, **words: Any) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(words).encode() + b"\n")
        await self._process.stdin.drain()

    async def line(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        async with asyncio.timeout(_SILENT_S):
            raw = await self._process.stdout.readline()
        if not raw:
            raise RuntimeError(f"{self.name} ended; its stderr says why")
        found = json.loads(raw)
        assert isinstance(found, dict)
        return found

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def cpu_s(self) -> float:
        """CPU seconds so far, of all its threads."""
        return cpu_s(self.pid)

    def _pin(self) -> None:
        if self._core is not None:
            os.sched_setaffinity(0, {self._core})


def cpu_s(pid: int) -> float:
    """CPU seconds of a process. On Linux its own clock tells, in nanoseconds; elsewhere ticks of 10 ms do."""
    if sys.platform == "linux":
        return time.clock_gettime(~pid << 3 | 2)  # as clock_getcpuclockid(3) makes it
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def cores() -> tuple[int | None, int | None]:
    """A core for what is measured and one for all else; None where there are not two to give."""
    allowed = sorted(os.sched_getaffinity(0))
    return (allowed[-1], allowed[0]) if len(allowed) >= 2 else (None, None)


def ratios(over: Sequence[float], under: Sequence[float]) -> Spread:
    """`over / under`, repeat by repeat."""
    return Spread.of(a / b for a, b in zip(over, under, strict=True))


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Columns wide enough for their longest cell; the first to the left, the others to the right."""
    lines = [list(header), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        cells = [
            line[0].ljust(widths[0]),
            *[cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)],
        ]
        print("  ".join(cells).rstrip(), flush=True)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _plain(value: object) -> object:
    if isinstance(value, Spread):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} in the results")
