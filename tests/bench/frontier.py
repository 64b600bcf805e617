"""The frontier of attainment against the pool's bill: our policies by their knob, beside every other rule.

One fleet (`office_wifi`) at 0.3 and 0.6 of its knee, in simulation. Each point is a policy: the share of its requests
that is answered in time, and the seconds of pool compute behind a thousand of those, wasted ones included. `value` is a
curve, one point for each `cost_weight`; `cheapest` has no knob, and the other rules are points as well. A point is
dominated where another one answers more for no more compute.

All rules run the same seeds: with few of them, seeds differ by more than rules do.

A full run writes the picture that docs/placement.md shows; `--draw` draws it from the results that are there.

    python -m tests.bench.frontier [--quick] [--repeats SEEDS] [--seconds 40] [--processes 2] [--draw]
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Final
from xml.sax.saxutils import escape

import msgspec

from gateway.core.placement.utility import COST_WEIGHT, WHETHER
from simulator.baselines.policies import AS_AUTHORS, WITH_LEDGER
from simulator.report.figures import PolicyFigures, difference
from simulator.scenarios.scenario_file import LoadedScenario, load
from simulator.sweep import knee, sweep
from tests.bench.harness import RESULTS, ROOT, Goal, Report, parser, table
from tests.bench.svg_chart import document

SCENARIO: Final = "office_wifi"
LOADS: Final = (0.3, 0.6)
COST_WEIGHTS: Final = (1.0, WHETHER, 6.0, COST_WEIGHT, 16.0, 25.0, 40.0)
BEFORE: Final = WHETHER  # the weight that was used before there was a knob
AGAINST: Final = "static+ledger"
PICTURE: Final = ROOT / "docs/benchmarks/frontier.svg"
_SAVED: Final = 0.2
_LOST: Final = 0.003
# The picture, in its own units.
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 380, 300, 56, 44, 70
_OURS, _THEIRS, _CHEAPEST = "one0", "note", "one1"  # classes of the picture's styles
_LEAST_SHOWN: Final = 0.90  # rules below this are in the table and not in the picture


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--processes", type=int, default=2, help="runs at the same time")
    options.add_argument("--draw", action="store_true", help="only draw what was found before")
    arguments = options.parse_args()
    if arguments.draw:
        PICTURE.write_text(drawn(json.loads((RESULTS / "frontier.json").read_text())["detail"]))
        return
    seeds = tuple(range(1, 1 + (arguments.repeats or (1 if arguments.quick else 6))))
    seconds = arguments.seconds or (6.0 if arguments.quick else 40.0)
    weights = (BEFORE, COST_WEIGHT) if arguments.quick else COST_WEIGHTS
    others = (AGAINST,) if arguments.quick else (*AS_AUTHORS, *WITH_LEDGER)
    report = Report("frontier", {"scenario": SCENARIO, "seeds": len(seeds), "seconds": seconds})
    loaded = load(SCENARIO)
    knee_rps = knee(loaded)
    loaded = loaded.replaced(loaded.scenario.lasting(seconds))
    for at in LOADS:
        found = _points(loaded, at, knee_rps, weights, others, seeds, arguments.processes)
        report.figures[f"{at:g}"] = {name: plain(one) for name, one in found.items()}
        show(found, at)
        for goal in goals(found, at):
            report.goal(goal)
    report.write()
    if not arguments.quick:
        PICTURE.write_text(drawn(report.figures))


def _points(
    loaded: LoadedScenario,
    at: float,
    knee_rps: float,
    weights: Sequence[float],
    others: Sequence[str],
    seeds: Sequence[int],
    processes: int,
) -> dict[str, PolicyFigures]:
    """Each policy at this load, by its name; `value` by its weight."""

    def run(of: LoadedScenario, policies: Sequence[str]) -> list[PolicyFigures]:
        return sweep(of, policies, (at,), seeds, knee_rps=knee_rps, processes=processes)

    found: dict[str, PolicyFigures] = {}
    for weight in weights:
        weighed = loaded.replaced(msgspec.structs.replace(loaded.scenario, cost_weight=weight))
        found[named(weight)] = run(weighed, ("value",))[0]
    found |= {one.policy: one for one in run(loaded, ("cheapest", *others))}
    return found


def named(weight: float) -> str:
    """The name of the policy by value with this weight."""
    return f"value-{weight:g}"


def plain(one: PolicyFigures) -> dict[str, float]:
    return {
        "in_time": fmean(one.attainment), "pool_s": fmean(one.pool_s_per_1k), "quality": fmean(one.quality),
        "attempts": fmean(one.attempts), "seeds": len(one.seeds),
    }  # fmt: skip


def goals(found: Mapping[str, PolicyFigures], at: float) -> list[Goal]:
    """What the default has to reach: little less in time than before the knob, for much less of the pool."""
    ours, before, against = found[named(COST_WEIGHT)], found[named(BEFORE)], found[AGAINST]
    lost = difference(before.attainment, ours.attainment)
    saved = 1.0 - fmean(ours.pool_s_per_1k) / fmean(against.pool_s_per_1k)
    why = f"95 % between {lost.low:.4f} and {lost.high:.4f}"
    return [
        Goal(f"in_time_lost_at_{at:g}", lost.mean, _LOST, "<=", why=why),
        Goal(f"pool_saved_at_{at:g}", saved, _SAVED, why=f"against {AGAINST}"),
        Goal(f"rules_ahead_in_both_at_{at:g}", float(len(dominating(found, ours))), 0.0, "<="),
    ]


def dominating(found: Mapping[str, PolicyFigures], one: PolicyFigures) -> list[str]:
    """The rules of others that answer as much for no more compute."""
    return [
        name
        for name, other in found.items()
        if name in (*AS_AUTHORS, *WITH_LEDGER)
        and fmean(other.attainment) >= fmean(one.attainment)
        and fmean(other.pool_s_per_1k) <= fmean(one.pool_s_per_1k)
    ]


def show(found: Mapping[str, PolicyFigures], at: float) -> None:
    print(f"\nload {at:g}")
    rows = [
        (name, f"{fmean(one.attainment):.2%}", f"{fmean(one.pool_s_per_1k):.2f}", f"{fmean(one.quality):.3f}",
         f"{fmean(one.attempts):.3f}", len(one.seeds))
        for name, one in sorted(found.items(), key=lambda item: -fmean(item[1].attainment))
    ]  # fmt: skip
    table(("policy", "in time", "pool s/1k", "quality", "attempts", "seeds"), rows)


def drawn(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """An SVG: a panel for each load, pool seconds to the right and what is in time upwards."""
    parts: list[str] = []
    for place, (at, points) in enumerate(found.items()):
        parts += _panel(at, points, _LEFT + place * (_WIDTH + _GAP))
    width, height = _LEFT + len(found) * (_WIDTH + _GAP) + 30, _TOP + _HEIGHT + 50
    told = " ".join(f"At {at} of the knee: {_told(points)}." for at, points in found.items())
    title = "Answers in time against the pool's seconds of compute behind a thousand of them, by policy"
    return document(title, told, width, height, parts, colours=2)


def _told(points: Mapping[str, Mapping[str, Any]]) -> str:
    return ", ".join(f"{name} {one['in_time']:.1%} for {one['pool_s']:.2f} s" for name, one in points.items())


def _panel(at: str, points: Mapping[str, Mapping[str, Any]], left: int) -> list[str]:
    shown = {name: one for name, one in points.items() if one["in_time"] >= _LEAST_SHOWN}
    most_s: float = max(one["pool_s"] for one in shown.values()) * 1.05
    least_s: float = min(one["pool_s"] for one in shown.values()) * 0.9

    def x(pool_s: float) -> float:
        return left + _WIDTH * (pool_s - least_s) / (most_s - least_s)

    def y(in_time: float) -> float:
        return _TOP + _HEIGHT * (1.0 - in_time) / (1.0 - _LEAST_SHOWN)

    parts = [f'<text x="{left}" y="20" font-size="13" font-weight="bold">{at} of the knee</text>']
    for step in range(6):
        share = _LEAST_SHOWN + (1.0 - _LEAST_SHOWN) * step / 5
        pool_s = least_s + (most_s - least_s) * step / 5
        parts += [
            f'<line x1="{left}" y1="{y(share):.1f}" x2="{left + _WIDTH}" y2="{y(share):.1f}" class="grid"/>',
            f'<text x="{left - 6}" y="{y(share) + 4:.1f}" text-anchor="end">{share:.0%}</text>',
            f'<text x="{x(pool_s):.1f}" y="{_TOP + _HEIGHT + 16}" text-anchor="middle">{pool_s:.1f}</text>',
        ]
    middle = left + _WIDTH / 2
    caption = "pool seconds behind a thousand answers in time"
    parts.append(f'<text x="{middle}" y="{_TOP + _HEIGHT + 36}" text-anchor="middle">{caption}</text>')
    curve = [one for name, one in shown.items() if name.startswith("value-")]
    line = " ".join(f"{x(one['pool_s']):.1f},{y(one['in_time']):.1f}" for one in curve)
    parts.append(f'<polyline points="{line}" class="{_OURS} curve"/>')
    for name, one in shown.items():
        is_ours = name.startswith("value-")
        colour = _OURS if is_ours else _CHEAPEST if name == "cheapest" else _THEIRS
        label = name.removeprefix("value-") if is_ours else name
        across, up = x(one["pool_s"]), y(one["in_time"])
        weight = ' font-weight="bold"' if name == named(COST_WEIGHT) else ""
        parts += [
            f'<circle cx="{across:.1f}" cy="{up:.1f}" r="{4 if is_ours else 3}" class="{colour} fill">'
            f"<title>{escape(name)}: {one['in_time']:.2%}, {one['pool_s']:.2f} s</title></circle>",
            f'<text x="{across + 6:.1f}" y="{up + (-5 if is_ours else 11):.1f}" class="{colour} fill"{weight}>'
            f"{escape(label)}</text>",
        ]
    return parts


if __name__ == "__main__":
    main()
