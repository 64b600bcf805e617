"""`tidegate model`: build the demo models, quantize and add one's own, look at what is there.

Only this file is imported for `--help`; runtimes are imported by the command that needs them. A build shows a bar on a
terminal, one line per step elsewhere, and events for a parent process with `--json-progress`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import click

from tidegate.build.demo import RECIPES, build_demo
from tidegate.build.errors import BuildError
from tidegate.build.progress import Progress
from tidegate.events import emit
from tidegate.models.repository import Repository, RepositoryError
from tidegate.models.validate import name_problem
from tidegate.outcome import ModelNotFound

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_REPOSITORY = Path(".tidegate/models")

repository_option = click.option(
    "--repository",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_REPOSITORY,
    show_default=True,
    help="Folder of the model repository.",
)


def explained(command: Callable[P, R]) -> Callable[P, R]:
    """What goes wrong for reasons that a user can mend is one line and exit code 1, not a traceback."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except (BuildError, RepositoryError, ModelNotFound) as error:
            raise click.ClickException(str(error)) from error

    return run


@click.group()
def model() -> None:
    """Build, quantize, add and inspect models."""


@model.command()
@click.argument("name", type=click.Choice([*RECIPES, "all"]))
@repository_option
@click.option("--force", is_flag=True, help="Build also what is there already.")
@click.option("--json-progress", is_flag=True, help="Print progress as JSON events, for a parent process.")
@explained
def build(name: str, repository: Path, force: bool, json_progress: bool) -> None:
    """Build a demo model, or all of them.

    What is there already, with the right digests, is kept. Needs `pip install 'tidegate[build]'`.

    \b
    Examples:
      tidegate model build minilm
      tidegate model build all --repository /var/lib/tidegate/models
    """
    # OpenMP's threads wait by spinning, which beside other work on the same cores made a build ten times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported
    for one in RECIPES if name == "all" else (name,):
        with _shown(one, json_progress) as progress:
            manifest, how = build_demo(one, repository, progress, force=force)
        place = repository / one / manifest.version
        _say(json_progress, f"{one}: {how}" + (" (whole, digests fit)" if how == "kept" else "") + f" in {place}")


@contextmanager
def _shown(name: str, json_progress: bool) -> Iterator[Progress]:
    if json_progress:
        yield _once_per_step(lambda what, ratio: emit("progress", what=f"{name}: {what}", done_ratio=round(ratio, 3)))
    elif sys.stdout.isatty():
        with _bar(name) as progress:
            yield progress
    else:
        yield _once_per_step(lambda what, ratio: click.echo(f"{name}: {what} ({ratio:.0%} done)"))


@contextmanager
def _bar(name: str) -> Iterator[Progress]:
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn(f"[bold]{name}"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bars(*columns, transient=True) as bars:
        task = bars.add_task("", total=1.0)
        yield lambda what, ratio: bars.update(task, description=what, completed=ratio)


def _once_per_step(show: Progress) -> Progress:
    """Only what is new: a measurement reports each of its hundreds of samples."""
    last: list[Any] = [None, -1.0]

    def step(what: str, done_ratio: float) -> None:
        if what != last[0] or done_ratio >= last[1] + 0.1:
            last[:] = what, done_ratio
            show(what, done_ratio)

    return step


def _say(json_progress: bool, line: str) -> None:
    if json_progress:
        emit("progress", what=line, done_ratio=1.0)
    else:
        click.echo(line)


@model.command()
@click.argument("source", metavar="IN.onnx", type=click.Path(path_type=Path))
@click.argument("target", metavar="OUT.onnx", type=click.Path(path_type=Path))
@click.option("--static", is_flag=True, help="Fix the activations' scales from --calibration; best for convolutions.")
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    help="An .npz with one array per input and a row per sample, for --static and for measuring.",
)
@click.option(
    "--evaluation",
    type=click.Path(path_type=Path),
    help="An .npz to measure with instead; an array `labels` in it makes top-1 an accuracy.",
)
@click.option("--metric", type=click.Choice(["cosine", "top1"]), default="cosine", show_default=True)
@explained
def quantize(
    source: Path, target: Path, static: bool, calibration: Path | None, evaluation: Path | None, metric: Any
) -> None:
    """Make an int8 version of an fp32 ONNX model, and say what it gains and costs.

    Without --static, activations are scaled anew in each call: best for transformers, and it needs no data.

    \b
    Examples:
      tidegate model quantize encoder.onnx encoder-int8.onnx
      tidegate model quantize cnn.onnx int8.onnx --static --calibration train.npz --evaluation test.npz --metric top1
    """
    with _needs("onnx", "onnxruntime"):
        from tidegate.build.requantize import requantize
    for line in requantize(
        source, target, static=static, calibration=calibration, evaluation=evaluation, metric=metric
    ):
        click.echo(line)


