"""The device's own file of settings: YAML with the keys of the agent's configuration, as far as they may be changed.

    log_level: debug
    store:
      max_rows: 5000

A ConfigMap is mounted as a folder whose files are links through `..data`, which the kubelet exchanges as one; the file
is another one then by its inode, which is how a change is seen (`tidegate/runtime/followed_file.py`). A mount by
`subPath` is never changed, so it is of no use here.

A file that is wrong in one key is refused whole, and what it said before stays in force, also over a start.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import yaml

from edge_agent.config import EdgeConfig
from edge_agent.configuration.effective import with_settings
from tidegate.rollout.device_settings import SettingRefused, Settings, checked, flattened
from tidegate.storage.bounded_yaml import TooMuch, compose, construct

MAX_FILE_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class DeviceFile:
    """What a device's own file says, or why it cannot be used."""

    settings: Settings = field(default_factory=dict)
    problem: str = ""


def read_device_file(path: Path, base: EdgeConfig) -> DeviceFile:
    """Read the file. Blocks on the disk; raises nothing, since what is wrong with it is reported.

    Args:
        base: the agent's own configuration, which must take the settings.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise SettingRefused(f"it has more than {MAX_FILE_BYTES} bytes, which no list of settings needs")
        node = compose(raw.decode())
        settings = checked(flattened(None if node is None else construct(node)))
        with_settings(base, settings)
    except OSError as error:
        return DeviceFile(problem=f"{path} (key 'device_file') cannot be read: {error.strerror}")
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        return DeviceFile(problem=f"{path} (key 'device_file') is not YAML: {' '.join(str(error).split())}")
    except (SettingRefused, TooMuch) as error:
        return DeviceFile(problem=f"{path} (key 'device_file'): {error}")
    except (ValueError, TypeError, RecursionError) as error:  # what a YAML library raises for odd tags and dates
        return DeviceFile(problem=f"{path} (key 'device_file') is not plain YAML: {error}")
    return DeviceFile(settings)
