"""Numbers of a command line that are none."""

from __future__ import annotations

import click
import pytest

from tidegate.runtime.finite_range import FiniteRange


@pytest.mark.parametrize("value", ["nan", "inf", "1e999", "-inf", "five"])
def test_what_is_no_finite_number_is_refused(value: str) -> None:
    with pytest.raises(click.BadParameter):
        FiniteRange(0, min_open=True).convert(value, None, None)


def test_the_range_holds() -> None:
    assert FiniteRange(0, 1).convert("0.5", None, None) == 0.5
    with pytest.raises(click.BadParameter, match="not in the range"):
        FiniteRange(0, 1).convert("2", None, None)
