"""Source reports are what a source of discovery tells: its whole set of targets, or that it cannot tell it now."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from gateway.core.fleet.found_targets import Found


@dataclass(frozen=True, slots=True)
class SourceSaid:
    """All targets that are there now. `warning` is what of its answer cannot be used, or ""."""

    source: str
    found: tuple[Found, ...]
    warning: str = ""


@dataclass(frozen=True, slots=True)
class SourceAway:
    """The source cannot be asked, or says what cannot be read."""

    source: str
    why: str


SourceReport = SourceSaid | SourceAway
Report = Callable[[SourceReport], None]


class TargetSource(AbstractAsyncContextManager[object], Protocol):
    """`async with` keeps reporting until its end. Raises ConfigError at the start where it can never work."""

    name: str
