"""Where a pool's ONNX variants compute: on the device of their worker, or where `onnx_device` says, if that was tried.

torch has its devices, and ONNX Runtime others: TensorRT beside CUDA on the same GPU, or OpenVINO on the processor. What
is named is compared with the processor before the workers start, as an edge does it: TensorRT computes in fp16, so its
answers are held against fp32 each time, and not only when somebody built the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import structlog

from cloud_pool.workers.device_worker import PoolLoadable
from tidegate.workers.process import EngineSpec
from tidegate.workers.warming.device_choice import PROCESSOR
from tidegate.workers.warming.device_trial import DeviceTrials

log = structlog.get_logger(__name__)


async def placed(loadables: Sequence[PoolLoadable], trials: DeviceTrials, threads: int) -> list[PoolLoadable]:
    """The same, with the device of each ONNX variant for which one was right and faster."""
    return [await _placed(one, trials, threads) for one in loadables]


async def _placed(loadable: PoolLoadable, trials: DeviceTrials, threads: int) -> PoolLoadable:
    if loadable.variant.engine != "onnx":
        return loadable
    outputs = tuple(spec.name for spec in loadable.manifest.outputs)
    spec = EngineSpec(loadable.key, "onnx", loadable.artefact, outputs, threads)
    choice = await trials.choose(loadable.manifest, loadable.variant, spec)
    return loadable if choice.device == PROCESSOR else replace(loadable, onnx_device=choice.device)
