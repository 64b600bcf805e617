"""The command `tidegate log-level` shows and changes how much a running gateway logs."""

from __future__ import annotations

import json
from typing import Any

import click

from tidegate.admin_client import Admin, admin_option

_WORDS = ("debug", "info", "warning", "error", "default")
_EXAMPLES = """\b
Examples:
  tidegate log-level                                    show the level
  tidegate log-level debug                              log everything
  tidegate log-level debug --module gateway.targets.directory   for one module only
  tidegate log-level default --module gateway.targets.directory
A pool or an edge switches to debug, and back again, by a signal: kill -s RTMIN PID
"""


@click.command(epilog=_EXAMPLES)
@click.argument("level", required=False, type=click.Choice(_WORDS))
@click.option("--module", default="", help="A module, with all modules under it; default: all.")
@click.option("--json", "as_json", is_flag=True, help="The level and those of modules as JSON.")
@admin_option
def log_level(level: str | None, module: str, as_json: bool, admin: str) -> None:
    """Show or change how much a running gateway logs."""
    gateway = Admin(admin)
    if level is None:
        levels: dict[str, Any] = gateway.read("/v1/log-level")
    else:
        asked = {"level": None if level == "default" else level, "module": module}
        levels = gateway.put("/v1/log-level", json.dumps(asked).encode())
    if as_json:
        click.echo(json.dumps(levels))
        return
    click.echo(levels["level"])
    for name, own in sorted(levels["modules"].items()):
        click.echo(f"{name}: {own}")
