"""Modules in their sandbox: what the docs' ones do, and what hostile ones can not."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.models.pipelines import wat_of_the_docs
from tidegate.models.manifest import Axis, TensorSpec
from tidegate.pipeline.plan import WasmLimits
from tidegate.pipeline.refusal import StepRefused, StepTooLate
from tidegate.types import Datatype

wasmtime = pytest.importorskip("wasmtime")
from tidegate.pipeline.wasm_module import BadModule, WasmModule  # noqa: E402

LIMITS = WasmLimits(fuel=20_000_000, memory_bytes=1 << 20, time_s=0.2, result_bytes=4096, module_bytes=8192)
AXES = {"batch": Axis(1, 8)}
SCORES = TensorSpec("scores", Datatype.FP32, ("batch", 2))
TEXT = TensorSpec("text", Datatype.BYTES, ("batch",))
Load = Callable[..., WasmModule]

SHELL = """
(module
  (import "tidegate" "log" (func $log (param i32 i32)))
  (memory (export "memory") 1)
  (data (i32.const 16) "a line\\n\\1b[31m of %s")
  (global $seen (mut i32) (i32.const 0))
  (func $deep (param i32) (result i32) (i32.add (call $deep (local.get 0)) (i32.const 1)))
  (func (export "alloc") (param $size i32) (result i32) ALLOC)
  (func (export "run") (param $at i32) (param $size i32) (result i64) RUN))
