"""A row for each device compares the settings that are desired of it with those that it reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from rich.table import Column, Table

from tidegate.fleet.reported import ConfigurationReport, Reported
from tidegate.runtime.plain_text import plain
from tidegate.tools.delivery.configuration_order import desired_of
from tidegate.tools.delivery.order import ListedDevice
from tidegate.tools.delivery.screen import MOST_ROWS

Json = dict[str, Any]
_COLOURS: Final = {
    "in_sync": "green", "pending": "cyan", "drifted": "yellow", "returned": "red", "refused": "red", "unknown": "yellow"
}  # fmt: skip
_WORST_FIRST: Final = ("refused", "returned", "drifted", "pending", "unknown", "in_sync", "-")


def configuration_row(device: ListedDevice) -> Json:
    """What is desired of a device and what it reports; state "-" of one of which nothing is desired."""
    revision, desired = desired_of(device)
    report = device.reported.configuration if device.reported is not None else None
    state = device.configuration.state if device.configuration is not None else "-"
    return {
        "device": device.name,
        "freshness": device.freshness,
        "state": state,
        "reason": _reason(device, report),
        "desired_revision": revision if desired is not None else 0,
        "accepted_revision": _accepted(device.name, device.reported),
        "desired": {} if desired is None else desired.settings,
        "watch_s": None if desired is None else desired.watch_s,
        "local": None if desired is None else desired.local,
        "differs": [] if report is None else msgspec.to_builtins(report.differs),
        "digest": "" if report is None else report.digest,
        "file": "" if report is None else report.file,
    }


def configuration_table(rows: Sequence[Json], *, whole: bool = False) -> Table:
    """A screenful of rows, the worst first. Args: whole: all of them."""
    ordered = sorted(rows, key=lambda row: (_WORST_FIRST.index(row["state"]), row["device"]))
    shown = ordered if whole else ordered[:MOST_ROWS]
    table = Table(
        Column("device", no_wrap=True), "is", "settings", Column("revision", justify="right"), "differs", "why"
    )
    for row in shown:
        state = row["state"]
        words = f"[{_COLOURS[state]}]{state.replace('_', ' ')}[/]" if state in _COLOURS else state
        revision = f"{row['accepted_revision']}/{row['desired_revision']}" if row["desired_revision"] else "-"
        differs = ", ".join(f"{one['key']}={one['value']}" for one in row["differs"][:4])
        table.add_row(row["device"], row["freshness"], words, revision, plain(differs) or "-", plain(row["reason"]))
    return table


def rest_in_words(rows: Sequence[Json], *, whole: bool) -> str:
    """How many rows the table leaves out, by state; "" where it leaves out none."""
    if whole or len(rows) <= MOST_ROWS:
        return ""
    ordered = sorted(rows, key=lambda row: (_WORST_FIRST.index(row["state"]), row["device"]))
    counts = Counter(row["state"] for row in ordered[MOST_ROWS:])
    words = ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in counts.most_common())
    return f"… and {counts.total()} more, {words} (--all shows them)"


def _reason(device: ListedDevice, report: ConfigurationReport | None) -> str:
    said = device.configuration.evidence if device.configuration is not None else ""
    own = f"its own file is refused: {report.file}" if report is not None and report.file else ""
    return "; ".join(words for words in (said, own) if words)


def _accepted(name: str, reported: Reported | None) -> int:
    return 0 if reported is None else reported.accepted.get(f"device/{name}", 0)
