"""ONNX Runtime's devices by name: what is asked for them, and what is said where they are missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models.tiny_models import write_double
from tidegate.engines.errors import EngineError
from tidegate.engines.onnx import OnnxEngine
from tidegate.engines.onnx_providers import CPU, CUDA, DEVICES, candidates, cuda_index, known_device, providers_of

GPU = ("TensorrtExecutionProvider", CUDA, CPU)
ALL = tuple(one.provider for one in DEVICES.values())


def names(device: str, available: tuple[str, ...] = (*ALL, CPU)) -> list[str]:
    return [one if isinstance(one, str) else one[0] for one in providers_of(device, 2, available)]


@pytest.mark.parametrize("name", DEVICES)
def test_what_a_device_lacks_runs_on_the_processor(name: str) -> None:
    assert names(name)[0] == DEVICES[name].provider
    assert names(name)[-1] == CPU


def test_what_tensorrt_lacks_runs_on_its_gpu_first() -> None:
    assert names("tensorrt:1", GPU) == ["TensorrtExecutionProvider", CUDA, CPU]
    assert [one[1]["device_id"] for one in providers_of("tensorrt:1", 1, GPU)[:2]] == ["1", "1"]


def test_auto_is_cuda_where_it_is_there_and_else_the_processor() -> None:
    assert names("auto", GPU) == [CUDA, CPU]
    assert names("auto", (CPU,)) == names("cpu", GPU) == [CPU]


def test_openvino_takes_no_more_cores_than_the_processor_would() -> None:
    assert providers_of("openvino", 2, ALL)[0][1] == {"device_type": "CPU", "num_of_threads": "2"}
    assert providers_of("openvino:gpu", 2, ALL)[0][1] == {"device_type": "GPU"}


def test_a_device_that_this_runtime_lacks_is_refused_with_what_has_it() -> None:
    with pytest.raises(
        EngineError, match=r"no device 'openvino'.*install onnxruntime-openvino in place of onnxruntime"
    ):
        providers_of("openvino:GPU", 1, (CPU,))
    with pytest.raises(EngineError, match="install onnxruntime-gpu"):
        candidates("tensorrt", (CPU,))
    with pytest.raises(EngineError, match="the GPU's number"):
        providers_of("cuda:first", 1, GPU)


def test_auto_tries_what_is_there_and_a_name_only_itself() -> None:
    assert candidates("auto", (*GPU, "AzureExecutionProvider")) == ("tensorrt", "cuda")
    assert candidates("auto", ("AzureExecutionProvider", CPU)) == candidates("cpu", GPU) == ()
    assert candidates("cuda:1", GPU) == ("cuda:1",)


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("gpu", "known are cpu, auto, openvino"),
        ("cuda:", "ends with a colon"),
        ("cpu:1", "is no device"),
        ("", "known"),
    ],
)
def test_what_is_no_device_is_told_with_those_that_are(device: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        known_device(device)


def test_only_gpus_of_cuda_have_cuda_memory() -> None:
    assert [cuda_index(one) for one in ("auto", "cuda", "tensorrt:2", "openvino", "cpu")] == [0, 0, 2, None, None]


def test_an_engine_that_would_run_elsewhere_than_asked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime leaves out a provider that does not start, and says so on stderr alone."""
    from tidegate.engines import onnx

    artefact = write_double(tmp_path / "double.onnx")
    real = onnx.onnxruntime.InferenceSession
    monkeypatch.setattr(onnx, "providers_of", lambda *_: [(CUDA, {}), CPU])
    monkeypatch.setattr(onnx.onnxruntime, "InferenceSession", lambda *given, providers: real(*given, providers=[CPU]))
    with pytest.raises(EngineError, match="CUDAExecutionProvider did not start here, and ONNX Runtime took CPU"):
        OnnxEngine(artefact, device="cuda")
