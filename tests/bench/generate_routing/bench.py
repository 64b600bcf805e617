"""Runs every rule on every link at every load, in turn, and judges what came of it."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from tests.bench.generate_routing.bound import NoSolver, most_kept
from tests.bench.generate_routing.fleet import ALL_RULES, LITELLM, PEERS, TIDEGATE, LinkKind, Talkers
from tests.bench.generate_routing.measures import Outcome, heard_of
from tests.bench.generate_routing.schedule import Asked
from tests.bench.generate_routing.workload import Lengths, schedule, talk
from tests.bench.harness import ROOT, Goal, Report, table
from tidegate import clock
from tidegate.testing.traces import TraceFinder, TraceMissing, folders

STATIC: Final = ("edge-only", "pool-only", "least-loaded")
KNEE: Final = 0.9  # the load that stands for the knee
CALM: Final = ("quiet", (0.3, 0.6))
BUSY: Final = 0.7  # of the machine: beyond it, processes are late for want of a core
RECORDING: Final = "TMobile-UMTS-driving"
_WIFI: Final = {"delay_ms": 3}
_WAN: Final = {"delay_ms": 20}
_WIFI_JITTERS: Final[dict[str, Any]] = {"delay_ms": 3, "jitter": {"dist": "lognormal", "ms": 1.5, "shape": 1.0}}
_WAN_JITTERS: Final[dict[str, Any]] = {"delay_ms": 20, "jitter": {"dist": "lognormal", "ms": 20, "shape": 0.8}}
_REST_S: Final = 0.5


@dataclass(frozen=True)
class Plan:
    """How much is measured. `learn_s` of each run are not counted."""

    seconds: float
    learn_s: float
    loads: tuple[float, ...]
    links: tuple[str, ...]
    rules: tuple[str, ...]
    repeats: int


Outcomes = dict[tuple[str, float, str], list[Outcome]]  # by link, load and rule


def link_kinds(names: Sequence[str]) -> tuple[list[LinkKind], str]:
    """The links of these names, and why one of them is missing."""
    bad_wan, bad_wifi = {**_WAN_JITTERS, "delay_ms": 320}, {**_WIFI_JITTERS, "delay_ms": 60}
    found = [
        LinkKind("quiet", {"edge": _WIFI, "pool": _WAN}),
        LinkKind(
            "jitter",
            {"edge": _WIFI_JITTERS, "pool": _WAN_JITTERS},
            {"edge": (8.0, 1.0, bad_wifi), "pool": (6.0, 2.0, bad_wan)},
        ),
    ]
    missing = ""
    try:
        find = TraceFinder(folders(str(ROOT / ".." / "shared" / "traces")))
        both = find(f"{RECORDING}.up"), find(f"{RECORDING}.down")
        found.append(LinkKind("cellular", {"edge": _WIFI, "pool": _WAN}, traces=both))
    except TraceMissing as error:
        missing = str(error)
    return [one for one in found if one.name in names], missing if "cellular" in names else ""


def rules_here(wanted: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Those of the rules that can run here, and why one cannot."""
    here = [one for one in ALL_RULES if one in wanted]
    if LITELLM not in here:
        return tuple(here), ""
    found = PEERS.exists() and subprocess.run([PEERS, "-c", "import litellm"], capture_output=True, check=False)
    if found and found.returncode == 0:
        return tuple(here), ""
    return tuple(one for one in here if one != LITELLM), "LiteLLM is not installed: make peers"


