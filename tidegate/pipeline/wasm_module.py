"""Runs a WebAssembly module as a step: a program of anybody's, which can compute and do nothing else.

What a module exports is its interface:

    memory                      its linear memory
    alloc(size: i32) -> i32     where `size` bytes of input may be written
    run(at: i32, size: i32) -> i64
                                the message at that place (`wasm_tensors.py`) is done; the result's place in the upper
                                32 bits and its size in the lower; 0 refuses the request

It may import `tidegate.log(at: i32, size: i32)`, a line for the operator's log, and nothing else: it sees no clock, no
chance, no file and no network, so equal requests have equal answers on every machine (NaNs have one bit pattern, and
what may differ between processors is off).

A call gets a store of its own: memory, globals and tables as they were compiled. To reset one that was used would be as
good only if every global could be reached from outside, and those that a compiler makes are not exported; with a store
for each call nothing of one caller can be seen by another, whatever the module does. A store takes some ten
microseconds, since memory is checked by compared bounds and not by pages that the processor protects; that also leaves
the process's signal handlers alone, which other runtimes in it have.

What a call may take is bounded: fuel (about one an instruction), memory, time (`epoch_ticker.py`), the size of its
result, of its stack and of its tables, and the lines of its log. What it gives is compared with the declaration. Any
fault of it is a StepRefused for its caller.

It can be wrong where the compiler or the runtime is; the worker process around it has its own sandbox
(`tidegate/workers/sandbox.py`).

The functions of wasmtime's C interface are called directly (`wasmtime_calls.py`), with memory that is laid out once.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any, Final
from weakref import WeakMethod

import wasmtime
from numpy.typing import NDArray

from tidegate.models.manifest import TensorSpec
from tidegate.pipeline.epoch_ticker import TICK_S, EpochTicker
from tidegate.pipeline.plan import WasmLimits
from tidegate.pipeline.refusal import StepRefused, StepTooLate
from tidegate.pipeline.wasm_tensors import BadWasmMessage, arrays_of, message_of
from tidegate.pipeline.wasmtime_calls import EXTERN, INSTANCE, WasmtimeCalls, address_of, error_words, trap_of

FUEL_PER_S: Final = 1_000_000_000  # what a request's budget buys; a processor does about as much
_STACK_BYTES: Final = 512 * 1024
_TABLE_ELEMENTS: Final = 100_000
_LOG_LINES, _LOG_LINES_ALL, _LOG_BYTES = 8, 1000, 400  # of a call, of a worker's life, of a line
_SHOWN: Final = 200  # characters of a runtime's words
_I32, _I64 = "i32", "i64"
_WANTED: Final = {"alloc": ([_I32], [_I32]), "run": ([_I32, _I32], [_I64])}
_VALUE_WORDS: Final = 2  # of 64 bits, in a wasmtime_val_raw_t


class BadModule(Exception):
    """A file that cannot be run as a step; says why."""


@functools.cache
def _runtime() -> tuple[wasmtime.Engine, EpochTicker, WasmtimeCalls]:
    """The one of this process, made when it is first needed."""
    config = wasmtime.Config()
    config.consume_fuel = True
    config.epoch_interruption = True
    config.max_wasm_stack = _STACK_BYTES
    config.parallel_compilation = False  # a worker has the cores that it was given
    # What differs between processors, or is a way to what a step needs not.
    config.cranelift_nan_canonicalization = True
    config.wasm_relaxed_simd = False
    config.wasm_threads = False
    config.wasm_memory64 = False
    config.wasm_multi_memory = False
    # Compared bounds: a store takes 11 microseconds so, and 28 with protected pages.
    config.signals_based_traps = False
    config.memory_init_cow = False
    config.memory_reservation = 0
    config.memory_guard_size = 0
    config.memory_reservation_for_growth = 1 << 20
    engine = wasmtime.Engine(config)
    return engine, EpochTicker(engine.increment_epoch), WasmtimeCalls()


class WasmModule:
    """A compiled module. Blocks while it compiles, and while it is called; for one thread.

    Args:
        name: in errors and in the log.

    Raises:
        BadModule: it is too large, is no module, imports what it may not, or does not export what it must.
        OSError: the file cannot be read.
    """

    def __init__(self, path: Path, name: str, limits: WasmLimits) -> None:
        self._name = name
        self._limits = limits
        engine, self._ticker, self._c = _runtime()
        self._engine_at = address_of(engine.ptr())
        # The linked module owns what it calls: one that knew this object would keep itself, and its code, for ever.
        log_line = WeakMethod(self._log)

        def log(caller: wasmtime.Caller, at: int, size: int) -> None:
            if (told := log_line()) is not None:
                told(caller, at, size)

        self._pre = _linked(engine, _compiled(engine, path, limits), log)
        self._pre_at = address_of(self._pre.ptr())
        self._hurried = False  # whether a call gets less than the limits, since its budget is nearly over
        self._lines_left = 0
        self._lines_of_life = _LOG_LINES_ALL
        # What the C interface writes into, once and not for each call.
        self._instance = INSTANCE()
        self._memory, self._alloc, self._run = (EXTERN() for _ in range(3))
        self._trap = ctypes.c_void_p()
        self._values = (ctypes.c_uint64 * (2 * _VALUE_WORDS))()
        self._instance_at, self._trap_at = ctypes.addressof(self._instance), ctypes.addressof(self._trap)
        self._values_at = ctypes.addressof(self._values)
        self._exports = tuple(
            (name, len(name), ctypes.addressof(extern))
            for name, extern in ((b"memory", self._memory), (b"alloc", self._alloc), (b"run", self._run))
        )
        of = EXTERN.of.offset
        self._memory_at, self._alloc_at, self._run_at = (extern + of for _, _, extern in self._exports)
        self._try()

    def run(
        self,
        takes: Sequence[TensorSpec],
        arrays: Sequence[NDArray[Any]],
        gives: Sequence[TensorSpec],
        *,
        budget_s: float,
    ) -> list[NDArray[Any]]:
        """The outputs for these inputs, of the datatypes and ranks in `gives`.

        Args:
            budget_s: what is left of the request's; the call gets fuel and time for no more.

        Raises:
            StepRefused: the module did not do it, or did not do it right.
            StepTooLate: it did not do it in what was left of the budget.
        """
        message = message_of(takes, arrays)
        store = self._c.store_new(self._engine_at, None, None)
        try:
            context = self._begun(store, budget_s)
            given = self._called(context, message)
        finally:
            self._c.store_delete(store)
        try:
            return arrays_of(given, gives)
        except BadWasmMessage as error:
            raise StepRefused(str(error)) from error

    def _begun(self, store: int, budget_s: float) -> int:
        """Bound what the store may take, and make an instance in it; returns the store's context."""
        limits, c = self._limits, self._c
        time_s = max(0.0, min(limits.time_s, budget_s))
        fuel = max(1, min(limits.fuel, int(min(max(budget_s, 0.0), 1e6) * FUEL_PER_S)))
        self._hurried = fuel < limits.fuel or time_s < limits.time_s
        c.limit(store, limits.memory_bytes, _TABLE_ELEMENTS, 1, 1, 1)
        context: int = c.context(store)
        self._check(c.set_fuel(context, fuel), None)
        self._ticker.awake(time_s)
        c.set_deadline(context, ceil(time_s / TICK_S) + 1)
        self._lines_left = _LOG_LINES
        self._check(c.instantiate(self._pre_at, context, self._instance_at, self._trap_at), self._trap)
        for name, size, extern in self._exports:
            if not c.export(context, self._instance_at, name, size, extern):
                raise StepRefused(f"it exports no {name.decode()!r}")  # what was compiled has it
        return context

    def _called(self, context: int, message: bytes) -> bytes:
        """The message that the module gives for `message`."""
        c, values, size = self._c, self._values, len(message)
        if size >= 1 << 31:
            raise StepRefused(f"its input has {size} bytes, more than a module can address")
        values[0] = size
        self._check(c.call(context, self._alloc_at, self._values_at, 1, self._trap_at), self._trap)
        at = values[0] & 0xFFFFFFFF
        if at + size > c.memory_size(context, self._memory_at):
            raise StepRefused(f"its alloc({size}) gave {at}, which is not within its memory")
        ctypes.memmove(c.memory_at(context, self._memory_at) + at, message, size)
        values[0], values[_VALUE_WORDS] = at, size
        self._check(c.call(context, self._run_at, self._values_at, 2, self._trap_at), self._trap)
        result = values[0]
        if result == 0:
            raise StepRefused("it refused the request")
        at, size = result >> 32, result & 0xFFFFFFFF
        if size > self._limits.result_bytes:
            raise StepRefused(f"its result has {size} bytes, over the limit of {self._limits.result_bytes}")
        if at + size > c.memory_size(context, self._memory_at):
            raise StepRefused(f"its result of {size} bytes at {at} is not within its memory")
        return ctypes.string_at(c.memory_at(context, self._memory_at) + at, size)

    def _try(self) -> None:
        """Make one instance: a module that needs more memory than it gets, or traps as it begins, serves nobody."""
        store = self._c.store_new(self._engine_at, None, None)
        try:
            self._begun(store, self._limits.time_s)
        except StepRefused as error:
            raise BadModule(f"it cannot begin: {error}") from error
        finally:
            self._c.store_delete(store)

    def _check(self, error: int | None, trap: ctypes.c_void_p | None) -> None:
        """Raise StepRefused for an error or a trap of the runtime, both of which are then ours to free."""
        if error:
            raise StepRefused(_words(error_words(error)))
        if trap is None or not trap.value:
            return
        trapped, trap.value = trap_of(trap.value), None
        code = trapped.trap_code
        if self._hurried and code in (wasmtime.TrapCode.OUT_OF_FUEL, wasmtime.TrapCode.INTERRUPT):
            raise StepTooLate("it would have taken more than was left of the request's budget")
        if code is wasmtime.TrapCode.OUT_OF_FUEL:
            raise StepRefused(f"it used up its fuel, at most {self._limits.fuel}")
        if code is wasmtime.TrapCode.INTERRUPT:
            raise StepRefused(f"it took longer than it may, at most {self._limits.time_s:g} s")
        raise StepRefused(f"it trapped: {_words(code.name.lower().replace('_', ' ') if code else str(trapped))}")

    def _log(self, caller: wasmtime.Caller, at: int, size: int) -> None:
        """A line of the module's, on the worker's stderr; nothing where it said enough, or points outside."""
        if self._lines_left <= 0 or self._lines_of_life <= 0:
            return
        self._lines_left -= 1
        self._lines_of_life -= 1
        memory = caller.get("memory")
        if not isinstance(memory, wasmtime.Memory):
            return
        begin, end = at & 0xFFFFFFFF, (at & 0xFFFFFFFF) + min(size & 0xFFFFFFFF, _LOG_BYTES)
        if end > memory.data_len(caller) or end == begin:
            return
        text = bytes(memory.read(caller, begin, end)).decode(errors="replace")
        line = "".join(one if one.isprintable() else "?" for one in text)
        last = " (its last line: it said enough)" if not self._lines_of_life else ""
        print(f"step {self._name}: {line}{last}", file=sys.stderr, flush=True)

    def __repr__(self) -> str:
        return f"<WasmModule {self._name}>"


