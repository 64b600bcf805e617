"""The measured costs of models are kept on disk across restarts of their device or pool: measuring takes seconds.

What was measured holds for one artefact with the steps around it, by their digest, on one processor with so many
threads at one priority; what differs in any of these is measured. The engine is warmed all the same, so the first
request is no slower, and a figure that has become wrong is corrected by real calls (`ServiceTime`), as one that was
measured a minute ago would be.

A file that cannot be read is as good as none, and one that cannot be written is a line in the log: both only cost time.
"""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Awaitable, Callable
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import structlog

from tidegate import __version__
from tidegate.estimate.cost_table import CostTable
from tidegate.models.manifest import Manifest, Variant
from tidegate.storage.atomic_file import write_atomically
from tidegate.workers.warmup import Computer, CostPoints, measure, warm

MOST: Final = 512
_MAX_BYTES: Final = 2**20
log = structlog.get_logger(__name__)


C = TypeVar("C", bound=Computer)
Measure = Callable[[C, str, Manifest, Variant], Awaitable[CostPoints]]
Warm = Callable[[C, str, Manifest, Variant, CostTable], Awaitable[None]]


class MeasuredCosts:
    """What was measured, by what it was measured of. `remembered` wraps a measurement.

    Args:
        path: of the file; None: nothing is remembered.
        settings: what else a cost depends on: threads, priority.
    """

    def __init__(self, path: Path | None, *, settings: str) -> None:
        self._path = path
        self._here = f"{__version__} {settings} {_processor()}"
        self._known: dict[str, CostPoints] | None = None

    def measuring(self, budget_s: float) -> Measure[Computer]:
        """What measures, in `budget_s`, what was not measured before."""
        return self.remembered(partial(measure, budget_s=budget_s), warm)

    def remembered(self, measure: Measure[C], warm: Warm[C]) -> Measure[C]:
        """`measure`, or `warm` and what was measured before."""

        path = self._path

        async def measured(worker: C, key: str, manifest: Manifest, variant: Variant) -> CostPoints:
            if path is None or not variant.sha256:
                return await measure(worker, key, manifest, variant)
            of = self._of(variant, manifest.digest_of(variant))
            if self._known is None:
                self._known = await asyncio.to_thread(_read, path)
            if points := self._known.get(of):
                await warm(worker, key, manifest, variant, CostTable(points))
                return points
            points = await measure(worker, key, manifest, variant)
            self._known = dict(list({**self._known, of: points}.items())[-MOST:])
            await asyncio.to_thread(_write, path, self._known)
            return points

        return measured

    def known(self, variant: Variant) -> CostPoints | None:
        """What was measured of it before, without steps around it. Blocks on the first use."""
        if self._path is None or not variant.sha256:
            return None
        if self._known is None:
            self._known = _read(self._path)
        return self._known.get(self._of(variant, variant.sha256))

    def _of(self, variant: Variant, digest: str) -> str:
        return f"{self._here} {variant.engine} {digest}"

    def __repr__(self) -> str:
        return f"<MeasuredCosts {self._path} {'unread' if self._known is None else len(self._known)}>"


def _read(path: Path) -> dict[str, CostPoints]:
    try:
        if path.stat().st_size > _MAX_BYTES:
            return {}
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, CostPoints])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    return {of: points for of, points in found.items() if points and all(map(_is_cost, points))}


def _write(path: Path, known: dict[str, CostPoints]) -> None:
    """Not synced to the disk: a file that a power cut has emptied is measured again."""
    try:
        write_atomically(path, msgspec.json.encode(known), durable=False, parents=True)
    except OSError as error:
        log.warning("what models cost here is not kept: the next start measures again", reason=str(error))


def _is_cost(point: tuple[float, float]) -> bool:
    units, seconds = point
    return isfinite(units) and units >= 0 and isfinite(seconds) and seconds > 0


def _processor() -> str:
    """The processor as Linux names it: a disk that was put into another device must not bring its figures along."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")[:16384]
    except OSError:
        text = ""
    names = {
        line.partition(":")[2].strip() for line in text.splitlines() if line.startswith(("model name", "CPU part"))
    }
    return f"{platform.machine()} x{os.cpu_count()} {' '.join(sorted(names))}"
