"""The folder in which tests keep the demo models that they build: one for each state of what builds them.

Building all three takes four minutes of a core, and every clean checkout used to pay for it. The folder is in the
user's cache, named by a digest of the code that builds and reads models, of the pinned packages and of the interpreter,
so that checkouts share what is the same and none gets what another code made. Folders that no run has used for a week
go.

TIDEGATE_TEST_CACHE names another place. Where none can be written, it is `.tidegate` of the checkout.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Final

_CHECKOUT: Final = Path(__file__).parents[3]
_BUILDERS: Final = ("tidegate/tools/build", "tidegate/models", "tidegate/engines", "tidegate/generate")
_KEPT_S: Final = 7 * 86400.0


@cache
def model_cache() -> Path:
    """The folder, made and marked as used."""
    for parent in _places():
        folder = parent / _digest()[:16]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "used").touch()
        except OSError:
            continue
        _prune(parent, folder)
        return folder
    return _CHECKOUT / ".tidegate"


def _places() -> list[Path]:
    named = os.environ.get("TIDEGATE_TEST_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return [Path(named)] if named else [Path(home) / "tidegate-tests"]


def _digest() -> str:
    digest = sha256(sys.version.encode())
    files = [path for folder in _BUILDERS for path in (_CHECKOUT / folder).rglob("*.py")]
    for path in sorted([*files, _CHECKOUT / "constraints.txt"]):
        digest.update(str(path.relative_to(_CHECKOUT)).encode() + b"\0")
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _prune(parent: Path, own: Path) -> None:
    """Remove the folders of other states that no run has used for a week."""
    oldest = time.time() - _KEPT_S  # noqa: TID251  # compared with what a file system says
    for other in parent.iterdir():
        mark = other / "used"
        if other != own and mark.is_file() and mark.stat().st_mtime < oldest:
            shutil.rmtree(other, ignore_errors=True)