@model.command()
@click.argument("name")
@click.option("--edge", type=click.Path(path_type=Path), help="What edge agents run: an .onnx file.")
@click.option(
    "--pool", type=click.Path(path_type=Path), help="What the pool runs: a .pt2, .pt (TorchScript) or .onnx file."
)
@click.option("--version", default="1", show_default=True, help="The version's name.")
@click.option("--cost", default="", metavar="FEATURE:INPUT", help="How work is counted, such as tokens:input_ids.")
@click.option("--axis", "axes", multiple=True, metavar="AXIS=MIN:MAX", help="Lengths that an axis may have.")
@click.option("--bounds", multiple=True, metavar="INPUT=MIN:MAX", help="Values that an input may have.")
@click.option("--output", "outputs", multiple=True, metavar="NAME", help="Name of each output, where files have none.")
@click.option("--budget-s", default=2.0, show_default=True, help="Budget of requests that bring none, in seconds.")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="A tokenizer.json, to serve text as embeddings.")
@click.option("--samples", type=click.Path(path_type=Path), help="An .npz of real inputs, to measure the quality on.")
@click.option("--metric", type=click.Choice(["cosine", "top1"]), default="cosine", show_default=True)
@click.option("--edge-max-batch", type=click.IntRange(min=1), help="Most rows that an edge takes; measured by default.")
@click.option(
    "--edge-max-tokens", type=click.IntRange(min=1), help="Longest row that an edge takes; measured by default."
)
@repository_option
@click.option("--force", is_flag=True, help="Replace the version if it exists.")
@explained
def add(name: str, repository: Path, force: bool, **given: Any) -> None:
    """Add a model of your own: inspect its files, check and measure them, and write the manifest.

    \b
    Examples:
      tidegate model add encoder --edge encoder-int8.onnx --pool encoder.pt2 --cost tokens:input_ids
      tidegate model add encoder --edge encoder-int8.onnx --pool encoder.pt2 --tokenizer tokenizer.json
      tidegate model add cnn --edge cnn.onnx --samples test.npz --metric top1
    """
    with _needs("onnx"):
        from tidegate.build.add import Request
        from tidegate.build.add import add as add_model
        from tidegate.build.draft import Wishes
    if problem := name_problem(name) or name_problem(given["version"]):
        raise BuildError(problem)
    tokenizer: Path | None = given["tokenizer"]
    wishes = Wishes(
        axes={key: (int(least), int(most)) for key, (least, most) in _ranges("--axis", given.pop("axes")).items()},
        bounds=_ranges("--bounds", given.pop("bounds")),
        cost=given.pop("cost"),
        default_budget_s=given.pop("budget_s"),
        tokenizer=tokenizer.name if tokenizer else "",
    )
    if tokenizer is not None and not tokenizer.is_file():
        raise BuildError(f"{tokenizer}: there is no such file")
    added = add_model(Request(name=name, wishes=wishes, **given), repository, force=force)
    click.echo(f"added {name}, version {added.manifest.version}, in {repository / name / added.manifest.version}")
    for sentence in added.said:
        click.echo(f"  {sentence}")
    click.echo(f"see it with: tidegate model show {name} --repository {repository}")


@contextmanager
def _needs(*modules: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise BuildError(f"this needs {' and '.join(modules)}: pip install 'tidegate[build]'") from error


def _ranges(flag: str, words: tuple[str, ...]) -> dict[str, tuple[float, float]]:
    """NAME=MIN:MAX, each; whole numbers for axes are the caller's to make."""
    found = {}
    for word in words:
        match = re.fullmatch(r"(?P<name>[^=]+)=(?P<min>[^:]+):(?P<max>.+)", word)
        try:
            if match is None:
                raise ValueError("no match")
            found[match["name"]] = float(match["min"]), float(match["max"])
        except ValueError as error:
            raise BuildError(f"{flag} {word!r}: must look like NAME=MIN:MAX, with numbers") from error
    return found


@model.command("list")
@repository_option
@explained
def list_models(repository: Path) -> None:
    """List the models of a repository.

    \b
    Example:
      tidegate model list
    """
    from rich.console import Console
    from rich.table import Table

    table = Table("model", "version", "variant", "precision", "runs on", "size", "quality", "largest work")
    for manifest in Repository(repository).manifests():
        for variant in manifest.variants:
            table.add_row(
                manifest.name,
                manifest.version,
                variant.name,
                variant.precision,
                ", ".join(variant.where) or "-",
                f"{variant.size_bytes / 1e6:.1f} MB",
                f"{variant.quality.metric} {variant.quality.value:.4f}" if variant.quality else "-",
                _largest(variant.max_batch, variant.max_tokens),
            )
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _largest(max_batch: int | None, max_tokens: int | None) -> str:
    limits = [(max_batch, "rows"), (max_tokens, "tokens a row")]
    return ", ".join(f"{limit} {what}" for limit, what in limits if limit is not None) or "any"


@model.command()
@click.argument("name")
@click.option("--version", default="", help="Which version; the highest by default.")
@repository_option
@explained
def show(name: str, version: str, repository: Path) -> None:
    """Print a model's manifest.

    \b
    Example:
      tidegate model show minilm
    """
    from tidegate.models.repository import manifest_text

    click.echo(manifest_text(Repository(repository).manifest(name, version)), nl=False)


@model.command()
@click.argument("names", nargs=-1)
@repository_option
@explained
def verify(names: tuple[str, ...], repository: Path) -> None:
    """Check that artefacts are there and have the digests of their manifests.

    All models, or those that are named. Exits with 1 if any artefact is missing or different.

    \b
    Example:
      tidegate model verify minilm
    """
    models = Repository(repository)
    chosen = [models.manifest(name) for name in names] or list(models.manifests())
    failed = 0
    for manifest in chosen:
        for variant in manifest.variants:
            try:
                models.verify(manifest, variant)
                click.echo(f"ok    {models.artefact(manifest, variant)}")
            except RepositoryError as error:
                failed += 1
                click.echo(f"WRONG {error}")
    if failed:
        raise click.ClickException(f"{failed} artefacts are missing or different")
