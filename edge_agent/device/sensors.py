"""The sensors read the device's battery and heat from sysfs every few seconds, in a thread.

A driver may take its time over a read (a battery behind a slow bus takes tens of milliseconds), so the loop that
serves requests never reads a file itself: it looks at `now`, which is as old as `POLL_S`. What cannot be read is left
out; a device without sensors has no readings, and that is no error. `edge_agent/core/device_conditions.py` parses the
texts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

import structlog
from msgspec.structs import replace

from edge_agent.core.device_conditions import Attributes, conditions_of
from tidegate import clock
from tidegate.fleet.conditions import UNTOLD, DeviceConditions
from tidegate.runtime.owned_task import OwnedTask

POLL_S: Final = 5.0
_MOST_FOLDERS: Final = 64
_MOST_CHARACTERS: Final = 64
_SUPPLY: Final = (
    "type", "scope", "status", "online", "capacity", "energy_now", "energy_full", "charge_now", "charge_full"
)  # fmt: skip
_ZONE: Final = ("type", "temp")
_COOLER: Final = ("type", "cur_state")

log = structlog.get_logger(__name__)


class Sensors:
    """Looks once at the start and then regularly, inside `async with`. `now` is the last reading.

    Args:
        root: the folder that holds `power_supply` and `thermal`, as `/sys/class` does; None: look at nothing.
        metered: whether the device's link is paid by the byte, which no file tells.
        on_change: called on the loop when the readings have changed.
    """

    def __init__(
        self, root: Path | None, *, metered: bool, on_change: Callable[[], None] = lambda: None, poll_s: float = POLL_S
    ) -> None:
        self.now = UNTOLD
        self._root = root
        self._metered = metered
        self._on_change = on_change
        self._poll_s = poll_s
        self._task = OwnedTask(self._watch, name="sensors")

    async def __aenter__(self) -> Self:
        self.now = await asyncio.to_thread(read_conditions, self._root, metered=self._metered)
        if self._root is not None:
            self._task.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._task.aclose()

    def count_as_metered(self, metered: bool) -> None:
        """Whether the link is paid by the byte, from now on."""
        if metered != self._metered:
            self._metered = metered
            self.now = replace(self.now, metered=metered)
            self._on_change()

    async def _watch(self) -> None:
        while True:
            await clock.sleep_until_tick(self._poll_s)
            try:
                seen = await asyncio.to_thread(read_conditions, self._root, metered=self._metered)
            except Exception:
                log.exception("sensors cannot be read")  # a defect must not freeze the last state for good
                seen = DeviceConditions(metered=self._metered)
            if seen != self.now:
                self.now = seen
                self._on_change()

    def __repr__(self) -> str:
        return f"<Sensors {self._root} {self.now.in_words() or 'nothing to tell'}>"


def read_conditions(root: Path | None, *, metered: bool) -> DeviceConditions:
    """Read the conditions from the files under `root`. Blocks."""
    if root is None:
        return DeviceConditions(metered=metered)
    return conditions_of(
        _folders(root / "power_supply", "*", _SUPPLY),
        _folders(root / "thermal", "thermal_zone*", _ZONE),
        _folders(root / "thermal", "cooling_device*", _COOLER),
        metered=metered,
    )


def _folders(parent: Path, pattern: str, names: tuple[str, ...]) -> list[Attributes]:
    try:
        folders = sorted(parent.glob(pattern))[:_MOST_FOLDERS]
    except OSError:
        return []
    return [{name: text for name in names if (text := _text(folder / name)) is not None} for folder in folders]


def _text(path: Path) -> str | None:
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            return file.read(_MOST_CHARACTERS).strip()
    except OSError:
        return None  # not there, or a driver that has no answer just now
