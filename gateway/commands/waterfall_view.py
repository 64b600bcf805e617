"""The waterfall view prints a request stage by stage, and each attempt as a bar of its own.

Bars share one scale, from the request's arrival to its end, so stages that ran at the same time are aligned. The last
line is the sum: stages, the unaccounted rest, and the latency that the gateway measured.
"""

from __future__ import annotations

from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from tidegate.runtime.plain_text import plain

_WIDTH: Final = 32
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"
_STYLES: Final = {
    "compute": "green",
    "queue": "yellow",
    "batch wait": "yellow",
    "link out": "cyan",
    "link back": "cyan",
    "target": "green",
    "before": "magenta",
    "held": "magenta",
    "unanswered": "red",
}
_ENDS: Final = {"answered": "green", "failed": "red", "cancelled": "dim", "": "red"}


def print_waterfall(one: dict[str, Any], console: Console) -> None:
    """Print the waterfall of a request as `/debug/decisions` returns it."""
    falls, elapsed_ms = one["waterfall"], one["elapsed_ms"]
    console.print(Group(*_parts(falls, elapsed_ms)), highlight=False)


def _parts(falls: dict[str, Any], elapsed_ms: float) -> list[RenderableType]:
    path = Table(
        Column("stage", no_wrap=True),
        Column("ms", justify="right", no_wrap=True),
        Column("", no_wrap=True),
        "",
        box=None,
    )
    for stage in falls["path"]:
        bar = _bar(stage["start_ms"], stage["took_ms"], elapsed_ms, _STYLES.get(stage["stage"], "blue"))
        path.add_row(stage["stage"], _number(stage["took_ms"]), bar, plain(stage.get("words", "")))
    if abs(falls["unaccounted_ms"]) >= 0.001:
        path.add_row("unaccounted", _number(falls["unaccounted_ms"]), "", "what the target claims does not fit")
    path.add_row("[bold]in all", f"[bold]{_number(elapsed_ms)}", "", "")
    attempts = falls["attempts"]
    return [path] if len(attempts) < 2 else [path, _attempts(attempts, elapsed_ms)]


def _attempts(attempts: list[dict[str, Any]], elapsed_ms: float) -> Table:
    table = Table(
        Column("attempt", no_wrap=True),
        Column("ms", justify="right", no_wrap=True),
        Column("", no_wrap=True),
        "",
        box=None,
    )
    for one in attempts:
        end = one["end"] or "no answer"
        words = f"{one['reason']}, {end}" + (f": {one['error']}" if one["error"] else "")
        bar = _bar(one["start_ms"], one["took_ms"], elapsed_ms, _ENDS.get(one["end"], "red"))
        table.add_row(f"{one['attempt'] + 1} {plain(one['target'])}", _number(one["took_ms"]), bar, plain(words))
    return table


def _bar(start_ms: float, took_ms: float, elapsed_ms: float, style: str) -> Text:
    """Return a bar on the shared scale; one that is too short to be seen is a hairline."""
    scale = _WIDTH / elapsed_ms if elapsed_ms > 0.0 else 0.0
    begin = min(_WIDTH - 1, max(0, int(start_ms * scale)))
    length = min(max(took_ms, 0.0) * scale, float(_WIDTH - begin))
    whole, rest = int(length), int(8 * (length - int(length)))
    drawn = "█" * whole + (_EIGHTHS[rest] if rest else "")
    return Text(" " * begin + (drawn or "▏"), style=style)


def _number(ms: float) -> str:
    return f"{ms:.2f}" if abs(ms) < 10.0 else f"{ms:.1f}" if abs(ms) < 1000.0 else f"{ms:.0f}"
