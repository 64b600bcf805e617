"""An engine that only takes time: it waits as long as a model would compute, and uses no CPU meanwhile.

For trying out routing, deadlines and faults without models: eight devices and a pool at work fit on two cores, since
each of them sleeps where it would compute. Everything around it is as in life: the worker process, warm-up that
measures, queues, batches, load reports. It is declared wherever a model is described (`engine: paced` in the manifest,
platform `tidegate_paced`, `paced` in offers and in the gateway's state), and its answers are zeros of the right shape,
so they cannot be mistaken for a model's.

The artefact is a short YAML (or JSON) file, which `tidegate model paced` writes:

    cost_ms      points of (work units, milliseconds) of one call, as a scenario of the simulator has them
    feature      tokens, pixels, items or bytes: how work is counted, padding included
    input        the input that it is counted on
    inputs       the shape of each input, in lengths and names of axes, for the shapes of the outputs
    outputs      as in the manifest; without them each output is one FP32 a row
    noise_sigma  deviation of the logarithm of a call's time; its stream of chance begins anew with each load
    seed         of that chance

    a call takes  table(units) × e^(noise_sigma · N(0, 1)) × slow        `slow` is the process's own (`paced_slow`)

The wait ends at an instant and not after a duration, so what the call itself costs is part of it. The kernel wakes the
thread some 0.05 ms late on an idle machine (the timer's slack is set to its least). Where the whole process stood
still (SIGSTOP, a frozen machine), a computation would have stood still as well: time that is lost in one piece of more
than `_STANDSTILL_S` is added. A process that is stopped and continued in turns is therefore a slower device.

It can be wrong where cores are short: a real engine would then be slower, and this one is not.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from math import exp, isfinite
from pathlib import Path
from random import Random
from typing import Any, Literal

import msgspec
import numpy as np
import yaml
from numpy.typing import NDArray

from tidegate import clock
from tidegate.engines.errors import EngineError
from tidegate.estimate.cost_table import CostTable
from tidegate.models.manifest import Feature, TensorSpec
from tidegate.types import Datatype

_LOOK_EVERY_S = 0.1  # whether the process stood still; ten wake-ups a second are nothing
_STANDSTILL_S = 0.05  # a busy machine wakes a thread late by a few milliseconds, hardly by more
_PR_SET_TIMERSLACK = 29
_WAY_OUT = "`tidegate model paced` writes such a file"

Arrays = Mapping[str, NDArray[Any]]


class PacedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The contents of the artefact."""

    input: str
    inputs: dict[str, tuple[int | str, ...]]
    cost_ms: tuple[tuple[float, float], ...]
    feature: Feature = "tokens"
    outputs: tuple[TensorSpec, ...] = ()
    noise_sigma: float = 0.0
    seed: int = 1
    schema: Literal[1] = 1


