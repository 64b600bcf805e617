"""What is measured beside rates: short ones among long ones, more than can be done, and a second worker."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any, Final

import numpy as np

from cloud_pool.core.batching.batcher import EARLY_DROP_RATIO
from tests.bench.batching.contenders import Server
from tests.bench.batching.texts import LONG

REFUSED_WITHIN_S: Final = 0.010
_TOGETHER_S: Final = 0.001  # begun within this of each other: one batch
_LONG_LOAD: Final = 0.7
_PEAK_AT: Final = (0.7, 0.85, 1.0)  # of the limit: goodput is highest somewhere there

Seen = dict[str, Any]


async def split_mix(pool: Server, fifo_rps: float, seconds: float, seed: int, scratch: Path) -> dict[str, float]:
    """Nine short ones for each long one: how often a short one was passed by a long one that could have waited."""
    budget_s, rate = 0.5, _LONG_LOAD * fifo_rps
    seen = await _open(pool, scratch, rate=rate, seconds=seconds, seed=seed, budget_s=budget_s, mix="split")
    short = [one for one in seen if one["answered"] and one["length"] < LONG]
    long = [one for one in seen if one["answered"] and one["length"] == LONG]
    waits = quantiles([one["done_at"] - one["at"] for one in short], n=100)
    return {
        "rate": rate,
        "answered": (len(short) + len(long)) / len(seen),
        "short_p50_ms": waits[49] * 1e3,
        "short_p99_ms": waits[98] * 1e3,
        "long_compute_ms": float(np.median([one["compute_s"] for one in long])) * 1e3,
        "short_passed_ratio": sum(_passed(one, long, budget_s) for one in short) / len(short),
    }


def _passed(short: Seen, long: Sequence[Seen], budget_s: float) -> bool:
    """Whether a long batch began while it waited, although that one could have gone after it and been in time."""
    began_at = _began_at(short)
    return any(
        short["at"] + _TOGETHER_S < _began_at(other) < began_at - _TOGETHER_S
        and other["done_at"] + short["compute_s"] <= other["at"] + budget_s
        for other in long
    )


def _began_at(one: Seen) -> float:
    return float(one["done_at"] - one["compute_s"])


async def overload(
    pool: Server, limit_rps: float, bare: tuple[list[int], list[float]], seconds: float, seed: int, scratch: Path
) -> dict[str, float]:
    """Twice what one core can do: what is still answered in time, and how soon the others are told.

    Args:
        bare: lengths of rows and the seconds that each took alone, for when a request has become hopeless.
    """
    budget_s = 0.25
    run = {"seconds": seconds, "seed": seed, "budget_s": budget_s}
    peak = max([_goodput(await _open(pool, scratch, rate=at * limit_rps, **run), budget_s) for at in _PEAK_AT])
    seen = await _open(pool, scratch, rate=2.0 * limit_rps, **run)
    slope, fixed = np.polyfit(*bare, 1)
    refused = [one for one in seen if one["refused"]]
    late = [
        one["done_at"] - max(one["at"], one["at"] + budget_s - EARLY_DROP_RATIO * (fixed + slope * one["length"]))
        for one in refused
    ]
    return {
        "peak_goodput": peak,
        "goodput": _goodput(seen, budget_s),
        "goodput_ratio": _goodput(seen, budget_s) / peak,
        "refused": len(refused) / len(seen),
        "refused_in_time": sum(one <= REFUSED_WITHIN_S for one in late) / max(1, len(late)),
        "refused_late_p99_ms": quantiles(late, n=100)[98] * 1e3 if len(late) > 1 else 0.0,
        "answered_late": sum(one["answered"] and one["done_at"] - one["at"] > budget_s for one in seen) / len(seen),
    }


def _goodput(seen: Sequence[Seen], budget_s: float) -> float:
    """Answers in time, a second of arrivals."""
    in_time = sum(one["answered"] and one["done_at"] - one["at"] <= budget_s for one in seen)
    return in_time / max(one["at"] for one in seen)


async def _open(pool: Server, scratch: Path, **words: Any) -> list[Seen]:
    into = scratch / "seen.json"
    await pool.ask("open", into=str(into), **words)
    found: list[Seen] = json.loads(into.read_text())
    return found
