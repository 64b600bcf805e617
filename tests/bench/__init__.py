"""What is measured: `python -m tests.bench.NAME`, each with its goals."""

from __future__ import annotations

import sys

from tests.bench import missing

if sys.argv[:1] == ["-m"]:  # as Python has it while it looks for the module to run
    missing.install()