class Bench:
    """Mutable: `run` fills `outcomes` and `bounds`, `conclude` judges them."""

    def __init__(self, plan: Plan, report: Report, scratch: Path) -> None:
        self.outcomes: Outcomes = {}
        self.bounds: dict[tuple[str, float], float | None] = {}
        self._plan = plan
        self._report = report
        self._scratch = scratch
        self._links, self._no_link = link_kinds(plan.links)
        self._rules, self._no_rule = rules_here(plan.rules)
        knee_rps = talk().scenario.knee_rps
        assert knee_rps is not None
        self._knee_rps = knee_rps
        for why in (self._no_link, self._no_rule):
            if why:
                print(f"skipped: {why}", flush=True)

    async def run(self) -> None:
        asked: dict[tuple[float, int], list[Asked]] = {}
        async with AsyncExitStack() as stack:
            talkers = await stack.enter_async_context(Talkers(self._scratch, talk().scenario, self._rules))
            lengths = Lengths(self._scratch / "lengths", talkers.stop_tokens)
            await self._warm_up(talkers, lengths)
            for repeat in range(self._plan.repeats):
                seed = repeat + 1
                for load in self._plan.loads:
                    asked[load, seed] = self._schedule(load, seed, lengths)
                for link in self._links:
                    for load in self._plan.loads:
                        await self._in_turn(talkers, link, load, seed, asked[load, seed])
        for link in self._links:  # after all else: it takes a core
            for load in self._plan.loads:
                self.bounds[link.name, load] = self._bound(link, asked[load, 1])

    async def _warm_up(self, talkers: Talkers, lengths: Lengths) -> None:
        """New gateways learn for some seconds what they need to know of any target."""
        learning = self._schedule(0.6, 0, lengths, seconds=self._plan.learn_s + 3.0)
        path = self._written(learning)
        for rule in self._rules:
            await talkers.run(rule, path, link_kinds(("quiet",))[0][0], self._plan.learn_s + 3.0, seed=0)

    async def _in_turn(self, talkers: Talkers, link: LinkKind, load: float, seed: int, asked: list[Asked]) -> None:
        path = self._written(asked)
        seconds = self._plan.learn_s + self._plan.seconds
        order = list(self._rules)
        random.Random(f"{seed} {link.name} {load}").shuffle(order)
        for rule in order:
            before = _busy_and_all_s()
            raw, told = await talkers.run(rule, path, link, seconds, seed=seed, offset_s=10.0 + seconds * seed)
            busy, total = (after - one for after, one in zip(_busy_and_all_s(), before, strict=True))
            outcome = Outcome.of(
                rule, asked, heard_of(raw), from_s=self._plan.learn_s, to_s=seconds,
                busy=busy / max(1e-9, total), late_p99_s=told["late_p99_s"],
            )  # fmt: skip
            self.outcomes.setdefault((link.name, load, rule), []).append(outcome)
            words = f"{link.name} {load:g} {rule}: kept {100 * outcome.kept:.1f} %, machine {100 * outcome.busy:.0f} %"
            print(words, outcome.errors or "", file=sys.stderr, flush=True)
            await clock.sleep(_REST_S)

    def _schedule(self, load: float, seed: int, lengths: Lengths, seconds: float | None = None) -> list[Asked]:
        lasting = self._plan.learn_s + self._plan.seconds if seconds is None else seconds
        return schedule(talk().scenario.lasting(lasting).with_rate(load * self._knee_rps), seed, lengths)

    def _written(self, asked: Sequence[Asked]) -> Path:
        path = self._scratch / "schedule.json"
        path.write_text(json.dumps([asdict(one) for one in asked]))
        return path

    def _bound(self, link: LinkKind, asked: Sequence[Asked]) -> float | None:
        seconds = self._plan.learn_s + self._plan.seconds
        try:
            return most_kept(talk().scenario, asked, link, 1, from_s=self._plan.learn_s, to_s=seconds)
        except NoSolver as reason:
            self._report.goal(Goal("share_of_bound", None, 0.9, why=str(reason)))
            return None

    # what came of it

    def conclude(self) -> None:
        self._tell()
        for link in self._links:
            self._figures(link.name)
        self._judge()

    def _of(self, link: str, load: float, rule: str, field: str = "goodput") -> float:
        """The mean over repeats."""
        found = self.outcomes[link, load, rule]
        return float(sum(getattr(one, field) for one in found) / len(found))

    def _best(self, link: str, load: float, among: Sequence[str]) -> tuple[str, float]:
        there = [one for one in among if one in self._rules]
        best = max(there, key=lambda rule: self._of(link, load, rule))
        return best, self._of(link, load, best)

    @property
    def _others(self) -> list[str]:
        return [one for one in self._rules if one != TIDEGATE]

    def _tell(self) -> None:
        header = ("", "kept %", "goodput/s", "smooth tok/s", "first p50/p99 ms", "each p50/p99 ms", "pool %", "resumed",
                  "busy %", "sent late ms")  # fmt: skip
        for link in self._links:
            for load in self._plan.loads:
                asked_per_s = self.outcomes[link.name, load, self._rules[0]][0].requests / self._plan.seconds
                bound = self.bounds.get((link.name, load))
                says = f", bound {bound * asked_per_s:.2f}/s" if bound is not None else ""
                print(f"\n{link.name}, load {load:g}: {asked_per_s:.2f} asked a second{says}")
                table(header, [self._row(link.name, load, rule) for rule in self._rules])

    def _row(self, link: str, load: float, rule: str) -> tuple[object, ...]:
        """Shares and rates are means over repeats, times those of the first."""
        one = self.outcomes[link, load, rule][0]
        return (
            rule,
            f"{100 * self._of(link, load, rule, 'kept'):.1f}",
            f"{self._of(link, load, rule):.2f}",
            f"{self._of(link, load, rule, 'smooth_tokens_per_s'):.0f}",
            f"{one.first_p50_ms:.0f}/{one.first_p99_ms:.0f}",
            f"{one.each_p50_ms:.0f}/{one.each_p99_ms:.0f}",
            f"{100 * one.pool_share:.0f}",
            one.resumed,
            f"{100 * one.busy:.0f}",
            f"{1e3 * one.late_p99_s:.0f}",
        )

    def _figures(self, link: str) -> None:
        loads: dict[str, Any] = self._report.figures.setdefault(link, {})
        for load in self._plan.loads:
            found = loads[f"load_{round(100 * load)}"] = {}
            for rule in self._rules:
                found[rule] = {
                    "goodput": self._of(link, load, rule),
                    "kept_percent": 100.0 * self._of(link, load, rule, "kept"),
                    "smooth_tokens_per_s": self._of(link, load, rule, "smooth_tokens_per_s"),
                    "runs": [asdict(one) for one in self.outcomes[link, load, rule]],
                }
            if (bound := self.bounds.get((link, load))) is not None:
                requests = self.outcomes[link, load, self._rules[0]][0].requests
                found["bound"] = {"goodput": bound * requests / self._plan.seconds, "kept_percent": 100.0 * bound}
            if TIDEGATE in self._rules and self._others:
                best, goodput = self._best(link, load, self._others)
                found["over_best"] = _ratio(self._of(link, load, TIDEGATE), goodput)
                found["best"] = best

    def _judge(self) -> None:
        if TIDEGATE not in self._rules:
            return
        names = [one.name for one in self._links]
        if "jitter" in names and KNEE in self._plan.loads:
            ours = self._of("jitter", KNEE, TIDEGATE)
            for goal, among, aim in (
                ("over_best_static_at_knee_jitter", STATIC, 1.3),
                ("over_best_of_all_at_knee_jitter", self._others, 1.0),
            ):
                if set(among) & set(self._rules):
                    best, goodput = self._best("jitter", KNEE, among)
                    self._goal(Goal(goal, _ratio(ours, goodput), aim, why=f"best is {best}"))
        for name in names:
            bound = self.bounds.get((name, KNEE))
            if bound is not None and KNEE in self._plan.loads:
                share = self._of(name, KNEE, TIDEGATE, "kept") / max(bound, 1e-9)
                self._goal(Goal(f"share_of_bound_at_knee_{name}", share, 0.9))
        calm, loads = CALM
        for load in loads:
            if calm in names and load in self._plan.loads and self._others:
                best, goodput = self._best(calm, load, self._others)
                over = _ratio(self._of(calm, load, TIDEGATE), goodput)
                self._goal(Goal(f"over_best_of_all_calm_{round(100 * load)}", over, 0.99, why=f"best is {best}"))
        runs = [one for found in self.outcomes.values() for one in found]
        self._goal(Goal("answers_of_wrong_length", float(sum(one.wrong for one in runs)), 0.0, "<="))
        self._goal(
            Goal("machine_busy_worst_run", max(one.busy for one in runs), BUSY, "<=", why="others' work included")
        )
        if self._no_rule:
            self._goal(Goal("litellm", None, 1.0, why=self._no_rule))
        if self._no_link:
            self._goal(Goal("cellular", None, 1.0, why=self._no_link))

    def _goal(self, goal: Goal) -> None:
        self._report.goal(goal)
        if goal.figure is not None:
            self._report.figures[goal.name] = goal.figure

    def __repr__(self) -> str:
        return f"<Bench {len(self.outcomes)} outcomes>"


def _ratio(ours: float, other: float) -> float:
    return ours / other if other else 1.0 if not ours else float("inf")


def _busy_and_all_s() -> tuple[float, float]:
    """CPU seconds of all cores so far: at work, whoever's work it is, and in all."""
    times = psutil.cpu_times()
    all_s = sum(times[:8])
    return all_s - times.idle - getattr(times, "iowait", 0.0), all_s