def _compiled(engine: wasmtime.Engine, path: Path, limits: WasmLimits) -> wasmtime.Module:
    size = path.stat().st_size
    if size > limits.module_bytes:
        raise BadModule(f"has {size} bytes, over the limit of {limits.module_bytes} (key 'steps.wasm_module_bytes')")
    content = path.read_bytes()
    if not content.startswith(b"\0asm"):  # the library would read the text format as well
        raise BadModule("is no WebAssembly module")
    try:
        module = wasmtime.Module(engine, content)
    except wasmtime.WasmtimeError as error:
        raise BadModule(f"is no WebAssembly module that runs here: {_words(str(error))}") from error
    _check_imports(module)
    _check_exports(module)
    return module


def _check_imports(module: wasmtime.Module) -> None:
    for one in module.imports:
        kind = one.type
        allowed = (one.module, one.name) == ("tidegate", "log") and isinstance(kind, wasmtime.FuncType)
        if not allowed or _signature(kind) != ([_I32, _I32], []):
            raise BadModule(
                f"imports {_words(f'{one.module}.{one.name}')}; all that a step may import is tidegate.log(i32, i32)"
            )


def _check_exports(module: wasmtime.Module) -> None:
    there = {one.name: one.type for one in module.exports}
    if not isinstance(there.get("memory"), wasmtime.MemoryType):
        raise BadModule("exports no memory called 'memory'")
    for name, wanted in _WANTED.items():
        kind = there.get(name)
        if not isinstance(kind, wasmtime.FuncType) or _signature(kind) != wanted:
            raise BadModule(f"exports no function {name}({', '.join(wanted[0])}) -> {wanted[1][0]}")


def _signature(kind: Any) -> tuple[list[str], list[str]]:
    return [str(one) for one in kind.params], [str(one) for one in kind.results]


def _linked(engine: wasmtime.Engine, module: wasmtime.Module, log: Any) -> wasmtime.InstancePre:
    linker = wasmtime.Linker(engine)
    of_log = wasmtime.FuncType([wasmtime.ValType.i32(), wasmtime.ValType.i32()], [])
    linker.define_func("tidegate", "log", of_log, log, access_caller=True)
    try:
        return linker.instantiate_pre(module)
    except wasmtime.WasmtimeError as error:
        raise BadModule(f"cannot be linked: {_words(str(error))}") from error


def _words(text: str) -> str:
    """A runtime's words on one line, with what a module names in them cut and escaped."""
    line = " ".join("".join(one if one.isprintable() else " " for one in text).split())
    return line if len(line) <= _SHOWN else line[: _SHOWN - 1] + "…"
