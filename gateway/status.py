"""`tidegate status`: the targets and models of a running gateway, read from its admin port."""

from __future__ import annotations

import json
import sys
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import click
from rich.console import Console
from rich.table import Column, Table

_COLOURS = {"ready": "green", "suspect": "yellow", "down": "red"}
_EXAMPLES = """
\b
Examples:
  tidegate status
  tidegate status --json | jq '.targets[] | select(.state != "ready")'
  tidegate status --admin http://10.0.0.2:8003
"""


@click.command(epilog=_EXAMPLES)
@click.option("--json", "as_json", is_flag=True, help="The gateway's own JSON.")
@click.option(
    "--admin", default="http://127.0.0.1:8003", show_default=True, help="Address of the gateway's admin port."
)
def status(as_json: bool, admin: str) -> None:
    """Show what a running gateway can use: targets with their state and load, models with who offers them."""
    try:
        with urlopen(f"{admin.rstrip('/')}/v1/state", timeout=5.0) as response:
            state = json.load(response)
    except (URLError, OSError, ValueError) as error:
        click.echo(f"no gateway answers at {admin}: {error}", err=True)
        sys.exit(1)
    if as_json:
        click.echo(json.dumps(state))
        return
    console = Console()
    console.print(targets_table(state["targets"]))
    console.print(models_table(state["models"]))


def targets_table(targets: list[dict[str, Any]]) -> Table:
    whole = (Column(name, no_wrap=True) for name in ("target", "state", "address"))  # what people copy stays whole
    table = Table(*whole, "over", "models", "rtt", "queued", "in flight")
    for one in targets:
        reason = f" ({one['reason']})" if one["reason"] else ""
        table.add_row(
            one["id"],
            f"[{_COLOURS[one['state']]}]{one['state']}[/]{reason}",
            one["address"],
            one["transport"],
            ", ".join(f"{model['name']} {'/'.join(model['variants'])}" for model in one["models"]),
            f"{one['rtt_ms']:.1f} ms",
            str(one["queued"]),
            str(one["in_flight"]),
        )
    return table


def models_table(models: list[dict[str, Any]]) -> Table:
    table = Table("model", "version", "ready", "offered by")
    for one in models:
        ready = "[green]yes[/]" if one["ready"] else "[red]no[/]"
        table.add_row(one["name"], one["version"], ready, ", ".join(one["targets"]))
    return table
