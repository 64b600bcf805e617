"""Warm-up samples are a user's own inputs, run whenever a model is loaded, before it answers anybody.

Warm-up by made-up inputs (`warmup.py`) fills memory pools and chooses kernels for sizes that the manifest allows; real
callers may meet others, and a model may do something at its first real input that random ones do not bring about. A
file of samples (`warmup` in the manifest, .npz with an array for each input) is one call. A sample that the engine
refuses keeps the model from being served: it would refuse its callers as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from numpy.typing import NDArray

from tidegate.models.array_files import UnsafeArrayFile, load_npz
from tidegate.models.manifest import Manifest
from tidegate.outcome import InternalError
from tidegate.workers.process import ComputeResult

MOST_BYTES: Final = 256 * 2**20  # of one file, unpacked


class SampleComputer(Protocol):
    """The part of a worker that is needed here."""

    async def infer(self, key: str, inputs: Mapping[str, NDArray[Any]]) -> ComputeResult: ...


async def run_samples(
    worker: SampleComputer, key: str, manifest: Manifest, folder: Path, *, optional: bool = False
) -> None:
    """Run each file of samples once on the engine under `key`.

    Args:
        folder: of the model's version.
        optional: whether files may be missing, as on a device that a rollout has brought the artefacts only.

    Raises:
        InternalError: a file cannot be read, or lacks an input; or the engine raised. ServeError: as the worker says.
    """
    for name in manifest.warmup:
        if optional and not await asyncio.to_thread((folder / name).exists):
            continue
        inputs = await asyncio.to_thread(_read, folder / name)
        known = {spec.name for spec in manifest.inputs}
        if unknown := sorted(set(inputs) - known):
            raise InternalError(f"{folder / name}: {unknown[0]!r} is no input (inputs: {', '.join(sorted(known))})")
        if missing := [one.name for one in manifest.inputs if not one.optional and one.name not in inputs]:
            raise InternalError(f"{folder / name}: lacks the input {missing[0]!r} (arrays: {', '.join(inputs)})")
        await worker.infer(key, inputs)


def _read(path: Path) -> dict[str, NDArray[Any]]:
    try:
        return load_npz(path, most_bytes=MOST_BYTES)
    except OSError as error:
        raise InternalError(f"{path}: the samples for warm-up: {error.strerror or error}") from error
    except UnsafeArrayFile as error:
        raise InternalError(f"the samples for warm-up: {error}") from error
