"""What a machine computes ONNX models with beside its processor, as far as the installed ONNX Runtime goes.

ONNX Runtime is asked in a process of its own: an agent or a pool's server never loads it, which keeps some 50 MB from
their memory, and a driver that crashes at being looked for takes only that process with it. Where the device is `cpu`
nobody is asked.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from typing import Final

import msgspec

from tidegate.engines.errors import EngineError
from tidegate.engines.onnx_providers import candidates
from tidegate.runtime.process import StartError
from tidegate.runtime.spawned_process import output_of

_PROGRAM: Final = """
import json, signal, sys
from tidegate.runtime.lifeline import die_with_parent
die_with_parent(int(sys.argv[1]), by=signal.SIGKILL)
import tidegate.engines, onnxruntime
print(json.dumps(onnxruntime.get_available_providers()))
"""
_WITHIN_S: Final = 60.0


async def devices_here(device: str, key: str) -> tuple[str, ...]:
    """The devices to try for the value of a configuration's key; none for `cpu`.

    Raises:
        StartError: it is named, and this ONNX Runtime does not have it, or ONNX Runtime does not say what it has.
    """
    if device == "cpu":
        return ()
    try:
        return candidates(device, await providers_here())
    except EngineError as error:
        raise StartError(f"key {key!r}: {error}") from error


async def providers_here() -> tuple[str, ...]:
    """ONNX Runtime's own names of what it has. Raises EngineError."""
    command = [sys.executable, "-P", "-c", _PROGRAM, str(os.getpid())]
    try:
        said = await output_of(command, within_s=_WITHIN_S, stderr=subprocess.STDOUT)
    except TimeoutError:
        raise EngineError(f"ONNX Runtime did not say within {_WITHIN_S:g} s what it has here") from None
    lines = said.output.strip().splitlines()
    for line in reversed(lines):  # what it warns of is among them
        with suppress(msgspec.MsgspecError):
            return msgspec.json.decode(line, type=tuple[str, ...])
    last = lines[-1].decode(errors="replace") if lines else f"exit status {said.status}"
    raise EngineError(f"ONNX Runtime does not say what it has here: {last}")
