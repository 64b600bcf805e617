"""Command-line durations: 90s, 15m, 24h, 30d."""

from __future__ import annotations

import re
from typing import Any, Final

import click

_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """Seconds, minutes, hours or days: 90s, 15m, 24h, 30d."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"(\d{1,9})([smhd])", str(value))
        if found is None:
            self.fail(f"{value!r} is no duration: a whole number and s, m, h or d, as in 24h", param, ctx)
        return int(found[1]) * _UNITS[found[2]]
