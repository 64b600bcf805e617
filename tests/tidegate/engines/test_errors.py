"""A lack of memory is recognized in the error texts of each runtime."""

from __future__ import annotations

import pytest

from tidegate.engines.errors import EngineError, EngineOutOfMemory, failure_of, is_out_of_memory


class OutOfMemoryError(RuntimeError):
    """As torch names its own, in any of its modules."""


SHORT = [
    MemoryError(),
    OutOfMemoryError("CUDA"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    Exception("[ONNXRuntimeError] : 1 : FAIL : bfc_arena.cc Failed to allocate memory for requested buffer of size 5"),
    Exception("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Exception during loading: std::bad_alloc"),
    OSError(12, "Cannot allocate memory"),
]
OTHERS = [ValueError("shape mismatch"), RuntimeError("index 5 is out of bounds"), KeyError("memory")]


@pytest.mark.parametrize("error", SHORT, ids=str)
def test_too_little_memory_is_a_kind_of_its_own(error: Exception) -> None:
    found = failure_of(error, "m.onnx: cannot run")
    assert isinstance(found, EngineOutOfMemory)
    assert is_out_of_memory(found)
    assert str(found).startswith("m.onnx: cannot run: ")
    assert not str(found).endswith(": ")


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_anything_else_is_not(error: Exception) -> None:
    assert type(failure_of(error, "m.onnx: cannot run")) is EngineError
