"""What a machine computes ONNX models with beside its processor, as far as the installed ONNX Runtime goes.

ONNX Runtime is asked in a process of its own: an agent or a pool's server never loads it, which keeps some 50 MB from
their memory, and a driver that crashes at being looked for takes only that process with it. Where the device is `cpu`
nobody is asked.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from typing import Final

import msgspec

from tidegate.engines.errors import EngineError
from tidegate.engines.onnx_providers import candidates
from tidegate.runtime.process import StartError

_PROGRAM: Final = "import json, tidegate.engines, onnxruntime; print(json.dumps(onnxruntime.get_available_providers()))"
_WITHIN_S: Final = 60.0
_MOST_BYTES: Final = 1 << 16


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
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", _PROGRAM),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_WITHIN_S):
            said, complained = await process.communicate()
    except TimeoutError:
        raise EngineError(f"ONNX Runtime did not say within {_WITHIN_S:g} s what it has here") from None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    with suppress(msgspec.MsgspecError):
        return msgspec.json.decode(said[:_MOST_BYTES].splitlines()[-1] if said else b"", type=tuple[str, ...])
    last = complained.decode(errors="replace").strip().splitlines()[-1:] or [f"exit status {process.returncode}"]
    raise EngineError(f"ONNX Runtime does not say what it has here: {last[0]}")
