"""Where vLLM's command is: it may be in an environment of its own."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def find_vllm(executable: str) -> str | None:
    """The path of the command, on PATH or beside the interpreter that runs here; None where there is none."""
    return shutil.which(executable) or shutil.which(executable, path=str(Path(sys.executable).parent))
