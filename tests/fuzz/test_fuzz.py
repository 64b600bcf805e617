"""A short run of every fuzz target, the same in every run: what it finds is a defect and never bad luck.

The long, random one is `make fuzz` (`__main__.py`), which keeps what it finds; that goes into a test of its own, beside
whatever was mended, and not into this file.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.fuzz import files, fleet, inference
from tests.fuzz.target import Target, run

pytestmark = pytest.mark.slow
TARGETS = (*inference.TARGETS, *fleet.TARGETS, *files.TARGETS)
EXAMPLES = 60


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_nothing_that_is_thrown_at_it_breaks(target: Target) -> None:
    how = settings(
        max_examples=round(EXAMPLES * target.weight),
        derandomize=True,
        database=None,
        deadline=None,  # a second is asked for in `target.py`, more than once
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    run(target, how)
