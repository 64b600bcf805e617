"""The actors of the fault matrix: models that only take their time, on many devices, or real ones on two.

Two cores cannot hold nine models at work, so what needs a crowd is played by `paced`: engines that wait as long as the
measured model computes. What must be seen of real models (answers that are right, workers that load weights, a hang in
a runtime) is played by `real`: two edges with the int8 MiniLM, a pool with fp32. Their requests come in three lengths
with made-up tokens from a short list, so there are few different ones, and the true answer to each is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from simulator.scenarios.scenario_file import SCENARIOS
from tidegate.tools.build.demo.paced import PacedNoise, add_paced, costs_of_scenario

EDGES: Final = 8
PACED_MODEL: Final = "encoder"
REAL_MODEL: Final = "minilm"
# Requests a second at which eight paced devices and a pool begin to fail, as `simulator.sweep.knee` finds it.
KNEE_RPS: Final = 124.0
# For everybody; for edges or the pool, whoever is the cheaper; beyond an edge's limit of 128.
SHORT, MIDDLE, LONG = 16, 96, 160
_REAL_RPS: Final = 14.0  # a third of what two cores do while they also carry the load, the proxies and the broker
_STEP: Final = 7  # from one request's first token to the next's, in the list
_DIFFERENT: Final = 6


@dataclass(frozen=True)
class Cast:
    """A fleet's models and devices, and what is asked of them.

    Args:
        scenario: the file of which the load is drawn.
        tokens: what requests are made of; none: any.
        at_once: so many parts may warm up side by side.
        keep_outputs: whether answers come with what they said.
    """

    model: str
    models: Path
    scenario: Path
    knee_rps: float
    edges: Mapping[str, Mapping[str, Any]]
    pool: Mapping[str, Any] = field(default_factory=dict)
    tokens: tuple[int, ...] = ()
    at_once: int = 1
    keep_outputs: bool = False


def paced(folder: Path, *, edges: int = EDGES) -> Cast:
    """Devices of mixed speed that compute nothing."""
    names, knee_rps = _names(edges), KNEE_RPS * edges / EDGES
    raw = yaml.safe_load((SCENARIOS / "paced_fleet.yaml").read_text())
    (group,) = raw["edges"]
    group["count"], raw["knee_rps"] = edges, knee_rps
    scenario = _written(folder, raw)
    noise = PacedNoise(group["noise_sigma"], raw["pools"][0]["noise_sigma"])
    add_paced(PACED_MODEL, costs_of_scenario(scenario), folder / "models", noise=noise)
    (low, high), last = group["slow"], max(1, edges - 1)
    slow = {name: low + (high - low) * place / last for place, name in enumerate(names)}
    configs = {name: {"paced_slow": slow[name], "warmup_budget_s": 20.0} for name in names}
    return Cast(PACED_MODEL, folder / "models", scenario, knee_rps, configs, at_once=edges + 1)


def real(folder: Path, models: Path, *, edges: int = 2) -> Cast:
    """Devices that compute, with the demo models in `models`."""
    raw = yaml.safe_load((SCENARIOS / "paced_fleet.yaml").read_text())
    raw["models"] = {REAL_MODEL: raw["models"][PACED_MODEL]}
    lengths = {"interactive": (SHORT, 60), "document": (MIDDLE, 20), "bulk": (LONG, 20)}
    for kind in raw["classes"]:
        length, share = lengths[kind["name"]]
        kind |= {"model": REAL_MODEL, "share": share, "budget_ms": 1500}
        kind["length"] = {"median": length, "min": length, "max": length}
    only_this = {"models": [REAL_MODEL]}
    return Cast(
        REAL_MODEL, models, _written(folder, raw), _REAL_RPS, dict.fromkeys(_names(edges), only_this), only_this,
        tokens=tuple(2000 + 37 * place for place in range(_STEP * _DIFFERENT)), keep_outputs=True,
    )  # fmt: skip


def _names(edges: int) -> list[str]:
    return [f"device-{number + 1}" for number in range(edges)]


def _written(folder: Path, raw: Any) -> Path:
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path
