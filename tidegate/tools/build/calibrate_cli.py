"""`tidegate model calibrate` as a command; runtimes are imported when it runs, not for its help."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tidegate.models.repository import Repository
from tidegate.tools.build.command import errors_in_one_line, record_in_trail, repository_option, requires_extra

if TYPE_CHECKING:
    from tidegate.tools.build.evaluate.calibrate import CalibrationResult
    from tidegate.tools.build.evaluate.threshold import CalibrationGoal


class ShareParam(click.ParamType[float]):
    """A part of a whole: `10%` or `0.1`."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            share = float(value[:-1]) / 100 if str(value).endswith("%") else float(value)
        except ValueError:
            share = -1.0
        if not 0.0 < share <= 1.0:
            self.fail(f"{value!r} is no share: write it as 10% or as 0.1, above 0 and at most 100%", param, ctx)
        return share


@click.command()
@click.argument("name", metavar="MODEL")
@click.option("--escalate", type=ShareParam(), metavar="SHARE", help="Escalate this share of the edge's answers.")
@click.option("--accuracy", type=ShareParam(), metavar="SHARE", help="Escalate as few as reach this accuracy together.")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="An .npz with an array per input, named like it, and `labels`: a row per sample. The digits bring their own.",
)
@click.option(
    "--tasks",
    type=click.Path(path_type=Path),
    help='For a model that generates: a file of JSON lines, {"prompt": "…", "answer": "…"}.',
)
@click.option(
    "--measure",
    type=click.Choice(["margin", "entropy", "top1", "mean", "least"]),
    help="How to read confidence; mean and least are of tokens' probabilities.",
)
@click.option("--tokens", type=click.IntRange(1, 64), help="Tokens of a beginning that are judged; 8 by default.")
@click.option(
    "--match",
    type=click.Choice(["contains", "starts", "equals"]),
    help="When a text is right: it contains the answer (the default), starts with it, or equals it.",
)
@click.option("--max-tokens", type=click.IntRange(1, 4096), help="Longest answer to a task; 64 by default.")
@click.option("--output", metavar="NAME", help="The output to read it from; the first by default.")
@click.option("--softmax/--no-softmax", default=None, help="Whether that output holds scores, not probabilities.")
@click.option("--version", default="", help="Which version; the highest by default.")
@repository_option
@click.option("--dry-run", is_flag=True, help="Write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@errors_in_one_line
def calibrate(
    name: str,
    escalate: float | None,
    accuracy: float | None,
    data: Path | None,
    tasks: Path | None,
    version: str,
    repository: Path,
    dry_run: bool,
    as_json: bool,
    **wishes: Any,
) -> None:
    """Choose how sure an edge's answer must be, and write it into the model's manifest.

    The edge's variant and the pool's answer labelled samples, of which one part chooses the threshold and the other
    shows what it does. A gateway takes less sure answers to the pool while there is time. It reads manifests when it
    starts.

    Of a model that generates, the first tokens of an answer are judged, before any of it is shown: give --tasks.

    \b
    Examples:
      tidegate model calibrate digits --escalate 10%
      tidegate model calibrate cnn --accuracy 99% --data validation.npz --softmax
      tidegate model calibrate smollm2 --escalate 20% --tasks questions.jsonl --tokens 8
    """
    if (escalate is None) == (accuracy is None):
        raise click.UsageError("give one of --escalate and --accuracy")
    with requires_extra("numpy"):
        from tidegate.tools.build.evaluate.calibration_report import as_values, as_words
        from tidegate.tools.build.evaluate.threshold import CalibrationGoal
    goal = CalibrationGoal("share", escalate) if escalate is not None else CalibrationGoal("accuracy", accuracy or 0.0)
    models = Repository(repository)
    if tasks is None:
        found = _by_samples(models, name, goal, data, version, wishes, write=not dry_run)
    else:
        found = _by_tasks(models, name, goal, tasks, data, version, wishes, write=not dry_run)
    if not dry_run:
        record_in_trail(repository, "model-calibrated", found.manifest)
    if as_json:
        click.echo(json.dumps(as_values(found, written=not dry_run)))
        return
    for line in as_words(found):
        click.echo(line)
    place = repository / name / found.manifest.version / "model.yaml"
    click.echo(
        "nothing was written (--dry-run)" if dry_run else f"written to {place}; a gateway reads it when it starts"
    )


def _by_samples(
    models: Repository,
    name: str,
    goal: CalibrationGoal,
    data: Path | None,
    version: str,
    wishes: dict[str, Any],
    *,
    write: bool,
) -> CalibrationResult:
    for option in ("tokens", "match", "max_tokens"):
        if wishes.pop(option) is not None:
            raise click.UsageError(f"--{option.replace('_', '-')} is of a model that generates: give --tasks")
    if wishes["measure"] in ("mean", "least"):
        raise click.UsageError(f"--measure {wishes['measure']} is of a model that generates: give --tasks")
    with requires_extra("onnxruntime", "torch"):
        from tidegate.tools.build.evaluate.calibrate import CalibrationOptions
        from tidegate.tools.build.evaluate.calibrate import calibrate as find
    return find(models, name, goal, version=version, data=data, wishes=CalibrationOptions(**wishes), write=write)


def _by_tasks(
    models: Repository,
    name: str,
    goal: CalibrationGoal,
    tasks: Path,
    data: Path | None,
    version: str,
    wishes: dict[str, Any],
    *,
    write: bool,
) -> CalibrationResult:
    from tidegate.tools.build.evaluate.calibrate_beginnings import WindowOptions, calibrate_beginnings

    if data is not None:
        raise click.UsageError("give one of --data and --tasks")
    for option in ("output", "softmax"):
        if wishes.pop(option) is not None:
            raise click.UsageError(f"--{option} is of a classifier; --tasks is for a model that generates")
    if wishes["measure"] in ("margin", "entropy", "top1"):
        raise click.UsageError(f"--measure {wishes['measure']} is of a classifier; with --tasks it is mean or least")
    given = {key: value for key, value in wishes.items() if value is not None}
    with click.progressbar(length=1000, label=f"calibrating {name}", file=sys.stderr) as bar:

        def progress(_what: str, done_ratio: float) -> None:
            bar.update(int(1000 * done_ratio) - bar.pos)

        return calibrate_beginnings(
            models, name, goal, tasks, version=version, wishes=WindowOptions(**given), write=write, progress=progress
        )
