"""`tidegate model split-layers` as a command; runtimes are imported when it runs, not for its help."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from tidegate.models.repository import Repository
from tidegate.runtime.finite_range import FiniteRange
from tidegate.tools.build.command import errors_in_one_line, record_in_trail, repository_option, requires_extra

if TYPE_CHECKING:
    from tidegate.tools.build.split.layer_splitter import SplitResult


@click.command("split-layers")
@click.argument("name", metavar="MODEL")
@click.option(
    "--from",
    "source",
    type=click.Path(path_type=Path),
    metavar="FILE.onnx",
    help="The fp32 graph to cut; by default the model's own fp32 ONNX variant.",
)
@click.option("--layer", "layers", multiple=True, metavar="TENSOR", help="Cut behind this tensor; chosen by default.")
@click.option("--most", type=click.IntRange(1, 16), default=4, show_default=True, help="Cuts to keep, if chosen.")
@click.option(
    "--activation",
    type=click.Choice(["fp32", "fp16", "int8"]),
    help="How the tensor between the halves travels; by default the smallest that is close enough.",
)
@click.option(
    "--least-cosine",
    type=FiniteRange(0, 1),
    default=0.99,
    show_default=True,
    help="Of the halves' answers to the whole's: what is close enough.",
)
@click.option(
    "--head",
    type=click.Choice(["auto", "fp32"]),
    default="auto",
    show_default=True,
    help="Cut the edge's half from what edges run, or from the fp32 graph.",
)
@click.option("--samples", type=click.Path(path_type=Path), help="An .npz of real inputs, to measure the error on.")
@click.option("--version", default="", help="Which version; the highest by default.")
@repository_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@errors_in_one_line
def split_layers(name: str, repository: Path, version: str, as_json: bool, **given: Any) -> None:
    """Cut a model between layers into halves for the edge and for the pool, and write its manifest's section `split`.

    It finds the places where the graph can be cut, keeps a few, compresses what travels between the halves, and
    measures halves, bytes and error on this machine. The halves become models of their own, MODEL.head-N and
    MODEL.tail-N. A gateway weighs them for each request beside the whole model; it reads manifests when it starts.

    \b
    Examples:
      tidegate model split-layers minilm
      tidegate model split-layers cnn --from cnn-fp32.onnx --samples images.npz --most 6
    """
    with requires_extra("onnx", "onnxruntime"):
        from tidegate.tools.build.split.layer_splitter import SplitOptions
        from tidegate.tools.build.split.layer_splitter import split_layers as split

    def step(what: str, done_ratio: float) -> None:
        click.echo(f"{name}: {what} ({done_ratio:.0%} done)", err=True)

    found = split(Repository(repository), name, SplitOptions(**given), step, version=version)
    record_in_trail(repository, "model-split", found.manifest)
    if as_json:
        click.echo(json.dumps(_values(found)))
        return
    _print(found)
    place = repository / name / found.manifest.version / "model.yaml"
    click.echo(f"written to {place}; targets load the halves, and a gateway weighs them, when they start")


def _values(found: SplitResult) -> dict[str, Any]:
    return {
        "model": found.manifest.name,
        "version": found.manifest.version,
        "input_bytes": found.whole_bytes,
        "cuts": [{**msgspec.to_builtins(one.cut), "cosines": dict(one.cosines)} for one in found.cuts],
        "notes": list(found.notes),
    }


def _print(found: SplitResult) -> None:
    click.echo(f"{found.manifest.name}, version {found.manifest.version}: one input has {found.whole_bytes} bytes")
    for number, one in enumerate(found.cuts, start=1):
        cut, times = one.cut, one.cut.measured
        tried = ", ".join(f"{name} {cosine:.6f}" for name, cosine in one.cosines.items())
        size = f"{cut.bytes_per_row:.0f} bytes a row"
        if cut.bytes_per_unit:
            size += f" and {cut.bytes_per_unit:.1f} a unit of work"
        click.echo(f"  {number}  {cut.layer}: {cut.head_share:.0%} of the work before it, {size} as {cut.activation}")
        if times is not None:
            click.echo(
                f"     whole {times.whole_ms:.2f} ms here, head {times.head_ms:.2f} ms, tail {times.tail_ms:.2f} ms"
            )
        click.echo(f"     cosine to the whole {cut.cosine:.6f} over {cut.samples} (by way to travel: {tried})")
    for sentence in found.notes:
        click.echo(f"  {sentence}")
