"""The epoch store keeps the session number of an agent, which only grows and is on disk before it is used.

Every MQTT CONNECT gets a new epoch, because the broker binds the last will to the CONNECT: a will that comes late then
carries an older epoch than the birth that followed, and changes nothing. A number that was used and forgotten (power
cut) would make the next session look like a past one, so `bump` returns only once the number is safe:
written beside, synced, renamed, and the folder synced.

    epoch = max(stored + 1, hint of a gateway, UTC seconds if the clock is sane)

The clock is there for a wiped disk: the next epoch is still greater than all before. Without clock and disk the agent
starts at 1, and a gateway that remembers a greater epoch sends it (`epoch_hint`).

A disk that is full or read-only does not keep a device from serving: the epoch is then held in memory, `unsaved` says
why, and `save` writes it when there is room again. With a sane clock the next start is greater all the same. Without
one, a random step makes it unlikely that two starts use one number, and the gateway's hint does the rest.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from tidegate.fleet.messages import MAX_EPOCH
from tidegate.storage.atomic_file import write_atomically
from tidegate.storage.disk_failure import is_disk_failure

# Before this the clock of a device without a battery is simply wrong; 2024 is older than this code.
SANE_UTC_S: Final = (1_704_067_200.0, 4_102_444_800.0)  # 2024 to 2100

UNSAVED_STEP: Final = 1 << 16  # without clock and disk: the next start's epoch is another one

log = structlog.get_logger(__name__)


class EpochStore:
    """The epoch of one device, in one small file. Blocks for a disk sync on `bump` and `save`; one process at a time.

    Args:
        draw: chance, uniform in [0, 1).
    """

    def __init__(self, path: Path, *, draw: Callable[[], float] = random.random) -> None:
        self.path = path
        self.unsaved = ""  # why the current epoch is in memory only; "" while it is on disk
        self._draw = draw
        self._current: int | None = None
        self._writing = threading.Lock()  # a new session and a retry of `save` are in different threads

    @property
    def current(self) -> int:
        """The epoch of the newest session; 0 before the first."""
        if self._current is None:
            self._current = self._read()
        return self._current

    def bump(self, now_utc_s: float, *, at_least: int = 1) -> int:
        """A new epoch, greater than every one before, already on disk unless the disk takes nothing.

        Raises:
            OSError: it could not be made safe, and the disk is not the reason; the session must not begin.
        """
        from_clock = int(now_utc_s) if SANE_UTC_S[0] <= now_utc_s <= SANE_UTC_S[1] else 1
        with self._writing:
            # Read again: after a takeover the file may hold an epoch that an old process of this device has used.
            epoch = min(MAX_EPOCH, max(self.current + 1, self._read() + 1, at_least, from_clock))
            if not self._saved(epoch) and from_clock == 1:
                epoch = min(MAX_EPOCH, epoch + int(UNSAVED_STEP * self._draw()))
            self._current = epoch
        return epoch

    def save(self) -> bool:
        """Write the current epoch if it is in memory only; whether it is on disk now. Raises OSError as `bump` does."""
        with self._writing:
            return not self.unsaved or self._saved(self.current)

    def _read(self) -> int:
        try:
            text = self.path.read_text(encoding="ascii")
        except FileNotFoundError:
            return 0
        except OSError as error:
            if not is_disk_failure(error):
                raise
            text = ""
        except UnicodeDecodeError:
            text = ""
        digits = text.strip()
        if digits.isdecimal() and len(digits) <= 16 and int(digits) <= MAX_EPOCH:
            return int(digits)
        log.warning("the epoch file is damaged; going on from the clock", path=str(self.path))
        return 0

    def _write(self, epoch: int) -> None:
        write_atomically(self.path, f"{epoch}\n".encode(), parents=True)

    def _saved(self, epoch: int) -> bool:
        try:
            self._write(epoch)
        except OSError as error:
            if not is_disk_failure(error):
                raise
            words = error.strerror or str(error)
            if self.unsaved != words:
                log.warning("the session's number is kept in memory only", path=str(self.path), reason=words)
            self.unsaved = words
            return False
        if self.unsaved:
            log.info("the session's number is on disk again", path=str(self.path))
        self.unsaved = ""
        return True

    def __repr__(self) -> str:
        unsaved = f", unsaved: {self.unsaved}" if self.unsaved else ""
        return f"<EpochStore {self.path} at {self._current if self._current is not None else 'unread'}{unsaved}>"
