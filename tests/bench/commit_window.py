"""Beginnings that are held until they are judged, on a task with known answers, through a gateway, an edge and a pool.

A small Llama sorts twelve digits (`tests/support/models/sorting_llama.py`): in int4 on the edge it is wrong some ten
times as often as in bf16 in the pool. `tidegate model calibrate --tasks` chooses the threshold on tasks of its own,
then other tasks are streamed through OpenAI's client, each in every way:

    edge      by the edge's variant alone, shown as it comes
    pool      by the pool's alone
    window    where the gateway likes, with the commit window

    gap_closed    of what the pool is better by, how much the window gains
    lift          that, over the share of answers that were escalated: those of a coin would gain their share, 1
    share_error   how far the escalated share is off from what the calibration said of tasks that it did not choose by
    mixed         answers that are neither the edge's nor the pool's own, but for what bf16 rounds by its company
    first_kept    first tokens within the budget of the first token, less those of the edge shown at once
    sure_first    the median first token of answers that were sure, over the edge's: what being held costs

    python -m tests.bench.commit_window [--quick]
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Final, Literal, NamedTuple, get_args

import openai

from gateway.app import Gateway
from tests.bench.harness import Goal, Report, Spread, parser, table
from tests.support.models.sorting_llama import NAME, sorter_repository, tasks, write_tasks
from tests.support.pool.edge_and_pool import edge_and_pool
from tidegate import clock
from tidegate.models.repository import Repository
from tidegate.tools.build.evaluate.calibrate import CalibrationResult
from tidegate.tools.build.evaluate.calibrate_beginnings import WindowOptions, calibrate_beginnings
from tidegate.tools.build.evaluate.threshold import CalibrationGoal

Way = Literal["edge", "pool", "window"]
DEMANDED: Final[dict[Way, str]] = {"edge": "int4", "pool": "bf16", "window": ""}
ESCALATED: Final = 0.25  # the share that is asked for
MOST: Final = 16
FIRST_MS: Final = 250  # the budget of the first token
AT_ONCE: Final = 4


class Streamed(NamedTuple):
    """One answer as its caller saw it."""

    text: str
    first_s: float
    is_escalated: bool
    is_provisional: bool


async def streamed(client: openai.AsyncOpenAI, prompt: str, way: Way) -> Streamed:
    headers = {"tidegate-budget-ms": "20000", "tidegate-ttft-ms": str(FIRST_MS)}
    if DEMANDED[way]:
        headers["tidegate-variant"] = DEMANDED[way]
    began, first_s, text = clock.now(), 0.0, ""
    raw = await client.completions.with_raw_response.create(
        model=NAME, prompt=prompt, max_tokens=MOST, temperature=0, stream=True, extra_headers=headers
    )
    async for event in raw.parse():
        if event.choices and event.choices[0].text:
            first_s = first_s or clock.now() - began
            text += event.choices[0].text
    route = raw.headers["tidegate-route"]
    return Streamed(text, first_s, route.startswith("escalated"), "provisional=1" in route)


async def answered(gateway: Gateway, asked: Sequence[tuple[str, str]], way: Way) -> list[Streamed]:
    """All tasks, a few at a time."""
    places = asyncio.Semaphore(AT_ONCE)
    url = f"{gateway.addresses['http']}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0, timeout=60.0) as client:

        async def one(prompt: str) -> Streamed:
            async with places:
                return await streamed(client, prompt, way)

        return list(await asyncio.gather(*[one(prompt) for prompt, _ in asked]))


def calibrated(folder: Path, count: int) -> tuple[Path, CalibrationResult]:
    """A repository with the sorter and its commit window."""
    models = folder / "models"
    shutil.copytree(sorter_repository().root, models)
    known = write_tasks(folder / "tasks.jsonl", count, seed=3)
    wishes = WindowOptions(max_tokens=MOST)
    goal = CalibrationGoal("share", ESCALATED)
    return models, calibrate_beginnings(Repository(models), NAME, goal, known, wishes=wishes)


class Repeat(NamedTuple):
    accuracy: dict[Way, float]
    escalated: float
    provisional: float
    mixed: float
    first_kept: dict[Way, float]
    sure_first: float


async def repeat(gateway: Gateway, asked: Sequence[tuple[str, str]]) -> Repeat:
    found = {way: await answered(gateway, asked, way) for way in get_args(Way)}
    right = [answer for _, answer in asked]
    own = zip(found["edge"], found["pool"], found["window"], strict=True)
    sure = [one.first_s for one in found["window"] if not (one.is_escalated or one.is_provisional)]
    return Repeat(
        {way: mean(one.text == it for one, it in zip(some, right, strict=True)) for way, some in found.items()},
        mean(one.is_escalated for one in found["window"]),
        mean(one.is_provisional for one in found["window"]),
        mean(one.text not in (edge.text, pool.text) for edge, pool, one in own),
        {way: mean(1000.0 * one.first_s <= FIRST_MS for one in some) for way, some in found.items()},
        median(sure) / median(one.first_s for one in found["edge"]),
    )


async def measured(models: Path, folder: Path, count: int, repeats: int) -> list[Repeat]:
    async with edge_and_pool(models, folder) as serving:
        gateway = serving.gateway
        for way in get_args(Way):  # what is slow the first time
            await answered(gateway, tasks(8, seed=1), way)
        return [await repeat(gateway, tasks(count, seed=100 + at)) for at in range(repeats)]


def bench(*, quick: bool) -> Report:
    known, count, repeats = (200, 60, 2) if quick else (800, 400, 5)
    report = Report("commit_window", {"calibrated_on": known, "tasks": count, "repeats": repeats, "first_ms": FIRST_MS})
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        models, calibration = calibrated(folder, known)
        found = asyncio.run(measured(models, folder, count, repeats))
    told = calibration.held_out
    accuracy = {way: mean(one.accuracy[way] for one in found) for way in get_args(Way)}
    escalated = mean(one.escalated for one in found)
    gap = accuracy["pool"] - accuracy["edge"]
    gap_closed = (accuracy["window"] - accuracy["edge"]) / gap if gap > 0.0 else 0.0
    sure_first = Spread.of(one.sure_first for one in found)
    first_kept = Spread.of(one.first_kept["window"] - one.first_kept["edge"] for one in found)
    report.figures |= {f"{way}.accuracy": value for way, value in accuracy.items()}
    report.figures |= {
        "escalated": escalated,
        "provisional": mean(one.provisional for one in found),
        "told_escalated": told.escalated,
        "told_accuracy": told.combined,
        "gap_closed": gap_closed,
        "lift": gap_closed / escalated if escalated else 0.0,
        "share_error": abs(escalated - told.escalated),
        "mixed": mean(one.mixed for one in found),
        "first_kept": first_kept.median,
        "sure_first": sure_first.median,
    }
    rows = [
        (way, f"{value:.2%}", f"{mean(one.first_kept[way] for one in found):.2%}") for way, value in accuracy.items()
    ]
    table(("", "right", f"first token in {FIRST_MS} ms"), rows)
    print(
        f"escalated {escalated:.1%} (calibration said {told.escalated:.1%}), first token of sure ones {sure_first:.2f}"
    )
    figures = report.figures
    report.goal(Goal("gap_closed", figures["gap_closed"], 0.8))
    report.goal(Goal("lift", figures["lift"], 2.0))
    report.goal(Goal("share_error", figures["share_error"], 0.05, "<="))
    report.goal(Goal("mixed", figures["mixed"], 0.01, "<="))
    report.goal(Goal("first_kept", figures["first_kept"], -0.02))
    return report


def main() -> None:
    bench(quick=parser(__doc__ or "").parse_args().quick).write()


if __name__ == "__main__":
    main()
