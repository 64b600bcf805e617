"""A rollout is shown on a terminal: how far each device is, and why it is not further."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from tidegate.runtime.duration import printed_duration
from tidegate.runtime.plain_text import plain
from tidegate.tools.delivery.rows import SILENT

MOST_ROWS: Final = 24
_COLOURS: Final = {
    "succeeded": "green", "back": "green", "failed": "red", "overdue": "red", "stuck": "red", "returning": "yellow",
    "returned": "yellow", "paused": "yellow", "recalled": "yellow", "working": "cyan", "running": "cyan",
}  # fmt: skip
# What an operator wants to see first where not all fit.
_ORDER: Final = ("failed", "overdue", "stuck", "working", "recalled", "asked", "succeeded", "back", "waiting")


def coloured(word: str) -> str:
    return f"[{_COLOURS[word]}]{word}[/]" if word in _COLOURS else word


def rollout_view(one: dict[str, Any]) -> RenderableType:
    """A rollout with its devices, as `GET /v1/rollouts/ID` returns it."""
    devices = sorted(one["devices"].items(), key=lambda item: _ORDER.index(item[1]["step"]))
    table = Table(Column("device", no_wrap=True), "wave", "step", "progress", "runs", "why", box=None, pad_edge=False)
    for name, part in devices[:MOST_ROWS]:
        wave = "" if part["step"] == "waiting" else str(part["wave"] + 1)
        table.add_row(
            name, wave, coloured(part["step"]), _progress(part), plain(part["running"]), plain(part["reason"])
        )
    rest = len(devices) - MOST_ROWS
    below: list[RenderableType] = [Text(f"… and {rest} more", style="dim")] if rest > 0 else []
    return Group(Text.from_markup(headline(one)), table, *below)


def headline(one: dict[str, Any]) -> str:
    counts = ", ".join(f"{count} {step}" for step, count in one["counts"].items() if count)
    why = f": {plain(one['reason'])}" if one["reason"] else ""
    where = f"wave {one['wave']} of {len(one['sizes'])}"
    return (
        f"[bold]{one['model']} {one['version']}[/] {coloured(one['phase'])}{why}\n"
        f"{one['id']}, {where}, {counts}, {printed_duration(one['elapsed_s'])}"
    )


def _progress(part: dict[str, Any]) -> RenderableType:
    if part["state"] in ("downloading", "deferred") and part["total_bytes"]:
        bar = Table.grid(padding=(0, 1))
        ratio = f"{part['done_bytes'] / part['total_bytes']:.0%} of {part['total_bytes'] / 1e6:.1f} MB"
        bar.add_row(ProgressBar(total=part["total_bytes"], completed=part["done_bytes"], width=16), ratio)
        return bar
    return str(part["state"])


def rollouts_table(rollouts: list[dict[str, Any]]) -> Table:
    table = Table(Column("rollout", no_wrap=True), "model", "version", "phase", "wave", "devices", "why")
    for one in rollouts:
        counts = ", ".join(f"{count} {step}" for step, count in one["counts"].items() if count)
        wave = f"{one['wave']} of {len(one['sizes'])}"
        table.add_row(
            plain(one["id"]),
            plain(one["model"]),
            plain(one["version"]),
            coloured(one["phase"]),
            wave,
            counts,
            plain(one["reason"]),
        )
    return table


def devices_view(rows: list[dict[str, Any]], *, whole: bool = False) -> RenderableType:
    """A screenful: those with a reason first, then those on their way; the others are counted. Args: whole: all."""
    first = sorted(  # those alike as they came
        rows, key=lambda row: (not row["reason"], row["reason"] == SILENT, row["state"] == "ready")
    )
    shown = first if whole else first[:MOST_ROWS]
    rest = Counter(row["state"] or "unknown" for row in first[len(shown) :])
    if not rest:
        return devices_table(shown)
    words = ", ".join(f"{count} {state}" for state, count in rest.most_common())
    return Group(devices_table(shown), Text(f"… and {rest.total()} more, {words} (--all shows them)", style="dim"))


def devices_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        Column("device", no_wrap=True), "model", "runs", "wanted", "state", Column("revision", justify="right"), "why"
    )
    for row in rows:
        revision = f"{row['reported_revision']}/{row['desired_revision']}" if row["desired_revision"] else "-"
        table.add_row(
            row["device"], plain(row["model"]), plain(row["running"] or "-"), plain(row["wanted"] or "-"),
            coloured(row["state"]), revision,
            plain(row["reason"]),
        )  # fmt: skip
    return table
