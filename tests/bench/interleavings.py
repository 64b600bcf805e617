"""A million random lives of requests: does any order of answers, acks, failures, timers and cancellations break a rule?

One interleaving is one request's life, from its arrival to its end, among up to eleven others on a small fleet that
changes under them: the real request machine, placers, hedging rules, ledgers, links, breakers, calibration, purses and
admission, on virtual time (`tests/support/interleave`). What must hold is checked after each event, and at the end of
each run that nothing is left over.

    python -m tests.bench.interleavings [--quick] [--lives N] [--first SEED] [--processes 2]
    python -m tests.bench.interleavings --replay SEED [--steps 0,17-19]

A run that fails is shrunk to the steps that it needs, and the command that plays just these is printed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from time import process_time
from typing import Final

from tests.bench.harness import Goal, Report, parser, table
from tests.support.interleave.script import Broken, Lived, numbers_of, only, play, script_of, shrunk, spans
from tidegate import clock

LIVES: Final = 1_000_000
QUICK_LIVES: Final = 50_000
WITHIN_S: Final = 1200.0
_BATCH: Final = 250  # runs; a task of some seconds
_ENOUGH: Final = 3  # failing runs to tell


def live(first: int, runs: int) -> tuple[Lived, list[tuple[int, Broken]], float]:
    """Play `runs` seeds; also the CPU seconds that it took."""
    lived, failed, began = Lived(), [], process_time()
    for seed in range(first, first + runs):
        broken = play(script_of(seed), lived)
        if broken is not None:
            failed.append((seed, broken))
            if len(failed) >= _ENOUGH:
                break
    return lived, failed, process_time() - began


def batches(first: int, lives: int, processes: int) -> Iterator[tuple[Lived, list[tuple[int, Broken]], float]]:
    """One result after another until there were enough lives, or too many failures."""
    with ProcessPoolExecutor(processes) as pool:
        ahead = [pool.submit(live, first + number * _BATCH, _BATCH) for number in range(2 * processes)]
        following, so_far = len(ahead), 0
        while ahead:
            result = ahead.pop(0).result()
            so_far += result[0].lives
            yield result
            if so_far >= lives or result[1]:
                break
            ahead.append(pool.submit(live, first + following * _BATCH, _BATCH))
            following += 1
        for task in ahead:
            task.cancel()


def tell(seed: int, broken: Broken, steps: str = "") -> None:
    """The failure, its steps, and how to see it again."""
    script = script_of(seed)
    numbers = numbers_of(steps) if steps else shrunk(script, broken)
    print(f"\nseed {seed} breaks: {broken.words or broken.where}\n  {broken.where}\n  {script.profile}")
    for number in numbers:
        print(f"  {number:4d}  {script.steps[number]}")
    print(f"  python -m tests.bench.interleavings --replay {seed} --steps {spans(numbers)}", flush=True)


def replay(seed: int, steps: str) -> int:
    script = script_of(seed)
    broken = play(only(script, numbers_of(steps)) if steps else script)
    if broken is None:
        print(f"seed {seed} breaks nothing")
        return 0
    tell(seed, broken, steps)
    return 1


def main() -> int:
    options = argparse.ArgumentParser(parents=[parser("")], conflict_handler="resolve", description=__doc__)
    options.add_argument("--lives", type=int, help="interleavings to play")
    options.add_argument("--first", type=int, default=0, help="the first seed")
    options.add_argument("--processes", type=int, default=2)
    options.add_argument("--replay", type=int, help="play this seed only")
    options.add_argument("--steps", default="", help="with --replay: these steps only, as the failing run printed them")
    arguments = options.parse_args()
    if arguments.replay is not None:
        return replay(arguments.replay, arguments.steps)
    wanted = arguments.lives or (QUICK_LIVES if arguments.quick else LIVES)
    began, cpu_s, lived, failed = clock.now(), 0.0, Lived(), []
    for some, broken, took_s in batches(arguments.first, wanted, arguments.processes):
        lived.lives += some.lives
        lived.events += some.events
        lived.counts += some.counts
        lived.orders |= some.orders
        failed += broken
        cpu_s += took_s
    for seed, broken in failed[:_ENOUGH]:
        tell(seed, broken)
    table(("what", "times"), sorted(lived.counts.items()))
    took_s = clock.now() - began
    print(f"{lived.lives} lives, {len(lived.orders)} orders of a life's events, {lived.events} steps in {took_s:.0f} s")
    report = Report("interleavings", {"lives": wanted, "first": arguments.first, "processes": arguments.processes})
    report.figures |= {
        "lives": lived.lives,
        "orders": len(lived.orders),
        "steps": lived.events,
        "took_s": took_s,
        "cpu_us_a_life": cpu_s / max(1, lived.lives) * 1e6,
        "happened": dict(lived.counts),
    }
    report.goal(Goal("interleavings_broken", float(len(failed)), 0.0, "<="))
    report.goal(Goal("interleavings", float(lived.lives), float(wanted)))
    report.goal(Goal("interleavings_s", took_s, WITHIN_S, "<="))
    report.write()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
