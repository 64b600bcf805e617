"""How much memory a GPU has, asked of the driver's own command, since this process loads no CUDA."""

from __future__ import annotations

from typing import Final

from tidegate.runtime.spawned_process import output_of

_COMMAND: Final = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
_WITHIN_S: Final = 10.0
_MIB: Final = 1 << 20


async def gpu_memory_bytes(gpu: str) -> int | None:
    """Bytes of the GPU of this number or UUID; None where the driver does not say."""
    try:
        said = await output_of([*_COMMAND, f"--id={gpu}"], within_s=_WITHIN_S)
        return int(said.output.split()[0]) * _MIB
    except (OSError, ValueError, IndexError):  # a TimeoutError is an OSError
        return None
