"""`tidegate model pack`: a BERT from Hugging Face as weights that the pool runs without padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tidegate.tools.build.command import errors_in_one_line, requires_extra


@click.command()
@click.argument("source", metavar="FOLDER", type=click.Path(path_type=Path))
@click.argument("target", metavar="OUT.safetensors", type=click.Path(path_type=Path))
@click.option("--precision", type=click.Choice(["fp32", "bf16", "fp16"]), default="fp32", show_default=True)
@errors_in_one_line
def pack(source: Path, target: Path, precision: Any) -> None:
    """Write a BERT's weights in the form that the pool runs without padding, for `tidegate model add --pool`.

    FOLDER has config.json and model.safetensors, as Hugging Face and sentence-transformers keep them.

    \b
    Example:
      tidegate model pack ./bge-small bge-bf16.safetensors --precision bf16
      tidegate model add bge --pool bge-bf16.safetensors --tokenizer ./bge-small/tokenizer.json
    """
    with requires_extra("torch", "safetensors"):
        from tidegate.tools.build.convert.pack import pack_bert
    found = pack_bert(source, target, precision)
    click.echo(
        f"packed {found.layers} layers, {precision}, pooled by the {found.pooling}"
        f"{', normalised' if found.normalize else ''}, in {target}"
    )
