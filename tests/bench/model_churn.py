"""Models that come and go: what a load costs the models that serve, and what choosing by value saves against plain LRU.

`load` is with real processes: a pool serves one model to callers in a closed loop, while another is loaded and
unloaded; calm and churning times take turns, and the ratio is of their p99. `evict` is simulated
(`simulator/model_churn.py`, with the pool's own decisions): 50 models of unequal size in room for 8, by Zipf's law,
popularity moving once. Callers have budgets from 0.3 to 10 s, so that some could wait for a cold start and some could
not. The same requests come to both.
`tried` is the same with few models and real processes: all are answered, and never more are in memory than may be.

    python -m tests.bench.model_churn [--quick] [--repeats SEEDS]
"""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import psutil

from cloud_pool.app import PoolApp
from cloud_pool.config import PoolConfig
from simulator.model_churn import ByValue, ChurnLoad, LeastRecentlyUsed, run_churn
from tests.bench.harness import Goal, Report, Spread, parser, ratios, table
from tests.cloud_pool.models import TEXT, manifest_of
from tests.cloud_pool.workers_support import text, write_text_model
from tidegate import clock
from tidegate.arrays import array_to_tensor
from tidegate.config import load
from tidegate.models.digest import sha256_of
from tidegate.models.repository import save_manifest
from tidegate.types import Call, Datatype, InferRequest

CALLERS: Final = 4
REST_S: Final = 0.01
ZIPF: Final = (0.8, 1.0, 1.2)


def put(root: Path, name: str) -> None:
    folder = root / name / "1"
    folder.mkdir(parents=True)
    path = write_text_model(folder / TEXT.variants[0].artefact)
    variant = msgspec.structs.replace(TEXT.variants[0], sha256=sha256_of(path), size_bytes=path.stat().st_size)
    save_manifest(folder, msgspec.structs.replace(manifest_of(variants=(variant,)), name=name))


async def ask(app: PoolApp, name: str, budget_s: float = 60.0) -> float:
    """Seconds that the answer took."""
    tensors = tuple(array_to_tensor(key, one, Datatype.INT64) for key, one in text(64).items())
    now = clock.now()
    await app.host.infer(Call(InferRequest(name, tensors), "link", now, now + budget_s))
    return clock.now() - now


async def measured_load(rounds: int, calm_s: float) -> tuple[list[float], list[float], int]:
    """p99 in seconds of each calm and of each churning time, and the requests that were lost."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "models"
        put(root, "stays")
        put(root, "comes")
        keys = {"grpc_port": 0, "model_repository": root, "models": ("stays",), "warmup_budget_s": 1.0}
        async with PoolApp(load(PoolConfig, model_control="explicit", **keys)) as app:
            return await _rounds(app, rounds, calm_s)


async def _rounds(app: PoolApp, rounds: int, calm_s: float) -> tuple[list[float], list[float], int]:
    control = app.control
    taken: list[float] = []
    lost = 0
    stop = asyncio.Event()

    async def caller() -> None:
        nonlocal lost
        while not stop.is_set():
            try:
                taken.append(await ask(app, "stays"))
            except Exception:
                lost += 1
            await clock.sleep(REST_S)

    calm, churning = list[float](), list[float]()
    callers = [asyncio.create_task(caller()) for _ in range(CALLERS)]
    await clock.sleep(1.0)
    for _ in range(rounds):
        taken.clear()
        await clock.sleep(calm_s)
        calm.append(float(np.percentile(taken, 99)))
        taken.clear()
        await control.load("comes")
        await control.unload("comes")
        churning.append(float(np.percentile(taken, 99)))
    stop.set()
    await asyncio.gather(*callers)
    return calm, churning, lost


async def tried(models: int, room: int, requests: int) -> tuple[int, int]:
    """Requests that were answered, of callers with time, and the most workers that there were at once."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "models"
        for number in range(models):
            put(root, f"m{number}")
        keys = {"grpc_port": 0, "model_repository": root, "warmup_budget_s": 0.1, "resident_models": room}
        draws = np.random.default_rng(1)
        answered = most = 0
        async with PoolApp(load(PoolConfig, model_control="explicit", **keys)) as app:
            for _ in range(requests):
                rank = min(models - 1, int(draws.zipf(1.5)) - 1)
                await ask(app, f"m{rank}")
                answered += 1
                most = max(most, sum(_is_worker(child) for child in psutil.Process().children()))
        return answered, most


def _is_worker(child: psutil.Process) -> bool:
    """Whether it is one of the pool's workers that runs: one that has just ended has no command line any more."""
    with suppress(psutil.NoSuchProcess):  # a zombie as well
        return "tidegate" in " ".join(child.cmdline())
    return False


def evict(report: Report, seeds: range, *, quick: bool) -> None:
    rows = []
    for zipf in ZIPF:
        shape = ChurnLoad(
            zipf=zipf, rate_per_s=5.0, duration_s=300.0 if quick else 900.0, shift_s=150.0 if quick else 450.0
        )
        ours, lru = list[float](), list[float]()
        for seed in seeds:
            models, requests = shape.made(seed)
            room_bytes = shape.room_models * sum(one.size_bytes for one in models) / len(models)
            ours.append(run_churn(models, requests, ByValue(models, room_bytes), seed=seed).missed_share)
            lru.append(run_churn(models, requests, LeastRecentlyUsed(models, room_bytes), seed=seed).missed_share)
        of_lru = ratios(ours, lru)
        key = f"zipf_{zipf:g}".replace(".", "_")
        report.figures[key] = {"missed": Spread.of(ours), "lru_missed": Spread.of(lru), "missed_over_lru": of_lru}
        rows.append((f"{zipf:g}", f"{Spread.of(ours):.3f}", f"{Spread.of(lru):.3f}", f"{of_lru:.2f}"))
        report.goal(Goal(f"model_churn_cold_deadlines_missed_over_lru_at_zipf_{zipf:g}", of_lru.median, 2 / 3, "<="))
        print(f"  zipf {zipf:g}: {of_lru:.2f} of what LRU misses", flush=True)
    table(("zipf", "missed", "LRU missed", "over LRU"), rows)


def main() -> None:
    chosen = parser(__doc__ or "").parse_args()
    seeds = range(1, 1 + (chosen.repeats or (1 if chosen.quick else 5)))
    report = Report("model_churn", {"seeds": len(seeds), "models": 50, "room": 8})
    evict(report, seeds, quick=chosen.quick)
    calm, churning, lost = asyncio.run(measured_load(2 if chosen.quick else 8, 3.0))
    over = ratios(churning, calm)
    answered, most = asyncio.run(tried(4, 2, 8 if chosen.quick else 40))
    report.figures["load"] = {"p99_over_calm": over, "calm_p99_s": Spread.of(calm), "lost": float(lost)}
    report.figures["tried"] = {"answered": float(answered), "most_workers": float(most)}
    report.goal(Goal("model_churn_p99_of_others_while_one_is_loaded_over_calm", over.median, 1.1, "<="))
    report.goal(Goal("model_churn_requests_lost_while_one_is_loaded", float(lost), 0.0, "<="))
    report.goal(Goal("model_churn_most_workers_of_2_allowed", float(most), 2.0, "<="))
    report.write()


if __name__ == "__main__":
    main()
