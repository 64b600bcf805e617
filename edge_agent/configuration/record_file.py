"""The record of a device's changed settings in one small file, replaced whole and synced before anything is applied.

A record that cannot be read is put aside, and the agent runs with its own configuration: its documents and its file say
again what shall be changed.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import structlog

from edge_agent.core.configuration_trial import ConfigurationRecord
from tidegate.rollout.device_settings import SettingRefused, checked
from tidegate.storage.atomic_file import write_atomically

FILE_NAME: Final = "configuration.json"
_MAX_BYTES: Final = 1 << 20
log = structlog.get_logger(__name__)


class ConfigurationFile:
    """Every method blocks on the disk."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME

    def read(self, *, mend: bool = True) -> ConfigurationRecord:
        """The record; an empty one where there is none.

        Args:
            mend: whether to put a damaged file aside.
        """
        try:
            with self.path.open("rb") as file:
                record = msgspec.json.decode(file.read(_MAX_BYTES), type=ConfigurationRecord)
            for settings in (record.in_force, record.former, record.trying, record.desired, record.local):
                checked(settings or {})  # an agent of another version may know other keys
            return record
        except FileNotFoundError:
            return ConfigurationRecord()
        except OSError as error:
            log.warning("the record of changed settings cannot be read", path=str(self.path), reason=error.strerror)
        except (msgspec.MsgspecError, UnicodeError, RecursionError, SettingRefused) as error:
            log.warning(
                "the record of changed settings is damaged; beginning anew", path=str(self.path), reason=str(error)
            )
            if mend:
                with suppress(OSError):
                    os.replace(self.path, self.path.with_name(f"{FILE_NAME}.damaged"))
        return ConfigurationRecord()

    def write(self, record: ConfigurationRecord) -> None:
        """Replace the record. Raises OSError: the one before is still there."""
        write_atomically(self.path, msgspec.json.encode(record), parents=True)

    def __repr__(self) -> str:
        return f"<ConfigurationFile {self.path}>"
