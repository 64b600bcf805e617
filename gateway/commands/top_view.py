"""The terminal view renders a console snapshot: sick links first, then targets, classes of requests, and ways.

It renders the same snapshot as the page (`gateway/operate/console/snapshot.py`), so that the two cannot disagree.
It fits 80 columns; a wider terminal has room for reasons. Pure: a snapshot in, something to print out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from tidegate.runtime.plain_text import plain

Row = Mapping[str, Any]

_COLOURS: Final = {
    "well": "green", "attention": "yellow", "trouble": "bold red",
    "slow": "yellow", "silent": "red", "suspect": "yellow", "down": "red",
}  # fmt: skip
_WORST_FIRST: Final = ("down", "silent", "suspect", "slow", "well")
_MOST_SICK: Final = 5
_NAME: Final = 20  # characters of a target's id
_WIDE: Final = 110  # columns from which on reasons stand beside the targets
_NUMBERS_WIDE: Final = 90  # at the most

# By the pressed key, with the word for --sort; the highest value first.
SORTS: Final[Mapping[str, tuple[str, Callable[[Row], Any]]]] = {
    "h": ("health", lambda row: -_WORST_FIRST.index(row["health"])),
    "r": ("rtt", lambda row: row["rtt_ms"] or 0.0),
    "j": ("jitter", lambda row: row["jitter_ms"] or 0.0),
    "x": ("loss", lambda row: row.get("loss_ratio") or 0.0),
    "u": ("queue", lambda row: (row["queued"], row["in_flight"])),
    "g": ("goodput", lambda row: row["goodput_per_s"]),
    "l": ("late", lambda row: (row["late_share"], row["late"])),
}


def sick_links(snapshot: Row) -> list[dict[str, str]]:
    """Return the links that are not well, the worst first, each with its reason."""
    unhealthy = [row for row in snapshot["targets"] if row["health"] != "well"]
    unhealthy.sort(key=lambda row: _WORST_FIRST.index(row["health"]))
    return [{"target": row["id"], "health": row["health"], "reason": row["reason"]} for row in unhealthy]


def render_screen(snapshot: Row, sort: str, *, width: int = 80, height: int | None = None) -> RenderableType:
    """Return the screen.

    Args:
        sort: one of the words of `SORTS`.
        height: the number of lines; None prints all.
    """
    rows = sort_rows(snapshot["targets"], sort)
    head = [_verdict(snapshot), *_sick(snapshot), _total(snapshot)]
    classes, ways = snapshot["classes"][:6], snapshot["ways"][:6]
    room = len(rows)
    if height is not None:  # a header for each table, and one line for the rest
        room = max(3, height - len(head) - len(classes) - len(ways) - 5)
    parts: list[RenderableType] = [*head, _targets(rows[:room], width)]
    if (more := len(rows) - room + snapshot["more_targets"]) > 0 and len(rows) >= room:
        parts.append(Text(f"and {more} more targets", style="dim"))
    if classes:
        parts.append(_classes(classes))
    if ways:
        parts.append(_ways(ways))
    return Group(*parts)


def sort_rows(rows: Sequence[Row], sort: str) -> list[Row]:
    """Return the rows sorted by a word of `SORTS`; equal rows keep their order."""
    key = next(key for word, key in SORTS.values() if word == sort)
    return sorted(rows, key=key, reverse=True)


def _verdict(snapshot: Row) -> Text:
    verdict = snapshot["verdict"]
    line = Text(f"{snapshot['gateway']} ", style="bold", no_wrap=True, overflow="ellipsis")
    line.append(f"{verdict['state']}: ", style=_COLOURS[verdict["state"]])
    return line.append(verdict["sentence"], style="none")


def _sick(snapshot: Row) -> list[Text]:
    sick = sick_links(snapshot)
    lines = []
    for one in sick[:_MOST_SICK]:
        line = Text(f"SICK {one['target']} ", style="bold red", no_wrap=True, overflow="ellipsis")
        lines.append(line.append(f"{one['health']}: {one['reason']}", style="none"))
    if len(sick) > _MOST_SICK:
        lines.append(Text(f"SICK and {len(sick) - _MOST_SICK} more", style="bold red"))
    return lines


def _total(snapshot: Row) -> Text:
    total, admission = snapshot["total"], snapshot["door"]
    times = " ".join(_ms(total[key]) for key in ("p50_ms", "p95_ms", "p99_ms"))
    words = (
        f"{total['goodput_per_s']:g} of {total['per_s']:g}/s in time · late {total['late_share']:.1%} · "
        f"p50/95/99 {times} ms · {admission['in_flight']}/{admission['limit']:g} inside"
    )
    line = Text("OVERLOADED · " if admission["overloaded"] else "", style="bold red", no_wrap=True, overflow="ellipsis")
    return line.append(words, style="none")


def _targets(rows: Sequence[Row], width: int) -> Table:
    numbers = ("rtt", "±jit", "loss", "que", "fly", "good/s", "late", "p95")
    table = _table("target", "link", *(Column(name, justify="right") for name in numbers))
    if width >= _WIDE:
        table.add_column("", no_wrap=True, overflow="ellipsis", max_width=width - _NUMBERS_WIDE)
    for row in rows:
        reason = [row["reason"] or row["conditions"]] if width >= _WIDE else []
        loss = row.get("loss_ratio")
        table.add_row(
            plain(row["id"] if len(row["id"]) <= _NAME else row["id"][: _NAME - 1] + "…"),
            f"[{_COLOURS[row['health']]}]{row['health']}[/]",
            _ms(row["rtt_ms"]),
            _ms(row["jitter_ms"]),
            "-" if loss is None else f"{loss:.0%}",
            str(row["queued"]),
            str(row["in_flight"]),
            f"{row['goodput_per_s']:g}",
            _late(row),
            _ms(row["p95_ms"]),
            *map(plain, reason),
        )
    return table


def _classes(rows: Sequence[Row]) -> Table:
    numbers = ("asked/s", "good/s", "late", "p50", "p95", "p99")
    table = _table("class", *(Column(name, justify="right") for name in numbers))
    for row in rows:
        name = row["model"] + (f" p{row['priority']}" if row["priority"] else "")
        times = (_ms(row[key]) for key in ("p50_ms", "p95_ms", "p99_ms"))
        table.add_row(plain(name), f"{row['per_s']:g}", f"{row['goodput_per_s']:g}", _late(row), *times)
    return table


def _ways(rows: Sequence[Row]) -> Table:
    table = _table("went to", "why", *(Column(name, justify="right") for name in ("asked/s", "late", "p95")))
    for row in rows:
        table.add_row(plain(row["to"]), plain(row["why"]), f"{row['per_s']:g}", _late(row), _ms(row["p95_ms"]))
    return table


def _table(*columns: str | Column) -> Table:
    whole = [Column(one, no_wrap=True) if isinstance(one, str) else one for one in columns]
    return Table(*whole, box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")


def _late(row: Row) -> str:
    share = row["late_share"]
    return f"[red]{share:.1%}[/]" if share >= 0.02 else f"{share:.1%}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 100.0 else f"{value:.0f}"
