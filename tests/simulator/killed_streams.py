"""A small fleet whose devices are killed, cut off and stopped again and again under the answers that they write.

Of every other seed the devices are too slow for the budget of next tokens, so that answers are also handed over to a
better place while their target is well (`gateway/core/request/handover.py`), and killed in the middle of that.

One life of a target ends with each fault. Where, when and how comes from the seed alone, so a run that goes wrong can
be played again. Nothing here is a stub: fleet view, placement, request machine, resumption and queues are those of the
gateway and of devices, on virtual time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from msgspec.structs import replace

from simulator.baselines.policies import HANDING_OVER
from simulator.scenarios.scenario import Fault
from simulator.scenarios.scenario_file import LoadedScenario, parse
from simulator.simulation import simulate
from simulator.world.generation_tally import GenerationTally

_FROM_S: Final = 1.0
_EVERY_S: Final = 0.4  # between two faults, on average
_WRITERS: Final = """
summary: three devices and a card that write, and are killed
duration_s: 40
warmup_s: 0.5
models:
  talker:
    generation:
      edge: {prefill_ms: 0.5, step_ms: [[1, 20], [4, 30]], slots: 4}
      pool: {prefill_ms: 0.1, step_ms: [[1, 20], [8, 24]], slots: 8}
links:
  lan: {delay_ms: 2, jitter: {dist: lognormal, ms: 0.5}}
  wan: {delay_ms: 10, jitter: {dist: lognormal, ms: 2.0}}
edges:
  - {name: device, count: 3, slow: [1.0, 1.4], link: lan}
pools:
  - {name: card, link: wan}
arrivals: {rate: 2.5}
classes:
  - name: talk
    share: 1
    model: talker
    length: {median: 30, sigma: 0.5, min: 4, max: 200}
    output: {max_tokens: 80, median: 30, sigma: 0.6}
    ttft_ms: 500
    tpot_ms: 60
    budget_ms: 15000
"""
TARGETS: Final = ("edge/device-1", "edge/device-2", "edge/device-3", "pool/card")
# Killed: its connections are reset, what it wrote is gone. Stopped: its connections stay, and nothing more comes.
KINDS: Final = (("crash", 0.05, 0.6), ("crash", 0.05, 0.6), ("stop", 0.3, 1.2))


@dataclass(frozen=True)
class Lives:
    """What came of one seed."""

    seed: int
    lives: int  # of targets, that were ended
    answers: int
    whole: int
    resumed: int
    handed_over: int  # of those as planned, from a target that was well
    broken: dict[str, int]  # answers that had begun and broke off, by the reason that their callers were told
    refused: int  # requests of which no target made a token
    wrong: int  # answers with a token lost, doubled or missing
    gap_p50_s: float
    gap_p99_s: float

    def __str__(self) -> str:
        ends = f"{self.whole} whole, {self.refused} refused, broken off {self.broken}, {self.wrong} wrong"
        return f"seed {self.seed}: {self.answers} answers, {ends}"


def lives_of(seed: int, seconds: float = 40.0) -> Lives:
    """One seed, to its end: `simulate` insists that each request ends exactly once."""
    loaded = _with_faults(seed, seconds)
    run = simulate(loaded, HANDING_OVER if hands_over(seed) else "value", seed)
    found: GenerationTally = run.tally.generations
    ended = sum(run.tally.all.outcomes[name] for name in ("ok", "late", "degraded"))
    broken = dict(found.broken_off)
    return Lives(
        seed=seed,
        lives=len(loaded.scenario.faults),
        answers=run.tally.all.arrivals,
        whole=found.whole,
        resumed=found.resumed,
        handed_over=found.handovers,
        broken=broken,
        refused=run.tally.all.arrivals - ended - sum(broken.values()),
        wrong=found.wrong,
        gap_p50_s=found.resume_gaps.quantile_s(0.5),
        gap_p99_s=found.resume_gaps.quantile_s(0.99),
    )


def hands_over(seed: int) -> bool:
    return seed % 2 == 0


def _with_faults(seed: int, seconds: float) -> LoadedScenario:
    chance = Random(f"killed streams {seed}")
    text = _WRITERS
    if hands_over(seed):
        text = text.replace("slow: [1.0, 1.4]", "slow: [2.0, 3.0]").replace("delay_ms: 10,", "delay_ms: 60,")
    scenario = parse(text, "killed streams").lasting(seconds)
    faults, at = [], _FROM_S
    free_at = dict.fromkeys(TARGETS, 0.0)
    while (at := at + chance.expovariate(1.0 / _EVERY_S)) < seconds:
        there = [one for one in TARGETS if free_at[one] <= at]
        if not there:
            continue
        target, (kind, least_s, most_s) = chance.choice(there), chance.choice(KINDS)
        for_s = chance.uniform(least_s, most_s)
        free_at[target] = at + for_s + 0.1
        faults.append(Fault(kind=kind, at_s=at, for_s=for_s, target=target))
    return LoadedScenario(replace(scenario, faults=tuple(faults)), Path(), "killed streams")
