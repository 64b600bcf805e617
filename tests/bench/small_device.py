"""What an agent takes of a small device: memory of all its processes, seconds to ready, and a core's share at rest.

    python -m tests.bench.small_device [--quick]

A real agent with int8 MiniLM and a real broker, as a device runs it, with only what an edge installs. Each repeat
starts it twice on one state folder: `new` measures what the model costs, `known` is a restart and need not. Memory is
counted when it is ready and again after requests of every size that it takes; resident (RSS) counts what processes
share in each of them, proportional (PSS) once, so the goal is kept by the harder of the two. `bare` is a Python that
has only imported ONNX Runtime and loaded the same model: what no agent could do without.

Aims: at most 250 MB resident, 5 s to ready, 1 % of a core at rest with a heartbeat a second.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import yaml

from tests.bench.harness import Goal, Report, Spread, parser, table
from tests.e2e.test_small_installs import BLOCKER, NOT_FOR
from tests.support.mqtt.brokers import MOSQUITTO, Embedded, Mosquitto
from tidegate.models.repository import Repository

MODELS: Final = Path(__file__).parents[2] / ".tidegate" / "models"
MEMORY_AIM_MB, READY_AIM_S, IDLE_AIM_RATIO = 250.0, 5.0, 0.01
_SIZES: Final = ((1, 4), (1, 16), (1, 64), (1, 128), (4, 128), (4, 16))
_BARE: Final = """
import sys, onnxruntime
options = onnxruntime.SessionOptions(); options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
print("{}", flush=True); sys.stdin.read()
"""


@dataclass
class Process:
    """One program and its children, up to its first `ready` line."""

    popen: subprocess.Popen[str]
    ready_s: float
    ready: dict[str, Any]

    def everyone(self) -> list[psutil.Process]:
        own = psutil.Process(self.popen.pid)
        return [own, *own.children(recursive=True)]

    def megabytes(self) -> tuple[float, float]:
        """Resident and proportional, all processes together."""
        found = [one.memory_full_info() for one in self.everyone()]
        return sum(one.rss for one in found) / 1e6, sum(one.pss for one in found) / 1e6

    def cpu_s(self) -> float:
        times = [one.cpu_times() for one in self.everyone()]
        return float(sum(one.user + one.system for one in times))


@contextmanager
def running(command: list[str], environment: Mapping[str, str], event: str | None) -> Iterator[Process]:
    began_at = time.perf_counter()
    popen = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        assert popen.stdout is not None
        for line in popen.stdout:
            said = json.loads(line)
            if said.get("event") == "failed":
                raise SystemExit(f"the agent cannot start: {said['reason']}")
            if said.get("event") == event:
                yield Process(popen, time.perf_counter() - began_at, said)
                return
        raise SystemExit("the agent ended before it was ready")
    finally:
        popen.terminate()
        popen.wait(15)
        for stream in (popen.stdin, popen.stdout):
            if stream is not None:
                stream.close()


def agent(folder: Path, broker: str) -> list[str]:
    config = {
        "name": "bench",
        "grpc_port": 0,
        "http_port": 0,
        "mqtt": broker,
        "model_repository": str(MODELS),
        "models": ["minilm"],
        "state_dir": str(folder / "state"),
    }
    (folder / "edge.yaml").write_text(yaml.safe_dump(config))
    return [sys.executable, "-P", "-m", "edge_agent", "--config", str(folder / "edge.yaml")]


def ask_every_size(address: str, rounds: int) -> None:
    for rows, tokens in _SIZES * rounds:
        ids = [[101, *[2051] * (tokens - 2), 102]] * rows
        inputs = [
            {"name": name, "shape": [rows, tokens], "datatype": "INT64", "data": data}
            for name, data in (("input_ids", ids), ("attention_mask", [[1] * tokens] * rows))
        ]
        body = json.dumps({"inputs": inputs}).encode()
        with urllib.request.urlopen(f"{address}/v2/models/minilm/infer", body, timeout=60) as answer:
            answer.read()


def measured(repeats: int, idle_s: float, rounds: int, broker: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}

    def note(**figures: float) -> None:
        for name, figure in figures.items():
            found.setdefault(name, []).append(figure)

    artefact = next(Repository(MODELS).root.glob("minilm/*/int8.onnx"))
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as name:
            folder = Path(name)
            (folder / "sitecustomize.py").write_text(BLOCKER)
            path = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
            small = {"PYTHONPATH": path, "BLOCKED_MODULES": " ".join(NOT_FOR["edge"])}
            with running([sys.executable, "-c", _BARE, str(artefact)], {}, None) as bare:
                note(bare_rss_mb=bare.megabytes()[0])
            with running(agent(folder, broker), small, "ready") as new:
                rss_mb, pss_mb = new.megabytes()
                note(new_ready_s=new.ready_s, rss_mb=rss_mb, pss_mb=pss_mb)
                ask_every_size(new.ready["addresses"]["http"], rounds)
                note(served_rss_mb=new.megabytes()[0])
                before_s = new.cpu_s()
                time.sleep(idle_s)
                note(idle_ratio=(new.cpu_s() - before_s) / idle_s)
            with running(agent(folder, broker), small, "ready") as known:
                note(known_ready_s=known.ready_s)
    return found


def main() -> None:
    chosen = parser(__doc__ or "").parse_args()
    repeats, idle_s, rounds = (1, 5.0, 2) if chosen.quick else (chosen.repeats or 5, chosen.seconds or 30.0, 10)
    report = Report("small_device", {"repeats": repeats, "idle_s": idle_s, "rounds": rounds})
    if not (MODELS / "minilm").is_dir():
        for name, aim in (("rss_mb", MEMORY_AIM_MB), ("ready_s", READY_AIM_S), ("idle_ratio", IDLE_AIM_RATIO)):
            report.goal(Goal(f"small_device_{name}", None, aim, "<=", f"there is no {MODELS / 'minilm'}: `make run`"))
        report.write()
        return
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as folder:
        kind = Mosquitto if MOSQUITTO else Embedded
        with kind(Path(folder)) as broker:
            found = measured(repeats, idle_s, rounds, broker.url)
    figures: dict[str, Any] = {name: Spread.of(samples) for name, samples in found.items()}
    ratios = [own / bare for own, bare in zip(found["rss_mb"], found["bare_rss_mb"], strict=True)]
    figures["rss_over_bare"] = Spread.of(ratios)
    table(["figure", "median (lowest..highest)"], [[name, f"{spread:.3f}"] for name, spread in figures.items()])
    report.figures = figures
    report.goal(Goal("small_device_rss_mb", figures["rss_mb"].median, MEMORY_AIM_MB, "<="))
    report.goal(Goal("small_device_served_rss_mb", figures["served_rss_mb"].median, MEMORY_AIM_MB, "<="))
    report.goal(Goal("small_device_ready_s", figures["new_ready_s"].median, READY_AIM_S, "<="))
    report.goal(Goal("small_device_idle_ratio", figures["idle_ratio"].median, IDLE_AIM_RATIO, "<="))
    report.write()


if __name__ == "__main__":
    main()
