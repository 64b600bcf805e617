"""Checks an exported program's archive before torch reads it, so that no pickle is ever loaded.

`torch.export.load` unpickles a weight or constant whose entry says `use_pickle`, and takes archives of older forms,
which are pickles. A pickle runs what it likes when it is read. Programs that `torch.export.save` writes from ordinary
tensors have none, so nothing is lost by refusing; a digest in the manifest does not make a pickle harmless, it only
says that it is the one that was meant.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from tidegate.engines.errors import EngineError

_FORCE: Final = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_MAX_CONFIG_BYTES: Final = 64 * 2**20


def refuse_pickles(artefact: Path) -> None:
    """Raises EngineError for an exported program that torch would unpickle a part of, and for what is no archive."""
    try:
        with zipfile.ZipFile(artefact) as archive:
            configs = [one for one in archive.infolist() if one.filename.endswith("_config.json")]
            weights = [one for one in configs if one.filename.endswith("_weights_config.json")]
            if not weights:
                raise EngineError(
                    f"{artefact}: an exported program of an older form, which is a pickle: export it anew"
                )
            for config in configs:
                if config.file_size > _MAX_CONFIG_BYTES:
                    raise EngineError(f"{artefact}: {config.filename} has {config.file_size} bytes")
                _refuse(artefact, config.filename, msgspec.json.decode(archive.read(config)))
    except (OSError, zipfile.BadZipFile, msgspec.DecodeError) as error:
        raise EngineError(f"{artefact}: no exported program: {error}") from error


@contextmanager
def no_pickles() -> Iterator[None]:
    """Within, torch unpickles tensors and nothing else, also where its own code would try again without care: it does
    for the example inputs in an archive. Of the whole process, so not for where several threads load."""
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before


def _refuse(artefact: Path, config: str, found: Any) -> None:
    entries = found.get("config") if isinstance(found, dict) else None
    if not isinstance(entries, dict):
        raise EngineError(f"{artefact}: {config} is no list of what the program holds")
    for name, entry in entries.items():
        if not isinstance(entry, dict) or entry.get("use_pickle") is not False:
            raise EngineError(f"{artefact}: {name!r} is stored as a pickle, which runs code when it is read: refused")
