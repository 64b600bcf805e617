"""`tidegate model disagreements` shows the inputs on which devices and the pool differ: a work list for the next model.

The list is the gateway's (its section `agreement`) and lasts as long as its process. It holds digests and scores; an
input itself only where the gateway keeps inputs, as a file on the gateway's machine.
"""

from __future__ import annotations

import json
from typing import Any, Final
from urllib.parse import quote

import click
from rich.table import Column, Table

from tidegate.admin_client import Admin, admin_option
from tidegate.runtime.duration import printed_duration
from tidegate.runtime.plain_text import plain
from tidegate.tools.delivery.follow import console

_DIGITS: Final = 12  # of a digest, on the screen


@click.command()
@click.argument("model", required=False, default="")
@click.option("--last", type=click.IntRange(1, 1000), default=50, show_default=True, help="How many, newest first.")
@admin_option
@click.option("--json", "as_json", is_flag=True, help="The gateway's own JSON.")
def disagreements(model: str, last: int, admin: str, as_json: bool) -> None:
    """Show which devices are compared with the pool, and the inputs on which they differ, of MODEL or of all.

    The gateway needs a section `agreement`; with `inputs_folder` in it the inputs are files for the next measurement.

    \b
    Examples:
      tidegate model disagreements
      tidegate model disagreements minilm --last 10
      tidegate model disagreements minilm --json | jq -r '.disagreements[].file'
    """
    gateway = Admin(admin)
    found = gateway.read(f"/v1/disagreements?last={last}&model={quote(model, safe='')}")
    followed = gateway.read("/v1/agreement")
    sources = [one for one in followed["sources"] if model in ("", one["model"])]
    if as_json:
        click.echo(json.dumps({**found, "sources": sources}))
        return
    console().print(sources_table(sources))
    if found["disagreements"]:
        console().print(disagreements_table(found["disagreements"]))
    click.echo(f"{found['kept']} disagreements are kept, of {found['since_start']} since the gateway started")
    for one in sources:
        if one["why"]:
            click.echo(f"{one['target']}: {one['why']}")


def sources_table(sources: list[dict[str, Any]]) -> Table:
    """What is compared: drifting sources first."""
    right = [Column(name, justify="right") for name in ("compared", "mean", "limit")]
    table = Table(Column("target", no_wrap=True), "model", "version", "variant", *right, "state")
    for one in sources:
        state = "agrees"
        if one["drifting_for_s"] is not None:
            what = "demoted" if one["demoted"] else "drifts, as most do"
            agreed = f", {one['agreed_in_a_row']} agree again" if one["agreed_in_a_row"] else ""
            state = f"[yellow]{what}[/] for {printed_duration(one['drifting_for_s'])}{agreed}"
        numbers = str(one["compared"]), f"{one['mean']:.4f}", f"{one['limit']:.4f}"
        named = (plain(one[key]) for key in ("target", "model", "version", "variant"))
        table.add_row(*named, *numbers, state)
    return table


def disagreements_table(rows: list[dict[str, Any]]) -> Table:
    """The inputs, by digest."""
    table = Table("target", "variant", "against", Column("differs by", justify="right"), "input", "size", "file")
    for one in rows:
        variant = f"{one['model']} {one['version']} {one['variant']}"
        digest, score = one["input_sha256"][:_DIGITS], f"{one['score']:.4f}"
        said = (plain(one[key]) for key in ("slice", "file"))
        table.add_row(one["target"], plain(variant), plain(one["reference"]), score, digest, *said)
    return table


COMMANDS: Final = (disagreements,)
