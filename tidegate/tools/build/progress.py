"""A build reports its progress through one callable, so that builders know nothing of terminals or parent processes."""

from __future__ import annotations

from collections.abc import Callable

# what is going on, and how much of the whole build is done, from 0 to 1
Progress = Callable[[str, float], None]


def no_progress(what: str, done_ratio: float) -> None:
    """For callers that do not show progress."""


def part_of(progress: Progress, start_ratio: float, end_ratio: float) -> Progress:
    """A view of `progress` for one part of the build: its 0 to 1 is the whole's `start_ratio` to `end_ratio`."""

    def part(what: str, done_ratio: float) -> None:
        progress(what, start_ratio + (end_ratio - start_ratio) * done_ratio)

    return part
