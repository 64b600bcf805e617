"""Orders go to a file instead of to a gateway: a TidegateRollout carries them later."""

from __future__ import annotations

import json
from pathlib import Path

import click

from tidegate.storage.atomic_file import write_atomically
from tidegate.storage.output_file import OutputFile

out_option = click.option(
    "--out", type=OutputFile(),
    help="Write the signed order to this file and begin nothing; the operator hands it over (TidegateRollout).",
)  # fmt: skip


def write_order(path: Path, order: bytes, *, as_json: bool) -> None:
    """Write the order, and say what it is called. Raises ClickException: the file cannot be written."""
    try:
        write_atomically(path, order)
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {error.strerror}") from error
    id = json.loads(order)["spec"]["id"]
    click.echo(json.dumps({"id": id, "file": str(path)}) if as_json else f"{path}: the order {id}, signed and not sent")