class PacedEngine:
    """One artefact, paced.

    Args:
        outputs: the manifest's output names.
        slow: how many times slower this process is than the artefact says.

    Raises:
        EngineError: the artefact is not a pace; the message names the key.
    """

    def __init__(self, artefact: Path, *, outputs: tuple[str, ...], slow: float = 1.0) -> None:
        self.artefact = artefact
        self.pace = read_pace(artefact)
        self.slow = slow
        self._table = CostTable(self.pace.cost_ms)
        self._random = Random(self.pace.seed)
        by_name = {spec.name: spec for spec in self.pace.outputs}
        rows = self.pace.inputs[self.pace.input][:1]
        self._outputs = [by_name.get(name) or TensorSpec(name, Datatype.FP32, rows) for name in outputs]
        wake_in_time()

    def infer(self, inputs: Arrays) -> dict[str, NDArray[Any]]:
        """Zeros for all outputs, after the time that the table has for these inputs. Blocks. Raises EngineError."""
        began_at = clock.now()
        lengths = self._lengths(inputs)
        outputs = {spec.name: self._zeros(spec, lengths) for spec in self._outputs}
        stay_until(began_at + self.draw_seconds(inputs[self.pace.input]))
        return outputs

    def draw_seconds(self, counted: NDArray[Any]) -> float:
        """The duration of the next call on this input, with noise; each call advances the random stream."""
        luck = self._random.gauss(0.0, self.pace.noise_sigma) if self.pace.noise_sigma else 0.0
        return self.slow * 1e-3 * self._table.seconds_for(_units(self.pace.feature, counted)) * exp(luck)

    def _lengths(self, inputs: Arrays) -> dict[str, int]:
        """The length of each named axis, as in these inputs."""
        lengths: dict[str, int] = {}
        for name, shape in self.pace.inputs.items():
            array = inputs.get(name)
            if array is None:
                if name == self.pace.input:
                    raise EngineError(f"{self.artefact.name} takes {name}, but {', '.join(inputs) or 'nothing'} came")
                continue
            if array.ndim != len(shape):
                raise EngineError(f"{self.artefact.name} takes {name} as {list(shape)}, not {list(array.shape)}")
            lengths |= {axis: n for axis, n in zip(shape, array.shape, strict=True) if isinstance(axis, str)}
        return lengths

    def _zeros(self, spec: TensorSpec, lengths: Mapping[str, int]) -> NDArray[Any]:
        shape = tuple(lengths.get(entry, 1) if isinstance(entry, str) else entry for entry in spec.shape)
        if spec.datatype is Datatype.BYTES:
            return np.full(shape, b"", dtype=object)
        return np.zeros(shape, dtype="<u2" if spec.datatype is Datatype.BF16 else spec.datatype.numpy_name)

    def __repr__(self) -> str:
        return f"<PacedEngine {self.artefact.name} {self.slow:g} times slower than {self._table!r}>"


def read_pace(path: Path) -> PacedModel:
    """The contents of the file. Raises EngineError, naming the file, the key and the way out."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        pace = msgspec.convert(raw, PacedModel)
    except FileNotFoundError as error:
        raise EngineError(f"{path}: there is no such artefact") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise EngineError(f"{path}: is no readable YAML: {error}; {_WAY_OUT}") from error
    except msgspec.ValidationError as error:
        raise EngineError(f"{path}: {in_words(str(error))}; {_WAY_OUT}") from error
    for key, why in _misfits(pace):
        raise EngineError(f"{path}: key {key!r}: {why}; {_WAY_OUT}")
    return pace


def in_words(message: str) -> str:
    """msgspec's "… - at `$.cost_ms[0]`" with the key in front."""
    what, _, where = message.partition(" - at `$")
    key = where.strip(".`")
    return f"key {key!r}: {what}" if key else what


def _misfits(pace: PacedModel) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    try:
        CostTable(pace.cost_ms)
    except ValueError as error:
        found.append(("cost_ms", str(error)))
    if not (isfinite(pace.noise_sigma) and 0.0 <= pace.noise_sigma <= 2.0):
        found.append(("noise_sigma", f"must be from 0 to 2, not {pace.noise_sigma:g}"))
    if pace.input not in pace.inputs:
        found.append(("input", f"{pace.input!r} is not one of `inputs` ({', '.join(pace.inputs) or 'none'})"))
    axes = {entry for shape in pace.inputs.values() for entry in shape}
    for spec in pace.outputs:
        if strange := [entry for entry in spec.shape if isinstance(entry, str) and entry not in axes]:
            found.append((f"outputs.{spec.name}.shape", f"{strange[0]!r} is not an axis of any input"))
    return found


def _units(feature: Feature, counted: NDArray[Any]) -> float:
    match feature:
        case "items":
            return float(counted.shape[0]) if counted.ndim else 1.0
        case "bytes":
            return float(counted.nbytes if counted.dtype != object else sum(4 + len(one) for one in counted.flat))
        case _:
            return float(counted.size)


def stay_until(instant: float) -> None:
    """Block until then, and longer where the process stood still."""
    while (left_s := instant - clock.now()) > 0.0:
        look_at = clock.now() + min(left_s, _LOOK_EVERY_S)
        clock.block_until(look_at)
        lost_s = clock.now() - look_at
        if lost_s > _STANDSTILL_S:
            instant += lost_s


def wake_in_time() -> None:
    """Linux gathers wake-ups of a thread within 50 µs to save power; this one wants each of its own."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
