"""`python -m tests.lint`: every rule over the checkout; exits with 1 when one is broken."""

from __future__ import annotations

import sys

from tests.lint.citations import dead_citations, dead_citations_of_pages
from tests.lint.class_names import repeated_class_names
from tests.lint.construction import positional_construction
from tests.lint.docstrings import riddles
from tests.lint.figures import figure_violations
from tests.lint.folders import crowded_folders
from tests.lint.tree import sources
from tests.lint.wiring import wired_from_outside


def main() -> int:
    """Print what is wrong, a line each."""
    read = sources()
    rules = (
        crowded_folders,
        repeated_class_names,
        positional_construction,
        wired_from_outside,
        riddles,
        dead_citations,
    )
    of_figures, stale = figure_violations(read)
    found = [violation for rule in rules for violation in rule(read)] + dead_citations_of_pages() + of_figures
    for violation in found:
        print(violation)
    if stale:
        print(stale)
    print(
        f"{len(found)} violations of the rules of this code base in {len(read)} files" if found else "rules: all kept"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
