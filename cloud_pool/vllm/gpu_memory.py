"""How much memory a GPU has, asked of the driver's own command, since this process loads no CUDA."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

_COMMAND: Final = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
_WITHIN_S: Final = 10.0
_MIB: Final = 1 << 20


async def gpu_memory_bytes(gpu: str) -> int | None:
    """Bytes of the GPU of this number or UUID; None where the driver does not say."""
    try:
        process = await asyncio.create_subprocess_exec(
            *_COMMAND, f"--id={gpu}", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
    except OSError:
        return None
    try:
        async with asyncio.timeout(_WITHIN_S):
            said, _ = await process.communicate()
        return int(said.split()[0]) * _MIB
    except (TimeoutError, ValueError, IndexError):
        return None
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
