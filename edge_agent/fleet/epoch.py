"""The epoch store keeps the session number of an agent, which only grows and is on disk before it is used.

Every MQTT CONNECT gets a new epoch, because the broker binds the last will to the CONNECT: a will that comes late then
carries an older epoch than the birth that followed, and changes nothing. A number that was used and forgotten (power
cut, full disk) would make the next session look like a past one, so `bump` returns only once the number is safe:
written beside, synced, renamed, and the folder synced.

    epoch = max(stored + 1, hint of a gateway, UTC seconds if the clock is sane)

The clock is there for a wiped disk: the next epoch is still greater than all before. Without clock and disk the agent
starts at 1, and a gateway that remembers a greater epoch sends it (`epoch_hint`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import structlog

from tidegate.fleet.messages import MAX_EPOCH
from tidegate.storage.atomic_file import write_atomically

# Before this the clock of a device without a battery is simply wrong; 2024 is older than this code.
SANE_UTC_S: Final = (1_704_067_200.0, 4_102_444_800.0)  # 2024 to 2100

log = structlog.get_logger(__name__)


class EpochStore:
    """The epoch of one device, in one small file. Blocks for a disk sync on `bump`; one process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._current: int | None = None

    @property
    def current(self) -> int:
        """The epoch of the newest session; 0 before the first."""
        if self._current is None:
            self._current = self._read()
        return self._current

    def bump(self, now_utc_s: float, *, at_least: int = 1) -> int:
        """A new epoch, greater than every one before, already on disk.

        Raises:
            OSError: it could not be made safe; the session must not begin.
        """
        from_clock = int(now_utc_s) if SANE_UTC_S[0] <= now_utc_s <= SANE_UTC_S[1] else 1
        # Read again: after a takeover the file may hold an epoch that an old process of this device has used meanwhile.
        epoch = min(MAX_EPOCH, max(self.current + 1, self._read() + 1, at_least, from_clock))
        self._write(epoch)
        self._current = epoch
        return epoch

    def _read(self) -> int:
        try:
            text = self.path.read_text(encoding="ascii")
        except FileNotFoundError:
            return 0
        except UnicodeDecodeError:
            text = ""
        digits = text.strip()
        if digits.isdecimal() and len(digits) <= 16 and int(digits) <= MAX_EPOCH:
            return int(digits)
        log.warning("the epoch file is damaged; going on from the clock", path=str(self.path))
        return 0

    def _write(self, epoch: int) -> None:
        write_atomically(self.path, f"{epoch}\n".encode(), parents=True)

    def __repr__(self) -> str:
        return f"<EpochStore {self.path} at {self._current if self._current is not None else 'unread'}>"
