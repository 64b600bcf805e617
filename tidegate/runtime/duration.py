"""Durations have one spelling on the command line: 200ms, 2s, 1.5m, 24h, 90d; and one where they are printed.

An option that used to take a bare number still does, in the unit that it always had. What is printed can be given to an
option as it is, apart from its rounding.
"""

from __future__ import annotations

import re
from math import inf, isfinite
from typing import Any, Final

import click

_UNITS: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_SPELLED: Final = re.compile(r"(\d{1,9}(?:\.\d{0,9})?|\.\d{1,9}) ?(ms|s|min|m|h|d)")
_FORM: Final = "200ms|2s|1.5m|24h"


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """A number with a unit, milliseconds to days; its value is seconds."""

    name = "duration"

    def __init__(
        self, *, bare: str | None = None, min_s: float = 0.0, max_s: float = inf, above_zero: bool = False
    ) -> None:
        """Args: bare: the unit of a number without one; None: a number needs a unit."""
        self.bare = bare
        self.min_s = min_s
        self.max_s = max_s
        self.above_zero = above_zero

    def to_info_dict(self) -> Any:  # newer versions of click have a type of their own for it
        """Return what there is to know of the type, as click's own number types do."""
        most = self.max_s if isfinite(self.max_s) else None
        limits = {"min_s": self.min_s, "max_s": most, "above_zero": self.above_zero}
        return {**super().to_info_dict(), "bare": self.bare, **limits}

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """Return the form for the help."""
        return _FORM

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        seconds = self._seconds(str(value).strip())
        if seconds is None:
            without = f"; a number without a unit is in {self.bare}" if self.bare else ""
            self.fail(
                f"{value!r} is no duration: a number and ms, s, m, h or d, as in 200ms, 90s, 5m or 1h{without}",
                param,
                ctx,
            )
        if self.above_zero and seconds <= 0.0:
            self.fail(f"{value!r}: must be above 0", param, ctx)
        if not self.min_s <= seconds <= self.max_s:
            most = f" and at most {printed_duration(self.max_s)}" if isfinite(self.max_s) else ""
            self.fail(f"{value!r}: must be at least {printed_duration(self.min_s)}{most}", param, ctx)
        return seconds

    def _seconds(self, words: str) -> float | None:
        if found := _SPELLED.fullmatch(words):
            return float(found[1]) * _UNITS[found[2]]
        if self.bare is None:
            return None
        try:
            number = float(words)
        except ValueError:
            return None
        return number * _UNITS[self.bare] if isfinite(number) else None

    def __repr__(self) -> str:
        return "DURATION"


def printed_duration(seconds: float) -> str:
    """Return a duration for people: 7.5 ms, 250 ms, 12.5 s, 1.5 min, 24 h, 90 d."""
    if seconds < 10.0:
        ms = seconds * 1e3
        return f"{ms:.1f} ms" if abs(ms) < 100.0 else f"{ms:.0f} ms"
    unit = "s" if seconds < 90.0 else "min" if seconds < 5400.0 else "h" if seconds < 172_800.0 else "d"
    return f"{seconds / _UNITS[unit]:.1f}".removesuffix(".0") + f" {unit}"
