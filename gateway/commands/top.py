"""The command `tidegate top` shows a running gateway live on a terminal, from the console's stream of snapshots."""

from __future__ import annotations

import json
import select
import sys
import termios
import tty
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import click
from rich.console import Console
from rich.live import Live

from gateway.commands.admin_reader import stream_admin
from gateway.commands.top_view import SORTS, render_screen, sick_links
from tidegate.admin_client import admin_option

_SILENT_S: Final = 15.0
_WORDS: Final = [word for word, _ in SORTS.values()]
_KEYS: Final = ", ".join(f"{key} {word}" for key, (word, _) in SORTS.items())
_EXAMPLES = f"""\b
Examples:
  tidegate top                          until q is pressed; sort keys: {_KEYS}
  tidegate top --once --sort late       one screen, for a script or a ticket
  tidegate top --json | jq -r '.sick[] | "\\(.target) \\(.reason)"'
"""


@click.command(epilog=_EXAMPLES)
@click.option("--sort", type=click.Choice(_WORDS), default="health", show_default=True, help="What comes first.")
@click.option("--once", is_flag=True, help="Print one screen and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print a snapshot as JSON, with its `sick` links, and exit.")
@admin_option
def top(sort: str, once: bool, as_json: bool, admin: str) -> None:
    """Watch a running gateway: sick links, targets, late classes of requests, and where requests go and why.

    Rates cover the last ten to fifteen seconds, times the last minute. `SICK` names each link that is not well.
    """
    console = Console()
    if once or as_json:
        snapshot = next(_snapshots(admin), None)
        if snapshot is None:
            raise click.ClickException(f"the gateway at {admin} ended its stream before the first snapshot")
        if as_json:
            click.echo(json.dumps({**snapshot, "sick": sick_links(snapshot)}))
        else:
            console.print(render_screen(snapshot, sort, width=console.width), highlight=False)
        return
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        for snapshot in _for_ever(admin):
            key = pressed()
            if key in ("q", "\x03"):
                return
            sort = SORTS[key][0] if key in SORTS else sort
            live.update(render_screen(snapshot, sort, width=console.width, height=console.height), refresh=True)


def _for_ever(admin: str) -> Iterator[dict[str, Any]]:
    """Yield snapshots without end: the gateway ends a stream after minutes, as a key may be revoked."""
    while True:
        yield from _snapshots(admin)


def _snapshots(admin: str) -> Iterator[dict[str, Any]]:
    with stream_admin(admin, "/console/live", silent_s=_SILENT_S) as lines:
        yield from snapshots_of(lines)
    click.echo(f"the gateway at {admin} has no more to say", err=True)


def snapshots_of(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the events called `snapshot` of a stream of server-sent events."""
    event = b""
    for line in lines:
        if line.startswith(b"event: "):
            event = line[7:].strip()
        elif line.startswith(b"data: ") and event == b"snapshot":
            yield json.loads(line[6:])


@contextmanager
def _keys() -> Iterator[Any]:
    """Yield a function that returns the key that was pressed last, "" for none; without a terminal always ""."""
    if not sys.stdin.isatty():
        yield lambda: ""
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield _pressed
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _pressed() -> str:
    key = ""
    while select.select([sys.stdin], [], [], 0.0)[0]:
        key = sys.stdin.read(1)
        if not key:  # the terminal is gone
            return "q"
    return key
