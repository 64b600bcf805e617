"""`tidegate simulate` runs a scenario, or recorded traffic, and prints how many deadlines would be met."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from simulator.baselines.policies import POLICIES
from simulator.replay.replay import Replay, replay
from simulator.report import plot as plots
from simulator.report.figures import PolicyFigures, generation_rows, rows
from simulator.scenarios.scenario_file import LoadedScenario, ScenarioError, load, names
from simulator.scenarios.what_if import with_link, with_more_devices
from simulator.sweep import knee, sweep
from tidegate.runtime.duration import Duration
from tidegate.runtime.finite_range import FiniteRange
from tidegate.runtime.suggestion import did_you_mean

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
  tidegate simulate --replay monday.tgz --policy value,least-request
  tidegate simulate --replay monday.tgz --more-devices kiosk-1=5 --link edge/kiosk-1=lte_driving
  tidegate simulate --list
"""
)
@click.argument("scenario", required=False)
@click.option(
    "--replay",
    "recording",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Instead of a scenario: real traffic on the fleet that had it, as `tidegate record` wrote it.",
)
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="How many worlds.")
@click.option(
    "--policy",
    default=None,
    help="Names with commas between them, or `all`. [default: tidegate; of a recording, the one it was made under]",
)
@click.option(
    "--load", "loads", default=None, help="Fractions of the knee, with commas; without it, the scenario's own rate."
)
@click.option(
    "--seconds", type=Duration(bare="s", min_s=0.1), default=None, help="Simulated time; else the scenario's."
)
@click.option("--jitter", type=FiniteRange(min=0.0), default=None, help="All jitter so many times as large.")
@click.option("--rate", type=FiniteRange(min=0, min_open=True), default=None, help="Requests a second.")
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
    recording: Path | None,
    seeds: int,
    policy: str | None,
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

    SCENARIO is the name of one that comes with Tidegate, or a YAML file of your own (copy one and change it); or
    --replay asks what would have been, of real traffic that `tidegate record` wrote down.
    """
    if listing or (scenario is None and recording is None):
        _list()
        return
    if recording is not None and (scenario is not None or loads is not None):
        raise click.UsageError(
            "--replay brings its own scenario and load: leave SCENARIO and --load out (--rate is fine)"
        )
    try:
        if plot is not None or timeline is not None:
            plots.check_installed()
        replayed = None if recording is None else replay(recording)
        loaded = load(str(scenario)) if replayed is None else replayed.loaded
        loaded = _changed(loaded, seconds, jitter, rate, more_devices, links)
        chosen = _policies(policy or (replayed.policy if replayed else "tidegate"))
        found = _sweep(loaded, chosen, _loads(loads), range(1, seeds + 1), processes)
    except (ScenarioError, plots.NoPlot, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        printed: dict[str, object] = {"scenario": loaded.source, "figures": [one.plain() for one in found]}
        if replayed is not None:
            printed["recorded"] = {
                "attainment": replayed.attainment,
                "policy": replayed.policy,
                "counted": replayed.counted,
            }
        click.echo(json.dumps(printed, indent=2))
    else:
        _print(loaded, found)
        if replayed is not None:
            _print_recorded(replayed)
    for kind, path in (("loads", plot), ("timeline", timeline)):
        if path is not None:
            _draw(kind, found, loaded, path)


def _changed(
    loaded: LoadedScenario,
    seconds: float | None,
    jitter: float | None,
    rate: float | None,
    more_devices: str | None,
    links: tuple[str, ...],
) -> LoadedScenario:
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
            known = f"there are: {', '.join(POLICIES)}.{did_you_mean(one, POLICIES)}"
            raise click.BadParameter(f"there is no {one!r}; {known}", param_hint="--policy")
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
    loaded: LoadedScenario, policies: list[str], loads: list[float] | None, seeds: range, processes: int
) -> list[PolicyFigures]:
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


def _print(loaded: LoadedScenario, found: list[PolicyFigures]) -> None:
    click.echo(f"{loaded.scenario.summary}\n")
    _print_table(rows(found))
    if generated := generation_rows(found):
        click.echo()
        _print_table(generated)
    rates = dict.fromkeys((one.load, one.rate) for one in found)
    words = ", ".join(f"{load:g} is {rate:.0f}/s" for load, rate in rates)
    click.echo(f"\nload {words}; seeds {len(found[0].seeds)}; {found[0].arrivals} requests counted in the first row")


def _print_table(lines: list[tuple[str, ...]]) -> None:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for first, *others in lines:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        click.echo("  ".join(cells))


def _print_recorded(one: Replay) -> None:
    click.echo(f"recorded under {one.policy}: {one.attainment:.1%} of {one.counted} in time")
    for words in one.words:
        click.echo(f"not as it was: {words}")


def _draw(kind: str, found: list[PolicyFigures], loaded: LoadedScenario, path: Path) -> None:
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
