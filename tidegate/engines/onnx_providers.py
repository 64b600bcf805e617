"""ONNX Runtime's devices by the names that configurations have: what brings each, what it needs, how it is asked for.

ONNX Runtime calls them execution providers, and each package of it has some of them: `onnxruntime` has the processor
alone. A device is NAME or NAME:DETAIL, as in `cuda:1` or `openvino:GPU`. Whoever names one that this ONNX Runtime does
not have is told which package has it. What a graph needs and a device lacks runs on the processor, since that comes
last in every list.

`tried` says where this project itself has seen a device compute. The others are written after ONNX Runtime's
documentation, and an edge compares any of them with its processor before it is used
(`tidegate/workers/warming/device_trial.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tidegate.engines.errors import EngineError

CPU: Final = "CPUExecutionProvider"
CUDA: Final = "CUDAExecutionProvider"

Options = dict[str, str]


def _cuda(detail: str, threads: int) -> Options:
    # An arena that grows by what is asked for, and not to the next power of two, is as large as the largest call.
    return {"device_id": detail or "0", "arena_extend_strategy": "kSameAsRequested"}


def _tensorrt(detail: str, threads: int) -> Options:
    return {"device_id": detail or "0", "trt_fp16_enable": "1"}


def _openvino(detail: str, threads: int) -> Options:
    kind = detail.upper() or "CPU"
    # Its own choice is all cores, which the device has other uses for.
    return {"device_type": kind, "num_of_threads": str(threads)} if kind == "CPU" and threads else {"device_type": kind}


def _qnn(detail: str, threads: int) -> Options:
    return {"backend_path": detail or "libQnnHtp.so"}


def _coreml(detail: str, threads: int) -> Options:
    return {"MLComputeUnits": detail or "ALL"}


def _numbered(detail: str, threads: int) -> Options:
    return {"device_id": detail or "0"}


def _xnnpack(detail: str, threads: int) -> Options:
    return {"intra_op_num_threads": str(threads or 1)}


@dataclass(frozen=True, slots=True)
class OnnxDevice:
    """One device.

    Args:
        provider: its name in ONNX Runtime.
        package: what to install instead of `onnxruntime`.
        needs: what has to be there beside the package.
        detail: what may follow its name and a colon.
        options: of the provider, for a detail and threads (0: all cores).
        on_cuda: whether its memory is a CUDA device's.
    """

    name: str
    provider: str
    package: str
    needs: str
    detail: str
    options: Callable[[str, int], Options]
    on_cuda: bool = False
    tried: bool = False


DEVICES: Final[Mapping[str, OnnxDevice]] = {
    one.name: one
    for one in (
        OnnxDevice(
            "openvino", "OpenVINOExecutionProvider", "onnxruntime-openvino", "an Intel processor, GPU or NPU",
            "CPU, GPU, NPU or AUTO", _openvino, tried=True,
        ),
        OnnxDevice(
            "tensorrt", "TensorrtExecutionProvider", "onnxruntime-gpu", "an NVIDIA GPU, CUDA, cuDNN and TensorRT 10",
            "the GPU's number", _tensorrt, on_cuda=True,
        ),
        OnnxDevice(
            "cuda", CUDA, "onnxruntime-gpu", "an NVIDIA GPU, CUDA and cuDNN", "the GPU's number", _cuda, on_cuda=True,
        ),
        OnnxDevice(
            "migraphx", "MIGraphXExecutionProvider", "onnxruntime-migraphx", "an AMD GPU, and ROCm with MIGraphX",
            "the GPU's number", _numbered,
        ),
        OnnxDevice(
            "qnn", "QNNExecutionProvider", "onnxruntime-qnn", "a Qualcomm processor with an NPU, and a quantized model",
            "the backend's library", _qnn,
        ),
        OnnxDevice(
            "coreml", "CoreMLExecutionProvider", "onnxruntime (for macOS)", "a Mac with Apple's processor",
            "ALL, CPUAndGPU or CPUAndNeuralEngine", _coreml,
        ),
        OnnxDevice(
            "xnnpack", "XnnpackExecutionProvider", "an ONNX Runtime built with --use_xnnpack",
            "an Arm or x86 processor", "nothing", _xnnpack,
        ),
    )
}  # fmt: skip


def known_device(device: str) -> str:
    """`device` itself. Raises ValueError for what cannot be one, whether this ONNX Runtime has it or not."""
    name, colon, detail = device.partition(":")
    if name in ("cpu", "auto") and not colon:
        return device
    if name not in DEVICES:
        raise ValueError(f"{device!r} is no device: known are cpu, auto, {', '.join(DEVICES)}")
    if colon and not detail:
        raise ValueError(f"{device!r} ends with a colon: say {name} alone, or {name}: and {DEVICES[name].detail}")
    return device


def candidates(device: str, available: Collection[str]) -> tuple[str, ...]:
    """The devices beside the processor that `device` means here: itself, or for `auto` all that this ONNX Runtime has.

    Raises:
        EngineError: it is named, and this ONNX Runtime does not have it.
    """
    if device == "cpu":
        return ()
    if device == "auto":
        return tuple(one.name for one in DEVICES.values() if one.provider in available)
    _known(device, available)
    return (device,)


def providers_of(device: str, threads: int, available: Collection[str]) -> list[Any]:
    """What a session is to be made with. `auto` is CUDA where it is there, and else the processor.

    Raises:
        EngineError: this ONNX Runtime does not have the device; names what has it.
    """
    if device == "auto":
        device = "cuda" if CUDA in available else "cpu"
    if device == "cpu":
        return [CPU]
    known, detail = _known(device, available), device.partition(":")[2]
    listed: list[Any] = [(known.provider, known.options(detail, threads))]
    if known.on_cuda and known.provider != CUDA and CUDA in available:
        listed.append((CUDA, _cuda(detail, threads)))  # for what TensorRT does not do
    return [*listed, CPU]


def cuda_index(device: str) -> int | None:
    """The number of the GPU whose memory a device's sessions take; None of one that has no CUDA memory."""
    name, _, detail = device.partition(":")
    if name == "auto":
        return 0
    return int(detail or "0") if name in DEVICES and DEVICES[name].on_cuda else None


def _known(device: str, available: Collection[str]) -> OnnxDevice:
    name, _, detail = device.partition(":")
    known = DEVICES.get(name)
    if known is None:
        raise EngineError(f"ONNX Runtime has no device {device!r}: known are cpu, auto, {', '.join(DEVICES)}")
    if known.provider not in available:
        raise EngineError(
            f"this ONNX Runtime has no device {name!r} (it has {', '.join(available)}): install {known.package} in "
            f"place of onnxruntime, on {known.needs}"
        )
    if known.on_cuda and detail and not detail.isdecimal():
        raise EngineError(f"the device {device!r} has to end with {known.detail}")
    return known
