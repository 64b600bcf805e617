"""Does one tenant's storm reach another? A neighbour's p99 while a second tenant asks for five times its quota.

A real gateway with keys, in front of paced edges and a paced pool. Two open loops in processes of their own, each with
its tenant's key: the neighbour sends the same requests at the same instants in every run; the other tenant sends at
its quota ("calm") or at five times that ("storm"). Runs alternate on one fleet, and each storm is compared with the
calm run beside it, so what disturbs the machine disturbs both; which of the two goes first alternates as well. Nothing
of the neighbour's is left out: a request without an answer counts as its budget and more.

    python -m tests.bench.isolation [--quick] [--repeats 5] [--seconds 20] [--without-quota]

Aims: the storm moves the neighbour's p99 by at most 25 %, and takes none of its answers; what passes of the storm is
its quota (a second's worth more for the bucket), and the rest is refused with 429. `--without-quota` shows what the
same storm does where nothing holds it: it has no aims.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any, Final

from tests.bench.harness import ROOT, Child, Goal, Report, Spread, parser, ratios, table
from tests.bench.open_loop import Answer
from tests.support.faults.fleet_stack import FleetStack
from tests.support.gateway.guarded import Keys
from tidegate import clock
from tidegate.caller import Grant
from tidegate.tools.build.demo.paced import add_paced, costs_of_scenario

SCENARIO: Final = ROOT / "simulator" / "scenarios" / "paced_fleet.yaml"
MODEL: Final = "encoder"
NEIGHBOUR_RPS: Final = 25.0
QUOTA_RPS: Final = 10.0
STORM: Final = 5.0
P99_AIM: Final = 1.25
_EDGES: Final = 3
_LEAD_S: Final = 1.5
_LEARN_S: Final = 6.0


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--without-quota", action="store_true", help="the same storm, held by nothing")
    chosen = options.parse_args()
    quota = None if chosen.without_quota else QUOTA_RPS
    seconds, repeats = chosen.seconds or (4.0 if chosen.quick else 20.0), chosen.repeats or (1 if chosen.quick else 5)
    config = {"seconds": seconds, "repeats": repeats, "neighbour_rps": NEIGHBOUR_RPS, "quota_rps": QUOTA_RPS}
    report = Report("isolation" if quota else "isolation_without_quota", {**config, "storm": STORM})
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as scratch:
        runs = _measured(Path(scratch), seconds, repeats, quota)
    _tell(report, runs, seconds)
    if quota:
        _judge(report, seconds)
    report.write()


Run = dict[str, list[Answer]]  # by tenant


def _measured(scratch: Path, seconds: float, repeats: int, quota_rps: float | None) -> dict[str, list[Run]]:
    keys = Keys(scratch / "keys.json", {}, {})
    for tenant in ("neighbour", "other"):
        keys.add(tenant, Grant(tenant))
    models = scratch / "models"
    add_paced(MODEL, costs_of_scenario(SCENARIO), models)
    gateway = {"auth": {"keys_file": str(keys.path)}, "tenants": {"other": {"requests_per_s": quota_rps}}}
    edges = {f"edge-{number}": {"warmup_budget_s": 20.0} for number in range(_EDGES)}
    runs: dict[str, list[Run]] = {"calm": [], "storm": []}
    with FleetStack(scratch / "run", models, edges=edges, pool={}, gateway=gateway, at_once=_EDGES + 1) as fleet:
        asyncio.run(_run(fleet, keys, scratch, 1.0, _LEARN_S, seed=0))
        for repeat in range(repeats):
            for kind in ("calm", "storm") if repeat % 2 == 0 else ("storm", "calm"):
                factor = STORM if kind == "storm" else 1.0
                runs[kind].append(asyncio.run(_run(fleet, keys, scratch, factor, seconds, seed=1 + repeat)))
    return runs


async def _run(fleet: FleetStack, keys: Keys, scratch: Path, factor: float, seconds: float, seed: int) -> Run:
    began_at = clock.now() + _LEAD_S
    rates = {"neighbour": NEIGHBOUR_RPS, "other": factor * QUOTA_RPS}
    sent = [_sent(fleet, keys, scratch, tenant, rate, seconds, seed, began_at) for tenant, rate in rates.items()]
    return dict(zip(rates, await asyncio.gather(*sent), strict=True))


async def _sent(
    fleet: FleetStack, keys: Keys, scratch: Path, tenant: str, rate: float, seconds: float, seed: int, began_at: float
) -> list[Answer]:
    answers = scratch / f"{tenant}.json"
    command: dict[str, Any] = {
        "scenario": str(SCENARIO), "rate": rate, "seconds": seconds, "seed": seed, "model": MODEL, "tokens": [],
        "port": int(fleet.http.rpartition(":")[2]), "began_at": began_at, "answers": str(answers),
        "key": keys.texts[tenant],
    }  # fmt: skip
    async with Child(tenant, "-m", "tests.bench.open_loop") as child:
        await child.command(**command)
        await child.line()
    return [Answer(**one) for one in json.loads(answers.read_text())]


def p99_s(answers: Sequence[Answer]) -> float:
    """Of all that were asked: who got no answer waited out the budget at least."""
    waits = [one.latency_s if one.status == 200 else max(one.latency_s, one.budget_s) for one in answers]
    return quantiles(waits, n=100)[98]


def _answered(answers: Sequence[Answer]) -> float:
    return sum(one.status == 200 for one in answers) / len(answers)


def _tell(report: Report, runs: dict[str, list[Run]], seconds: float) -> None:
    p99 = {kind: [p99_s(run["neighbour"]) for run in found] for kind, found in runs.items()}
    moved = ratios(p99["storm"], p99["calm"])
    served = {kind: Spread.of(_answered(run["neighbour"]) for run in found) for kind, found in runs.items()}
    passed = Spread.of(sum(one.status == 200 for one in run["other"]) / seconds for run in runs["storm"])
    codes = Counter(one.status for run in runs["storm"] for one in run["other"])
    table(
        ["", "neighbour p99 ms", "answered", "other passed/s"],
        [
            [kind, f"{Spread.of(1e3 * one for one in p99[kind]):.1f}", f"{served[kind]:.3f}", other]
            for kind, other in (("calm", "-"), ("storm", f"{passed:.1f}"))
        ],
    )
    print(f"p99 storm / calm, run by run: {moved:.3f}; the storm's answers by status: {dict(codes)}")
    report.figures |= {
        "p99_ratio": moved,
        "p99_s": {kind: Spread.of(found) for kind, found in p99.items()},
        "answered": served,
        "storm_passed_per_s": passed,
        "storm_refused_share": codes[429] / codes.total(),
    }


def _judge(report: Report, seconds: float) -> None:
    figures = report.figures
    lost = figures["answered"]["storm"].median - figures["answered"]["calm"].median
    report.goal(Goal("isolation_p99_ratio", figures["p99_ratio"].median, P99_AIM, "<="))
    report.goal(Goal("isolation_neighbour_answered", lost, -0.01))
    # What a bucket lets through: its rate, and its second's worth once.
    most = QUOTA_RPS * (1 + 1 / seconds) * 1.02
    report.goal(Goal("isolation_storm_passed_per_s", figures["storm_passed_per_s"].median, most, "<="))


if __name__ == "__main__":
    main()
