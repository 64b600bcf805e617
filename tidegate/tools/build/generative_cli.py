"""`tidegate model golden`, and what `quantize` and `verify` do for models that generate."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, Literal

import click

from tidegate.models.manifest import Manifest, Variant
from tidegate.models.repository import Repository, RepositoryError, save_manifest
from tidegate.outcome import ModelNotFound
from tidegate.storage.output_file import OutputFile
from tidegate.tools.build.command import errors_in_one_line, record_in_trail, repository_option
from tidegate.tools.build.errors import BuildError
from tidegate.tools.build.progress import Progress, no_progress


@click.command()
@click.argument("name")
@click.option("--version", default="", help="Which version; the highest by default.")
@click.option("--variant", default="", help="Whose answers; by default the edge's, else the first.")
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    help="A file with a prompt a line, in place of the eight that are built in.",
)
@click.option(
    "--max-tokens", type=click.IntRange(1, 1024), default=24, show_default=True, help="Longest answer to record."
)
@click.option("--out", type=OutputFile(), help="Write a file for `rollout --golden`, and no more.")
@repository_option
@errors_in_one_line
def golden(
    name: str, version: str, variant: str, prompts: Path | None, max_tokens: int, out: Path | None, repository: Path
) -> None:
    """Record greedy answers of a model that generates, which devices and `verify` compare theirs with.

    They are kept beside the variant, and `tidegate model rollout` sends them along. Each is a prompt and an answer as
    token ids: a prompt of a chat model is put into its template as a user's message.

    \b
    Examples:
      tidegate model golden smollm2
      tidegate model golden smollm2 --prompts mine.txt --max-tokens 48
      tidegate model golden smollm2 --variant bf16 --out golden.msgpack
    """
    from tidegate.tools.build.evaluate.golden_record import read_golden, recorded, write_golden
    from tidegate.tools.build.evaluate.greedy import variant_worker
    from tidegate.tools.build.evaluate.prompts import PROMPTS, prompt_ids, read_prompts
    from tidegate.tools.build.staging import model_lock

    models = Repository(repository)
    manifest = models.manifest(name, version)
    chosen, folder, generative = _chosen(manifest, variant), models.folder(manifest), manifest.generative
    assert generative is not None  # it has such a variant
    models.verify(manifest, chosen)
    asked = read_prompts(prompts) if prompts is not None else PROMPTS
    if out is None:
        with model_lock(repository, name):
            whole = asyncio.run(
                recorded(folder, manifest, no_progress, only=chosen.name, prompts=asked, max_tokens=max_tokens)
            )
            save_manifest(folder, whole)
        record_in_trail(repository, "model-golden", whole)
        changed = whole.variant(chosen.name)
        assert changed is not None  # it was chosen from these
        place, count = folder, len(read_golden(folder, generative, changed))
    else:

        async def answers() -> Any:
            ids = await prompt_ids(folder, manifest, asked, max_tokens=max_tokens)
            async with variant_worker(folder, manifest, chosen) as worker:
                return await worker.answers(ids, max_tokens)

        found = asyncio.run(answers())
        write_golden(out, generative, chosen.name, found)
        place, count = out, len(found)
    lost = len(asked) - count
    words = (
        f"; {lost} {'prompt leaves' if lost == 1 else 'prompts leave'} no room for {max_tokens} tokens" if lost else ""
    )
    click.echo(f"recorded {count} golden answers of {chosen.name} in {place}{words}")


def _chosen(manifest: Manifest, name: str) -> Variant:
    generating = [one for one in manifest.variants if one.generation is not None]
    which = f"{manifest.name}:{manifest.version}"
    if not generating:
        raise BuildError(f"{which} does not generate: its golden cases are an .npz (docs/rollout.md)")
    if name:
        found = next((one for one in generating if one.name == name), None)
        if found is None:
            raise BuildError(f"{which} has no variant {name!r}: {', '.join(one.name for one in generating)}")
        return found
    return next((one for one in generating if "edge" in one.where), generating[0])


def quantize_model(
    repository: Path, given: dict[str, Any], shown: AbstractContextManager[Progress], *, force: bool
) -> None:
    """Quantize a generating model of the repository, and say what came of it."""
    from tidegate.tools.build.evaluate.prompts import read_prompts
    from tidegate.tools.build.generative_quantize import QuantizeRequest, quantize_generative

    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in `build`
    if (path := given.pop("prompts")) is not None:
        given["prompts"] = read_prompts(path)
    request = QuantizeRequest(**given)
    with shown as progress:
        manifest = quantize_generative(request, repository, progress, force=force)
    record_in_trail(repository, "model-quantized", manifest)
    place = Repository(repository).folder(manifest)
    click.echo(f"{manifest.name}: {request.precision} is in {place}")
    for variant in manifest.variants:
        size = (variant.size_bytes + sum(file.size_bytes for file in variant.files)) / 1e6
        quality = variant.quality
        words = f"top-1 {quality.value:.4f} ({quality.how})" if quality is not None else "not measured"
        click.echo(f"  {variant.name}: {size:.1f} MB, {words}")


Mark = Literal["ok", "WRONG", "-"]  # "-": it could not be checked
RESULTS: Final[dict[Mark, str]] = {"ok": "ok", "WRONG": "wrong", "-": "not checked"}


def problems_of_generating(
    models: Repository, manifest: Manifest, say: Callable[[Mark, str], None], *, agreement_min: float, run: bool
) -> int:
    """Check what a generating model's digests do not tell, and say it line by line; the number of problems.

    Args:
        say: told of each that was checked.
        agreement_min: share of golden positions that each variant has to agree with.
        run: whether the variants are run at all.
    """
    from tidegate.generate.teacher_forcing import total
    from tidegate.tools.build.evaluate.golden_record import read_golden
    from tidegate.tools.build.evaluate.greedy import missing_runtime, variant_worker
    from tidegate.tools.build.generating import vocabulary_of

    generative, folder = manifest.generative, models.folder(manifest)
    if generative is None:
        return 0
    problems = 0
    vocabulary = vocabulary_of(folder / generative.tokenizer)
    if vocabulary != generative.vocabulary:
        say("WRONG", f"{folder / generative.tokenizer}: its vocabulary is {vocabulary}, not {generative.vocabulary}")
        problems += 1
    for variant in manifest.variants:
        if variant.generation is None:
            continue
        try:
            answers = read_golden(folder, generative, variant)
            if not answers:
                way = f"`tidegate model golden {manifest.name} --variant {variant.name}` records them"
                say("-", f"{variant.name}: no golden answers are recorded; {way}")
                continue
            if run and (lacking := missing_runtime(variant)):
                say("-", f"{variant.name}: not run, it needs {lacking}")
                continue
            if not run:
                say("ok", str(folder / variant.golden.name if variant.golden else folder))
                continue

            async def agreement(variant: Variant = variant, answers: Any = answers) -> Any:
                async with variant_worker(folder, manifest, variant) as worker:
                    return total(await worker.agreement(answers))

            found = asyncio.run(agreement())
        except (BuildError, RepositoryError, ModelNotFound) as error:
            say("WRONG", str(error))
            problems += 1
            continue
        near = found.share >= agreement_min
        problems += not near
        say("ok" if near else "WRONG", f"{variant.name} answers as recorded: {found}")
    return problems
