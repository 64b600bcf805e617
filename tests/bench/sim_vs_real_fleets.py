"""The two fleets of `sim_vs_real`: one whose models only take their time, and its twin with real models.

Each knows how it is started as processes, its scenario (what the simulated side begins with), its knee and what a
caller sends. The twin's requests are cut from one long stream of real text in the model's own tokens.
"""

from __future__ import annotations

import json
import urllib.request
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Final

from simulator.scenarios.scenario_file import SCENARIOS, load
from tests.bench.harness import ROOT
from tests.support.faults.fleet_stack import FleetStack
from tidegate.tools.build.demo.corpus import texts
from tidegate.tools.build.demo.paced import PacedNoise, add_paced, costs_of_scenario

_WORDS: Final = 4000
_MADE_UP: Final = [2051, 3231, 6251]


class Fleet(ABC):
    """One fleet, both ways."""

    name: str
    model: str
    attainment_aim: float
    path: Path
    seldom_batched = False  # the pool's answers were nearly all computed alone, so they tell what its calls take

    def __init__(self) -> None:
        self.scenario = load(str(self.path)).scenario
        assert self.scenario.knee_rps is not None, f"{self.path} names no knee_rps"
        self.knee_rps = self.scenario.knee_rps

    @property
    def edges(self) -> list[str]:
        return [f"{group.name}-{n + 1}" for group in self.scenario.edges for n in range(group.count)]

    @property
    def ids(self) -> list[str]:
        return [*(f"edge/{name}" for name in self.edges), "pool/pool"]

    @abstractmethod
    def stack(self, scratch: Path) -> FleetStack:
        """The processes, not started yet."""

    def tokens(self) -> list[int]:
        """What requests are cut from; empty: made up."""
        return []

    def lone_call(self, http: str, length: int, tokens: list[int]) -> float:
        """Seconds that the pool computed on one row of this length, with nobody else there."""
        ids = [(tokens or _MADE_UP)[place % len(tokens or _MADE_UP)] for place in range(length)]
        body = {
            "inputs": [
                {"name": name, "shape": [1, length], "datatype": "INT64", "data": data}
                for name, data in (("input_ids", ids), ("attention_mask", [1] * length))
            ],
            "parameters": {"tidegate-variant": "fp32"},
        }
        url = f"{http}/v2/models/{self.model}/infer"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            timing = answer.headers["server-timing"]
        return next(float(part.split("=")[1]) for part in timing.split(",") if "compute" in part) / 1e3


class Paced(Fleet):
    """Scenario `paced_fleet`, its devices' speeds spread as the simulator spreads them."""

    name = "paced"
    model = "encoder"
    attainment_aim = 0.03
    path = SCENARIOS / "paced_fleet.yaml"

    def stack(self, scratch: Path) -> FleetStack:
        (group,) = self.scenario.edges
        models = scratch / "models"
        noise = PacedNoise(group.noise_sigma, self.scenario.pools[0].noise_sigma)
        add_paced(self.model, costs_of_scenario(self.path), models, noise=noise)
        (low, high), last = group.slow, max(1, group.count - 1)
        edges: dict[str, dict[str, Any]] = {
            name: {"paced_slow": low + (high - low) * number / last, "warmup_budget_s": 20.0}
            for number, name in enumerate(self.edges)
        }
        return FleetStack(scratch / "run", models, edges=edges, pool={}, at_once=len(edges) + 1)


class Twin(Fleet):
    """MiniLM, int8 on two edges and fp32 on a pool, warmed up one after another: they share the cores."""

    name = "twin"
    model = "minilm"
    attainment_aim = 0.05
    seldom_batched = True
    path = SCENARIOS / "minilm_twin.yaml"

    def stack(self, scratch: Path) -> FleetStack:
        models = ROOT / ".tidegate" / "models"
        if not (models / self.model / "1" / "model.yaml").is_file():
            raise SystemExit("the twin needs the demo models: tidegate model build minilm")
        only = {"models": [self.model]}
        return FleetStack(scratch / "run", models, edges=dict.fromkeys(self.edges, only), pool=only, at_once=1)

    def tokens(self) -> list[int]:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(ROOT / ".tidegate" / "models" / self.model / "1" / "tokenizer.json"))
        tokenizer.no_truncation()
        return list(tokenizer.encode(" ".join(texts(300)), add_special_tokens=False).ids[:_WORDS])


FLEETS: Final[dict[str, type[Fleet]]] = {"paced": Paced, "twin": Twin}