"""
SAME = "(i64.or (i64.shl (i64.extend_i32_u (local.get $at)) (i64.const 32)) (i64.extend_i32_u (local.get $size)))"


def shell(run: str = SAME, alloc: str = "(i32.const 1024)") -> str:
    return SHELL.replace("ALLOC", alloc).replace("RUN", run)


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def loaded(wat: str, limits: WasmLimits = LIMITS) -> WasmModule:
        path = tmp_path / "step.wasm"
        path.write_bytes(wasmtime.wat2wasm(wat))
        return WasmModule(path, "step.wasm", limits)

    return loaded


def ran(module: WasmModule, array: NDArray[Any], spec: TensorSpec = SCORES, *, budget_s: float = 10.0) -> NDArray[Any]:
    (found,) = module.run([spec], [array], [spec], budget_s=budget_s)
    return found


def test_a_module_that_nobody_holds_any_more_is_freed_with_its_code(load: Load) -> None:
    module = load(shell())
    ran(module, scores((1.0, 2.0)))
    left = ref(module)
    gc.disable()
    try:
        del module
        assert left() is None
    finally:
        gc.enable()


def scores(*rows: tuple[float, float]) -> NDArray[Any]:
    return np.array(rows, np.float32)


def test_the_docs_modules_clip_scores_and_redact_texts(load: Load) -> None:
    wat = wat_of_the_docs()
    clipped = ran(load(wat["clip"]), scores((5.0, 0.5), (-7.0, -0.25)))
    np.testing.assert_array_equal(clipped, scores((1.0, 0.5), (-1.0, -0.25)))
    text = np.array([b"call 0171-555", b"", "höhe 3".encode()], object)
    redacted = ran(load(wat["redact"]), text, TEXT)
    assert redacted.tolist() == [b"call ****-***", b"", "höhe *".encode()]


def test_a_message_larger_than_its_memory_makes_the_docs_modules_grow(load: Load) -> None:
    text = np.array([b"7" * 300_000], object)
    module = load(wat_of_the_docs()["redact"], WasmLimits(200_000_000, 1 << 20, 1.0, 1 << 20, 8192))
    assert ran(module, text, TEXT)[0] == b"*" * 300_000


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ("(loop $go (br $go)) (i64.const 0)", "it used up its fuel|it took longer than it may"),
        ("(loop $go (memory.fill (i32.const 0) (i32.const 1) (i32.const 65536)) (br $go)) (i64.const 0)", "it used up"),
        ("(unreachable)", "it trapped: unreachable"),
        ("(drop (call $deep (i32.const 1))) (i64.const 0)", "it trapped: stack overflow"),
        ("(i32.store (i32.const -4) (i32.const 1)) (i64.const 0)", "it trapped: memory out of bounds"),
        ("(drop (i32.div_u (i32.const 1) (i32.const 0))) (i64.const 0)", "it trapped: integer division by zero"),
        ("(i64.const 0)", "it refused the request"),
        ("(i64.const -1)", "its result has 4294967295 bytes, over the limit of 4096"),
        ("(i64.const 0xfffffff000000040)", "its result of 64 bytes at 4294967280 is not within its memory"),
        ("(i64.const 4)", "it has 4 bytes, fewer than a message begins with"),
        ("(i64.const 64)", "it gave 0 tensors, not 1"),
        (f"(i32.store offset=8 (local.get $at) (i32.const 12)) {SAME}", "'scores' has datatype 12, not 11"),
        (
            f"(i64.store offset=24 (local.get $at) (i64.const -1)) {SAME}",
            r"'scores' of shape \[18446744073709551615, 2\]",
        ),
        (f"(i64.store offset=32 (local.get $at) (i64.const 1)) {SAME}", r"'scores' of shape \[1, 1\] has 8 bytes"),
        (f"(i64.store offset=16 (local.get $at) (i64.const 1)) {SAME}", "follow its last tensor|has 1 bytes"),
        (f"(i64.store offset=16 (local.get $at) (i64.const -8)) {SAME}", "it ends within 'scores'"),
        # growing to 4 GiB fails in the module, which then reads where it has nothing
        (
            "(drop (i32.load (i32.mul (memory.grow (i32.const 65535)) (i32.const 65536)))) (i64.const 0)",
            "it trapped: memory out of bounds",
        ),
    ],
)
def test_a_hostile_module_is_its_callers_error(load: Load, run: str, words: str) -> None:
    module = load(shell(run))
    with pytest.raises(StepRefused, match=words):
        ran(module, scores((1.0, 2.0)))
    with pytest.raises(StepRefused, match=words):  # and the next call is a call like the first
        ran(module, scores((1.0, 2.0)))


@pytest.mark.parametrize("alloc", ["(i32.const -8)", "(i32.const 65535)"])
def test_an_alloc_outside_of_the_memory_is_refused(load: Load, alloc: str) -> None:
    with pytest.raises(StepRefused, match=r"alloc\(\d+\) gave \d+, which is not within its memory"):
        ran(load(shell(alloc=alloc)), scores((1.0, 2.0)))


def test_a_call_gets_no_more_fuel_than_its_requests_budget_buys(load: Load) -> None:
    count = "(local $n i32) (loop $go (local.set $n (i32.add (local.get $n) (i32.const 1))) "
    module = load(shell(f"{count} (br_if $go (i32.lt_u (local.get $n) (i32.const 1000000)))) {SAME}"))
    ran(module, scores((1.0, 2.0)))
    with pytest.raises(StepTooLate, match="more than was left of the request's budget"):
        ran(module, scores((1.0, 2.0)), budget_s=0.0005)


def test_nothing_of_a_call_is_there_for_the_next(load: Load) -> None:
    # It gives the first number that was left where inputs never are, and leaves there what it got; so for a global.
    keep = """
      (if (i32.or (global.get $seen) (i32.load (i32.const 60000))) (then (unreachable)))
      (global.set $seen (i32.const 1))
      (i32.store (i32.const 60000) (i32.load offset=40 (local.get $at)))
    """
    module = load(shell(f"{keep} {SAME}"))
    for _ in range(3):
        ran(module, scores((1.0, 2.0)))


def test_equal_requests_have_equal_answers_nan_and_all(load: Load) -> None:
    module = load(shell(f"(f32.store offset=40 (local.get $at) (f32.div (f32.const 0) (f32.const 0))) {SAME}"))
    once, again = (ran(module, scores((1.0, 2.0))).tobytes() for _ in range(2))
    assert once == again == np.array([np.nan, 2.0], np.float32).tobytes()


def test_it_may_say_little_and_nothing_that_a_terminal_obeys(load: Load, capfd: pytest.CaptureFixture[str]) -> None:
    talk = "(local $n i32) (loop $go (call $log (i32.const 16) (i32.const 18)) (call $log (i32.const -1) (i32.const 9))"
    talk += (
        "(local.set $n (i32.add (local.get $n) (i32.const 1))) (br_if $go (i32.lt_u (local.get $n) (i32.const 99))))"
    )
    ran(load(shell(f"{talk} {SAME}")), scores((1.0, 2.0)))
    said = capfd.readouterr().err.splitlines()
    assert said == ["step step.wasm: a line??[31m of %s"] * 4  # every second of the eight points outside


REFUSED = {
    "is no WebAssembly module": b"(module)",
    "is no WebAssembly module that runs here": b"\0asm\1\0\0\0\xff\xff",
    "has 8193 bytes, over the limit of 8192": b"\0asm" + bytes(8189),
    "exports no memory called 'memory'": "(module)",
    "exports no function alloc": '(module (memory (export "memory") 1))',
    "exports no function run": shell().replace('(export "run")', '(export "ran")'),
    "imports wasi_snapshot_preview1.clock_time_get": shell().replace(
        '"tidegate" "log"', '"wasi_snapshot_preview1" "clock_time_get"'
    ),
    "all that a step may import": shell().replace("$log (param i32 i32)", "$log (param i32 i64)"),
    "it cannot begin: .*memory": shell().replace('(memory (export "memory") 1)', '(memory (export "memory") 65536)'),
    "it cannot begin: it trapped: unreachable": shell().replace("(global", "(func $s unreachable) (start $s) (global"),
    "it cannot begin: it used up|it cannot begin: it took": shell().replace(
        "(global", "(func $s (loop $go (br $go))) (start $s) (global"
    ),
    "that runs here: .*memor": shell().replace('(memory (export "memory") 1)', '(memory (export "memory") i64 1)'),
}


@pytest.mark.parametrize("words", list(REFUSED))
def test_what_is_no_step_is_not_loaded(tmp_path: Path, words: str) -> None:
    content = REFUSED[words]
    path = tmp_path / "step.wasm"
    path.write_bytes(content if isinstance(content, bytes) else wasmtime.wat2wasm(content))
    with pytest.raises(BadModule, match=words):
        WasmModule(path, "step.wasm", LIMITS)
