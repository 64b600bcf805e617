"""Devices that are killed in the middle of a rollout: how many end as promised, and what a bad link costs in bytes.

    python -m tests.bench.rollout_crashes [--quick]

A real agent, a real Mosquitto, a real server of artefacts. Every seed is one rollout with one misfortune: the agent is
killed (SIGKILL, with its workers) at a write of its journal, at a random time, or twice; a worker is; the broker is.
Three models in ten are worse than they say. Each device must end with the old generation or the new one committed,
report which, answer with it, and say why it is not the new one: the aim is all of them.

Then downloads whose link is cut at every tenth of the size: bytes fetched by the size, where 1.1 is the aim.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

from tests.bench.harness import Goal, Report, Spread, parser, table
from tests.support.edge.device_life import DeviceLife
from tests.support.edge.rollout_seeds import Ended, misfortune
from tests.support.edge.rollouts import made
from tidegate.fleet.reported import RolloutState

SIZE_BYTES = 8_000_000


def crashes(seeds: int) -> list[Ended]:
    """The ends of all seeds, twenty rollouts a device."""
    ends: list[Ended] = []
    for first in range(0, seeds, 20):
        with tempfile.TemporaryDirectory() as folder, DeviceLife(Path(folder)) as device:
            device.start()
            device.wait_ready()
            answers = ("1", 2.0)
            for seed in range(first, min(seeds, first + 20)):
                ended, answers = misfortune(device, seed, answers)
                ends.append(ended)
                print(
                    f"seed {seed}: {ended.killed}: {ended.report.state} {ended.report.reason} {ended.wrong}", flush=True
                )
    return ends


def cut_downloads(repeats: int) -> Spread:
    """Bytes fetched by size, of downloads that are cut nine times."""
    found = []
    with tempfile.TemporaryDirectory() as folder, DeviceLife(Path(folder)) as device:
        device.start()
        device.wait_ready()
        for revision in range(1, repeats + 1):
            one = made(str(revision + 1), factor=float(revision + 2), padding_bytes=SIZE_BYTES)
            device.server.cut_after = [one.files[1].size_bytes // 10 + 1] * 9
            before = device.server.sent_bytes
            device.ask(revision, one)
            report = device.settled(revision)
            assert report.state is RolloutState.COMMITTED, report
            found.append((device.server.sent_bytes - before) / one.plan().size_bytes)
    return Spread.of(found)


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    seeds = options.repeats or (15 if options.quick else 200)
    report = Report("rollout_crashes", {"seeds": seeds, "size_bytes": SIZE_BYTES})
    ends = crashes(seeds)
    kinds = Counter(one.killed for one in ends)
    committed = Counter(one.killed for one in ends if one.report.state is RolloutState.COMMITTED)
    rows = [(kind, str(count), str(committed[kind]), str(count - committed[kind])) for kind, count in kinds.items()]
    table(("killed", "rollouts", "new", "old"), rows)
    reasons = Counter(one.report.reason.partition(":")[0] for one in ends if one.report.reason)
    fetched = cut_downloads(1 if options.quick else 5)
    share = sum(not one.wrong for one in ends) / len(ends)
    report.figures |= {
        "ended_well_ratio": share,
        "committed": sum(committed.values()),
        "reasons": dict(reasons),
        "wrong": {str(one.seed): one.wrong for one in ends if one.wrong},
        "fetched_by_size": fetched,
    }
    report.goal(Goal("rollout_crashes_old_or_new_with_a_reason", share, 1.0))
    report.goal(Goal("rollout_bytes_fetched_by_size", fetched.high, 1.1, "<="))
    report.write()


if __name__ == "__main__":
    main()
