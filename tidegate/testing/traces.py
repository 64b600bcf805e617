"""Recordings of real links for tests, where the machine has them; synthetic ones everywhere.

A recording is looked up by its file's name in the folders of `TIDEGATE_TRACES` (separated as in PATH) and of the ini
option `link_traces`. One that is nowhere skips the test, with the reason: recordings belong to their makers, and none
comes with Tidegate.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from tidegate.netsim.links.trace import CapacityTrace


class TraceMissing(Exception):
    """No folder has the recording; the message names the folders."""


class TraceFinder:
    """`trace("name")`, `trace.constant(mbit)` or `trace.steps(...)`."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = tuple(folders)

    def __call__(self, name: str) -> CapacityTrace:
        """Raises TraceMissing; ValueError when the file is no recording."""
        for folder in self._folders:
            path = folder / name
            if path.is_file():
                text = path.read_text()
                return CapacityTrace.parse_csv(text) if name.endswith(".csv") else CapacityTrace.parse(text)
        where = ", ".join(map(str, self._folders)) or "nowhere: set TIDEGATE_TRACES or the ini option link_traces"
        raise TraceMissing(f"there is no recording {name!r} (looked in {where})")

    def constant(self, mbit: float) -> CapacityTrace:
        return CapacityTrace.of_rates([(0.0, mbit), (10.0, mbit)])

    def steps(self, rates: Iterable[tuple[float, float]]) -> CapacityTrace:
        """(second, Mbit/s) pairs, each until the next; the last ends the recording, which then begins anew."""
        return CapacityTrace.of_rates(rates)

    def __repr__(self) -> str:
        return f"<TraceFinder {', '.join(map(str, self._folders))}>"


def folders(*more: str) -> list[Path]:
    """The folders of `TIDEGATE_TRACES`, and these."""
    named = os.environ.get("TIDEGATE_TRACES", "").split(os.pathsep)
    return [Path(one).expanduser() for one in (*named, *more) if one]
