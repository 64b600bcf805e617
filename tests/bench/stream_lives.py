"""Ten thousand lives of targets, each ended under the answers that it writes: is a token lost, or does one come twice?

On virtual time, with the real fleet view, placement, request machine and queues (`tests/simulator/killed_streams.py`):
three devices and a card are killed or stopped again and again, at instants that follow from a seed. Each token is named
by its place in its answer by the worker that makes it, so what callers were shown can be held to what it should be.

    lives      of targets, each ended by a crash or a standstill
    resumed    times that another target went on with an answer
    handed_over  of those as planned, from a target that was well (every other seed)
    wrong      answers with a token that was lost, came twice, or was missing at a whole end
    broken     answers that had begun and ended with an error, by the reason that their callers were told
    unended    requests that ended in none of these ways

    python -m tests.bench.stream_lives [--quick] [--lives 10000] [--processes 2]
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from tests.bench.harness import Goal, Report, parser, table
from tests.simulator.killed_streams import Lives, lives_of


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--lives", type=int, help="at least so many")
    options.add_argument("--processes", type=int, default=2, help="runs at the same time")
    chosen = options.parse_args()
    wanted = chosen.lives or (200 if chosen.quick else 10_000)
    report = Report("stream_lives", {"lives": wanted})
    found = lived(wanted, chosen.processes)
    conclude(found, wanted, report)
    report.write()


def lived(wanted: int, processes: int) -> list[Lives]:
    """Seeds from 1 on, until so many lives have ended."""
    found: list[Lives] = []
    with ProcessPoolExecutor(processes) as pool:
        seed = 1
        while sum(one.lives for one in found) < wanted:
            found += pool.map(lives_of, range(seed, seed + processes))
            seed += processes
    return found


def conclude(found: list[Lives], wanted: int, report: Report) -> None:
    broken: Counter[str] = Counter()
    for one in found:
        for why, many in one.broken.items():  # what each target was doing is left out
            broken["no target is left: each is down or was tried" if "no target" in why else why] += many
    sums = {
        name: sum(getattr(one, name) for one in found)
        for name in ("lives", "answers", "whole", "resumed", "handed_over", "refused", "wrong")
    }
    unended = sums["answers"] - sums["whole"] - sums["refused"] - sum(broken.values())
    report.figures.update({**sums, "broken": sum(broken.values()), "unended": unended, "seeds": len(found)})
    report.figures["broken_off"] = dict(broken)
    report.figures["seeds_wrong"] = [str(one) for one in found if one.wrong]
    table(("", "answers"), [*((name, sums[name]) for name in sums), *broken.most_common()])
    report.goal(Goal("wrong", float(sums["wrong"]), 0.0, "<="))
    report.goal(Goal("unended", float(unended), 0.0, "<="))
    report.goal(Goal("handed_over", float(sums["handed_over"]), 1.0))
    report.goal(Goal("lives", float(sums["lives"]), float(wanted)))


if __name__ == "__main__":
    main()
