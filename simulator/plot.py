"""A picture of a sweep: attainment against load for each policy, and below it what happened over time.

matplotlib is not a dependency: it is asked for when a plot is, and its absence is an error that says how to get it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simulator.report import Figures, Interval
from simulator.scenario import Scenario


class NoPlot(Exception):
    """There is nothing here to draw with."""


def draw(found: Sequence[Figures], scenario: Scenario, path: Path) -> None:
    """Write a PNG. Raises NoPlot without matplotlib, and OSError when the file cannot be written."""
    plt = _pyplot()
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 9), layout="constrained")
    policies = list(dict.fromkeys(one.policy for one in found))
    for policy in policies:
        points = [one for one in found if one.policy == policy]
        attained = [Interval.of(one.attainment) for one in points]
        loads = [one.load for one in points]
        (line,) = above.plot(loads, [one.mean for one in attained], marker="o", label=policy)
        above.fill_between(
            loads, [one.low for one in attained], [one.high for one in attained], alpha=0.15, color=line.get_color()
        )
        last = points[-1]
        below.step(
            [at for at, _, _ in last.timeline],
            [in_time / arrivals for _, arrivals, in_time in last.timeline],
            label=f"{policy} at {last.load:g}",
            color=line.get_color(),
        )
    above.set(
        title=scenario.summary, xlabel="load, as a fraction of the knee", ylabel="answered in time", ylim=(0, 1.02)
    )
    below.set(xlabel="time of arrival, s", ylabel="answered in time", ylim=(0, 1.02))
    for fault in scenario.faults:
        # The clock of a run starts a second before its first arrival.
        below.axvspan(1.0 + fault.at_s, 1.0 + fault.at_s + fault.for_s, alpha=0.1, color="black")
    above.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib  # type: ignore[import-not-found]

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise NoPlot("plots need matplotlib, which is not installed: pip install matplotlib") from error
    return pyplot
