"""`tidegate simulate`: what would happen to my deadlines?"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from simulator import plot as plots
from simulator.baselines import POLICIES
from simulator.report import Figures, rows
from simulator.scenario_file import Loaded, ScenarioError, load, names
from simulator.sweep import knee, sweep
from simulator.what_if import with_link, with_more_devices

PNG = click.Path(dir_okay=False, path_type=Path)


@click.command(
    epilog="""\b
Examples:
  tidegate simulate office_wifi
  tidegate simulate office_wifi --policy tidegate,least-request,static --load 0.3,0.6,1.2 --seeds 5
  tidegate simulate pool_outage --json > outage.json
  tidegate simulate my_fleet.yaml --load 0.3,0.6,0.9,1.2 --policy tidegate,least-request --plot loads.png
  tidegate simulate pool_outage --policy tidegate,all-cloud --timeline outage.png
  tidegate simulate my_fleet.yaml --more-devices 200 --rate 300
  tidegate simulate my_fleet.yaml --link wifi=lte_driving
  tidegate simulate --list
"""
)
@click.argument("scenario", required=False)
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="How many worlds.")
@click.option("--policy", default="tidegate", show_default=True, help="Names with commas between them, or `all`.")
@click.option(
    "--load", "loads", default=None, help="Fractions of the knee, with commas; without it, the scenario's own rate."
)
@click.option("--seconds", type=click.FloatRange(min=0.1), default=None, help="Simulated time; else the scenario's.")
@click.option("--jitter", type=click.FloatRange(min=0.0), default=None, help="All jitter so many times as large.")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), default=None, help="Requests a second.")
@click.option("--more-devices", metavar="[GROUP=]COUNT", default=None, help="So many devices more.")
@click.option(
    "--link",
    "links",
    metavar="KIND=LINK",
    multiple=True,
    help="Exchange a kind of link: for a named one (lte_driving), a file, or recordings TO,FROM (Mahimahi).",
)
@click.option("--processes", type=click.IntRange(min=1), default=1, show_default=True, help="Runs at the same time.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON on stdout, instead of a table.")
@click.option("--plot", type=PNG, default=None, help="Write a picture (PNG) of attainment against load.")
@click.option("--timeline", type=PNG, default=None, help="Write a picture (PNG) of attainment over time.")
@click.option("--list", "listing", is_flag=True, help="Name the scenarios and policies there are, and end.")
def simulate(
    scenario: str | None,
    seeds: int,
    policy: str,
    loads: str | None,
    seconds: float | None,
    jitter: float | None,
    rate: float | None,
    more_devices: str | None,
    links: tuple[str, ...],
    processes: int,
    as_json: bool,
    plot: Path | None,
    timeline: Path | None,
    listing: bool,
) -> None:
    """Run a fleet on virtual time: the real placement, queues and batcher, over simulated links and devices.

    SCENARIO is the name of one that comes with Tidegate, or a YAML file of your own (copy one and change it).
    """
    if listing or scenario is None:
        _list()
        return
    try:
        loaded = _changed(load(scenario), seconds, jitter, rate, more_devices, links)
        found = _sweep(loaded, _policies(policy), _loads(loads), range(1, seeds + 1), processes)
    except (ScenarioError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps({"scenario": loaded.source, "figures": [one.plain() for one in found]}, indent=2))
    else:
        _print(loaded, found)
    for kind, path in (("loads", plot), ("timeline", timeline)):
        if path is not None:
            _draw(kind, found, loaded, path)


def _changed(
    loaded: Loaded,
    seconds: float | None,
    jitter: float | None,
    rate: float | None,
    more_devices: str | None,
    links: tuple[str, ...],
) -> Loaded:
    for words in links:
        loaded = with_link(loaded, words)
    scenario = loaded.scenario
    if rate is not None:
        scenario = scenario.with_rate(rate)
    if more_devices is not None:
        scenario = with_more_devices(scenario, more_devices)
    if seconds is not None:
        scenario = scenario.lasting(seconds)
    if jitter is not None:
        scenario = scenario.with_jitter(jitter)
    return loaded.replaced(scenario)


def _policies(words: str) -> list[str]:
    wanted = list(POLICIES) if words == "all" else [word.strip() for word in words.split(",")]
    for one in wanted:
        if one not in POLICIES:
            raise click.BadParameter(f"there is no {one!r}; there are: {', '.join(POLICIES)}", param_hint="--policy")
    return wanted


def _loads(words: str | None) -> list[float] | None:
    if words is None:
        return None
    try:
        loads = [float(word) for word in words.split(",")]
    except ValueError:
        loads = []
    if not loads or not all(one > 0.0 for one in loads):
        raise click.BadParameter(f"numbers above 0 with commas between them, not {words!r}", param_hint="--load")
    return loads


def _sweep(
    loaded: Loaded, policies: list[str], loads: list[float] | None, seeds: range, processes: int
) -> list[Figures]:
    # Progress goes to stderr, so that stdout is the answer alone.
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}")
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("finding the knee" if loads else "simulating", total=1)

        def on_run(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        knee_rps = knee(loaded, on_run=on_run) if loads else loaded.scenario.arrivals.rate
        progress.update(task, description="simulating", completed=0)
        return sweep(
            loaded, policies, loads or [1.0], list(seeds), knee_rps=knee_rps, processes=processes, on_run=on_run
        )


def _print(loaded: Loaded, found: list[Figures]) -> None:
    lines = rows(found)
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    click.echo(f"{loaded.scenario.summary}\n")
    for first, *others in lines:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        click.echo("  ".join(cells))
    rates = dict.fromkeys((one.load, one.rate) for one in found)
    words = ", ".join(f"{load:g} is {rate:.0f}/s" for load, rate in rates)
    click.echo(f"\nload {words}; seeds {len(found[0].seeds)}; {found[0].arrivals} requests counted in the first row")


def _draw(kind: str, found: list[Figures], loaded: Loaded, path: Path) -> None:
    try:
        if kind == "loads":
            plots.draw_loads(found, loaded.scenario.summary, path)
        else:
            plots.draw_timeline(found, loaded.scenario, path)
    except (plots.NoPlot, OSError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"plot in {path}", file=sys.stderr)


def _list() -> None:
    for name in names():
        click.echo(f"{name:16} {load(name).scenario.summary}")
    click.echo(f"\npolicies: {', '.join(POLICIES)}")


if __name__ == "__main__":
    simulate()
