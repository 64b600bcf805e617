"""Wave shares on a command line: the part of a fleet that each wave of a rollout takes, as in 5%,25%,100%."""

from __future__ import annotations

import re
from typing import Any

import click


class WaveSharesParam(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """Growing percentages that end with 100%."""

    name = "shares"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        if not re.fullmatch(r"\d+(\.\d+)?%(,\d+(\.\d+)?%)*", str(value)):
            self.fail(f"{value!r}: percentages, as in 5%,25%,100%", param, ctx)
        shares = [float(one.rstrip("%")) / 100 for one in str(value).split(",")]
        if shares != sorted(set(shares)) or shares[0] <= 0 or shares[-1] != 1.0:
            self.fail(f"{value!r}: they must grow from above 0 to 100%", param, ctx)
        return tuple(shares)
