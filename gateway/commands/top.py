"""`tidegate top`: a live view of a running gateway on a terminal, from the stream that its console reads."""

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

_SILENT_S: Final = 15.0
_WORDS: Final = [word for word, _ in SORTS.values()]
_KEYS: Final = ", ".join(f"{key} {word}" for key, (word, _) in SORTS.items())
_EXAMPLES = f"""\b
Examples:
  tidegate top                          until q is pressed; sorted by: {_KEYS}
  tidegate top --once --sort late       one picture, for a script or a ticket
  tidegate top --json | jq -r '.sick[] | "\\(.target) \\(.reason)"'
"""


@click.command(epilog=_EXAMPLES)
@click.option("--sort", type=click.Choice(_WORDS), default="health", show_default=True, help="What comes first.")
@click.option("--once", is_flag=True, help="Print one picture and end.")
@click.option("--json", "as_json", is_flag=True, help="One snapshot as JSON, with the links that are `sick`, and end.")
@click.option(
    "--admin", default="http://127.0.0.1:8003", show_default=True, help="Address of the gateway's admin port."
)
def top(sort: str, once: bool, as_json: bool, admin: str) -> None:
    """Watch a running gateway: which link is sick, what targets do, which classes are late, where work goes and why.

    Rates are of the last ten to fifteen seconds, times of the last minute. `SICK` names each link that is not well.
    """
    console = Console()
    if once or as_json:
        snapshot = next(_snapshots(admin))
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
    """The gateway ends a stream after minutes, so that a revoked key does not last; then it is asked anew."""
    while True:
        yield from _snapshots(admin)


def _snapshots(admin: str) -> Iterator[dict[str, Any]]:
    with stream_admin(admin, "/console/live", silent_s=_SILENT_S) as lines:
        yield from snapshots_of(lines)
    click.echo(f"the gateway at {admin} has no more to say", err=True)


def snapshots_of(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Of a stream of server-sent events, those called `snapshot`."""
    event = b""
    for line in lines:
        if line.startswith(b"event: "):
            event = line[7:].strip()
        elif line.startswith(b"data: ") and event == b"snapshot":
            yield json.loads(line[6:])


@contextmanager
def _keys() -> Iterator[Any]:
    """A function that says which key was pressed last, "" for none; where there is no terminal, none ever is."""
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
