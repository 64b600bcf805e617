"""`tidegate log-level`: how much a running gateway says, asked and changed."""

from __future__ import annotations

import json
from typing import Any

import click

from tidegate.admin_client import Admin, admin_option

_WORDS = ("debug", "info", "warning", "error", "default")
_EXAMPLES = """\b
Examples:
  tidegate log-level                                    what it is
  tidegate log-level debug                              say everything
  tidegate log-level debug --module gateway.targets.directory   of one part only
  tidegate log-level default --module gateway.targets.directory
A pool or an edge says everything, and then as before, by a signal: kill -s RTMIN PID
"""


@click.command(epilog=_EXAMPLES)
@click.argument("level", required=False, type=click.Choice(_WORDS))
@click.option("--module", default="", help="A module's name, for it and all under it; default: all.")
@admin_option
def log_level(level: str | None, module: str, admin: str) -> None:
    """Show or change how much a running gateway logs."""
    gateway = Admin(admin)
    if level is None:
        told: dict[str, Any] = gateway.read("/v1/log-level")
    else:
        asked = {"level": None if level == "default" else level, "module": module}
        told = gateway.put("/v1/log-level", json.dumps(asked).encode())
    click.echo(told["level"])
    for name, own in sorted(told["modules"].items()):
        click.echo(f"{name}: {own}")
