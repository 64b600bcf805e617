"""What is asked: the requests of `talk.yaml`, with prompts whose answers have the lengths that they will have.

A paced engine's tokens are checksums of all tokens before them, and one in 24 is its end. So how long an answer gets is
chance, the same at every target, and known beforehand to nothing but the bound.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random
from typing import Final

from msgspec.structs import replace

from simulator.scenarios.scenario import Scenario
from simulator.scenarios.scenario_file import LoadedScenario, load
from simulator.world.arrivals import requests
from tests.bench.generate_routing.schedule import Asked
from tests.support.paced_generation import QUICK, write_pace
from tidegate.engines.generation.limits import GenerationLimits
from tidegate.engines.generation.paced_generation import PacedGenerativeEngine
from tidegate.generate.request import GenerateRequest

PATH: Final = Path(__file__).parent / "talk.yaml"
IDS: Final = (3, 90)  # tokens that are one character each in the text side of tests
STOP_CHANCE: Final = 1.0 / 24.0
LEAST_TOKENS: Final = 4


@cache
def talk() -> LoadedScenario:
    return load(str(PATH))


class Lengths:
    """How many tokens an undisturbed engine answers a prompt with."""

    def __init__(self, folder: Path, stop_tokens: tuple[int, ...]) -> None:
        folder.mkdir()
        pace = replace(
            QUICK, prefill_ms=0.0, step_ms=((1.0, 1e-6),), ids=IDS, context=512, prefill_chunk=512,
            stop_chance=STOP_CHANCE,
        )  # fmt: skip
        self._engine = PacedGenerativeEngine(write_pace(folder, pace), limits=GenerationLimits(stop_tokens=stop_tokens))

    def of(self, prompt: tuple[int, ...], max_tokens: int) -> int:
        self._engine.begin(1, GenerateRequest(prompt, max_tokens))
        made = 0
        while True:
            for progress in self._engine.step([1]):
                made += len(progress.batch.ids) if progress.batch is not None else 0
                if progress.finished is not None:
                    return made


def schedule(scenario: Scenario, seed: int, lengths: Lengths) -> list[Asked]:
    """All requests of the scenario, in order."""
    found = []
    for one in requests(scenario, seed):
        kind, chance = one.kind, Random(f"{seed} {one.number}")
        assert kind.output is not None and kind.ttft_ms is not None and kind.tpot_ms is not None
        tokens = 0
        while tokens < LEAST_TOKENS:
            prompt = tuple(chance.randint(*IDS) for _ in range(one.length))
            tokens = lengths.of(prompt, kind.output.max_tokens)
        found.append(
            Asked(
                one.number, one.at, kind.name, prompt, tokens, kind.output.max_tokens,
                kind.ttft_ms / 1e3, kind.tpot_ms / 1e3, kind.budget_ms / 1e3,
            )
        )  # fmt: skip
    return found
