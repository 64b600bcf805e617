"""A folder holds at most twenty modules: a reader holds twenty things, not seventy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from tests.lint.tree import Source, Violation

MOST_MODULES: Final = 20
# `python -m tests.bench.NAME` is how benches are called: a folder of entry points may hold more.
ENTRY_POINTS: Final = frozenset({"tests/bench"})


def crowded_folders(sources: Iterable[Source]) -> list[Violation]:
    """Folders that need rooms."""
    counts = Counter(source.folder for source in sources)
    return [
        Violation(folder, 1, f"{count} modules in one folder, more than {MOST_MODULES}: which rooms are in there?")
        for folder, count in sorted(counts.items())
        if count > MOST_MODULES and folder not in ENTRY_POINTS
    ]
