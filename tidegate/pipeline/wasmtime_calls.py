"""The C interface of wasmtime, for what a step's call takes: its package takes some 200 microseconds for the same.

The package makes several objects of Python for each store, instance, function and value, and looks up types again each
time. Here its functions get plain addresses, of structures that are laid out once for each module.

The structures are those of the package's own bindings. They are private to it, so one major version of it is supported
(`pyproject.toml`): with another one, which may lay them out otherwise, the import of this module fails.
"""

from __future__ import annotations

import ctypes
from importlib.metadata import version
from typing import Any, Final

import wasmtime
from wasmtime import _ffi

MAJOR: Final = "50"
if version("wasmtime").partition(".")[0] != MAJOR:
    raise ImportError(f"wasmtime {version('wasmtime')} is installed, and {MAJOR} is needed")

INSTANCE: Final = _ffi.wasmtime_instance_t
EXTERN: Final = _ffi.wasmtime_extern_t


class WasmtimeCalls:
    """The functions of wasmtime's C interface that a call takes, with plain addresses as arguments."""

    def __init__(self) -> None:
        library = ctypes.CDLL(_ffi.dll._name)  # noqa: SLF001 - the file that the package has loaded
        pointer, size = ctypes.c_void_p, ctypes.c_size_t

        def function(name: str, result: Any, *arguments: Any) -> Any:
            found = library[name]
            found.restype, found.argtypes = result, list(arguments)
            return found

        self.store_new = function("wasmtime_store_new", pointer, pointer, pointer, pointer)
        self.store_delete = function("wasmtime_store_delete", None, pointer)
        self.context = function("wasmtime_store_context", pointer, pointer)
        self.limit = function("wasmtime_store_limiter", None, pointer, *[ctypes.c_int64] * 5)
        self.set_fuel = function("wasmtime_context_set_fuel", pointer, pointer, ctypes.c_uint64)
        self.set_deadline = function("wasmtime_context_set_epoch_deadline", None, pointer, ctypes.c_uint64)
        self.instantiate = function("wasmtime_instance_pre_instantiate", pointer, pointer, pointer, pointer, pointer)
        self.export = function(
            "wasmtime_instance_export_get", ctypes.c_bool, pointer, pointer, ctypes.c_char_p, size, pointer
        )
        self.call = function("wasmtime_func_call_unchecked", pointer, pointer, pointer, pointer, size, pointer)
        self.memory_at = function("wasmtime_memory_data", pointer, pointer, pointer)
        self.memory_size = function("wasmtime_memory_data_size", size, pointer, pointer)

    def __repr__(self) -> str:
        return "<WasmtimeCalls>"


def address_of(pointer: Any) -> int:
    """Where an object of the package's points to."""
    address = ctypes.cast(pointer, ctypes.c_void_p).value
    assert address is not None  # what was made is somewhere
    return address


def error_words(error: int) -> str:
    """What an error says, which is freed."""
    pointer = ctypes.cast(error, ctypes.POINTER(_ffi.wasmtime_error_t))
    return str(wasmtime.WasmtimeError._from_ptr(pointer))  # noqa: SLF001 - as its own calls do


def trap_of(trap: int) -> wasmtime.Trap:
    """A trap, which is freed with the object."""
    pointer = ctypes.cast(trap, ctypes.POINTER(_ffi.wasm_trap_t))
    return wasmtime.Trap._from_ptr(pointer)  # noqa: SLF001 - as its own calls do
