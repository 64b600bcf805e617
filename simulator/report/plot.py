"""Plots of simulated runs: attainment against load, and attainment over time around a fault.

`draw_loads`: one line a policy over fractions of the knee, with the 95 % interval over seeds around it.
`draw_timeline`: the share answered in time by the second of arrival, one line a policy, under shades for faults and
steps of load. The policies' order and colours are the same in both.

Only drawing needs matplotlib; its absence is an error that says how to get it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simulator.report.figures import MeanInterval, PolicyFigures
from simulator.scenarios.scenario import Scenario
from simulator.world.conditions import SETTLING_S

_SMOOTHED_S = 1.0  # of arrivals behind each point: a quarter of a second alone is mostly noise
_SIZE_INCHES = (9, 5)


class NoPlot(Exception):
    """No drawing library is installed."""


def draw_loads(
    found: Sequence[PolicyFigures], title: str, path: Path, *, ceiling: Sequence[tuple[float, float]] = ()
) -> None:
    """Write a PNG of attainment against load.

    Args:
        ceiling: (load, bound) that no policy can beat, drawn as a line of its own.

    Raises:
        NoPlot: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=_SIZE_INCHES, layout="constrained")
    for policy in _policies(found):
        points = sorted((one for one in found if one.policy == policy), key=lambda one: one.load)
        attained = [MeanInterval.of(one.attainment) for one in points]
        loads = [one.load for one in points]
        (line,) = axes.plot(loads, [100 * one.mean for one in attained], marker="o", label=policy)
        low, high = [100 * one.low for one in attained], [100 * one.high for one in attained]
        axes.fill_between(loads, low, high, alpha=0.15, color=line.get_color())
    if ceiling:
        axes.plot(*zip(*((load, 100 * bound) for load, bound in ceiling), strict=True), "k--", label="bound")
    axes.set(title=title, xlabel="load, as a fraction of the knee", ylabel="answered in time, %")
    axes.set_ylim(top=101)
    _finish(plt, figure, axes, path)


def draw_timeline(found: Sequence[PolicyFigures], scenario: Scenario, path: Path) -> None:
    """Write a PNG of what share of each second's arrivals was answered in time. Raises as `draw_loads`."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=_SIZE_INCHES, layout="constrained")
    several_loads = len({one.load for one in found}) > 1
    for one in found:
        label = f"{one.policy} at {one.load:g}" if several_loads else one.policy
        points = smoothed(one)
        axes.plot([at for at, _ in points], [100 * share for _, share in points], label=label, linewidth=1.2)
    for number, (start, end, what) in enumerate(_shades(scenario)):
        axes.axvspan(start, min(end, scenario.duration_s), alpha=0.12, color="black")
        axes.annotate(what, (start, 2 + 5 * (number % 4)), fontsize=8)
    axes.set(title=scenario.summary, xlabel="second of arrival", ylabel="answered in time, %", ylim=(0, 103))
    axes.set_xlim(0.0, scenario.duration_s)
    _finish(plt, figure, axes, path)


def smoothed(one: PolicyFigures) -> list[tuple[float, float]]:
    """(second of arrival, share in time) over the last second of arrivals, on the scenario's clock."""
    points = []
    for at, _, _ in one.timeline:
        window = [(arrivals, in_time) for from_, arrivals, in_time in one.timeline if at - _SMOOTHED_S < from_ <= at]
        points.append((at - SETTLING_S, sum(in_time for _, in_time in window) / sum(arrived for arrived, _ in window)))
    return points


def _shades(scenario: Scenario) -> list[tuple[float, float, str]]:
    faults = [(one.at_s, one.at_s + one.for_s, f"{one.kind} {one.target}") for one in scenario.faults]
    steps = [(one.at_s, one.at_s + one.for_s, f"{one.times:g} times the load") for one in scenario.arrivals.steps]
    return [*faults, *steps]


def _policies(found: Sequence[PolicyFigures]) -> list[str]:
    return list(dict.fromkeys(one.policy for one in found))


def _finish(plt: Any, figure: Any, axes: Any, path: Path) -> None:
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left", fontsize=8)
    try:
        figure.savefig(path, dpi=110)
    finally:
        plt.close(figure)


def check_installed() -> None:
    """Raises NoPlot without matplotlib, so that nobody waits for a run whose plot cannot be drawn."""
    _pyplot()


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise NoPlot("plots need matplotlib, which is not installed: pip install 'tidegate[simulate]'") from error
    return pyplot
