"""A generating engine alone: stepped in a loop with so many sequences, and nothing around it.

Commands and answers are lines of JSON as those of `token_callers.py`, with the same figures: what a server, a link and
a gateway add is the difference. The engine begins a new sequence in the place of each that has ended.

    python -m tests.bench.generate_engine ENGINE ARTEFACT SLOTS [THREADS [DEVICE]]
"""

from __future__ import annotations

import json
import sys
from itertools import count
from pathlib import Path
from time import perf_counter

from tests.bench.load_generator import tell
from tests.bench.token_times import TokenTimes
from tidegate.engines.engine import load_generative_engine
from tidegate.engines.generation.limits import GenerationLimits
from tidegate.generate.engine import GenerativeEngine
from tidegate.generate.request import GenerateRequest


def measure(engine: GenerativeEngine, streams: int, prompt: int, tokens: int, warmup_s: float, seconds: float) -> None:
    times, numbers = TokenTimes(), count(1)
    due: list[int] = []
    ends_at = perf_counter() + warmup_s
    told = False

    def begin() -> None:
        number = next(numbers)
        # Another prompt each time: a cache of prompts would make a difference that is not asked for.
        ids = tuple((number * 7919 + place) % 300 + 3 for place in range(prompt))
        times.sent(number, perf_counter())
        engine.begin(number, GenerateRequest(ids, tokens, ignore_stop=True))
        due.append(number)

    for _ in range(streams):
        begin()
    while (now := perf_counter()) < ends_at or not told:
        if now >= ends_at:
            told, ends_at = True, now + seconds
            tell(event="begin")
            times.begin(now)
        progress = engine.step(due)
        now = perf_counter()
        for one in progress:
            if one.batch is not None and one.batch.ids:
                times.tokens(one.id, len(one.batch.ids), now)
            if one.finished is not None or one.error:
                times.ended(one.id, now, failed=bool(one.error))
                due.remove(one.id)
                begin()
    tell(event="end", **times.figures(perf_counter()))
    for number in due:
        engine.cancel(number)


def main() -> None:
    engine, artefact, slots, threads, device = [*sys.argv[1:], *("1", "cpu")[len(sys.argv) - 4 :]]
    limits = GenerationLimits(slots=int(slots))
    loaded = load_generative_engine(engine, Path(artefact), limits=limits, threads=int(threads), device=device)
    tell(event="ready")
    while line := sys.stdin.readline():
        words = json.loads(line)
        measure(loaded, words["streams"], words["prompt"], words["tokens"], words["warmup_s"], words["seconds"])


if __name__ == "__main__":
    main()
