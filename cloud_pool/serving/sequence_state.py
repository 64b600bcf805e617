"""The sequence states keep the state of every live sequence of the pool's models, and run its steps one by one.

`cloud_pool/core/batching/sequences.py` decides; this adds what needs a loop: a lock for each sequence, so that its
steps go one after another, and a timer that sweeps when the next one has been idle for long enough, whether a
request comes or not.

A model without `sequence` in its manifest remembers nothing, and a sequence's parameters are ignored, as Triton does.
A request of a model with it that belongs to no sequence is one step from zeros, or from the state that it brings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from cloud_pool.core.batching.sequences import Sequence, Sequences, State
from tidegate import clock
from tidegate.models.manifest import Manifest, Stateful, TensorSpec
from tidegate.oip.sequence import SequenceStep, sequence_of
from tidegate.outcome import InvalidRequest
from tidegate.types import Parameters

Arrays = dict[str, NDArray[Any]]
Outputs = Mapping[str, NDArray[Any]]


class SequenceStates:
    """Mutable: `remembering` runs a request with its sequence's state. `close` it at the end."""

    def __init__(self) -> None:
        self._sequences: dict[str, Sequences] = {}
        self._turns: WeakKeyDictionary[Sequence, asyncio.Lock] = WeakKeyDictionary()
        self._timers: dict[str, asyncio.TimerHandle] = {}

    async def remembering(
        self, manifest: Manifest, parameters: Parameters, arrays: Arrays, run: Callable[[Arrays], Awaitable[Any]]
    ) -> Any:
        """What `run` gives for the arrays with the state in them; its `outputs` leave the next state.

        Raises:
            InvalidRequest, Overloaded: as `Sequences.begin` says; or a caller's state is of a wrong shape.
        """
        kept = manifest.sequence
        if kept is None:
            return await run(arrays)
        step = sequence_of(parameters)
        if step is None:
            return await run(_zeros(manifest, kept, arrays) | arrays)
        if given := sorted(arrays.keys() & kept.state_inputs.keys()):
            raise InvalidRequest(
                f"input {given[0]!r} is the sequence's own state; leave it out, or leave out sequence_id"
            )
        return await self._step(manifest, kept, step, arrays, run)

    def live(self, model: str) -> int:
        """How many sequences of a model there are."""
        return len(self._sequences[model]) if model in self._sequences else 0

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()

    async def _step(
        self,
        manifest: Manifest,
        kept: Stateful,
        step: SequenceStep,
        arrays: Arrays,
        run: Callable[[Arrays], Awaitable[Any]],
    ) -> Any:
        sequences = self._of(manifest, kept)
        sequence = sequences.begin(step.id, start=step.start, now=clock.now())
        state: State | None = None
        try:
            async with self._turns.setdefault(sequence, asyncio.Lock()):
                if not sequences.still(sequence) or (not step.start and sequence.state is None):
                    raise InvalidRequest(f"sequence {step.id!r} of {manifest.name!r} was over before this step's turn")
                fresh = _zeros(manifest, kept, arrays)
                _check_rows(sequence, fresh)
                answer = await run(arrays | (fresh if sequence.state is None else dict(sequence.state)))
                state = {name: answer.outputs[output].copy() for name, output in kept.state_inputs.items()}
                sequences.over(sequence, clock.now(), state=state, end=step.end)
                return answer
        finally:
            if state is None:
                sequences.over(sequence, clock.now(), state=None, end=step.end)
            self._arm(manifest.name, sequences)

    def _of(self, manifest: Manifest, kept: Stateful) -> Sequences:
        if manifest.name not in self._sequences:
            made = Sequences(manifest.name, ttl_s=kept.ttl_s, max_sequences=kept.max_sequences)
            self._sequences[manifest.name] = made
        return self._sequences[manifest.name]

    def _arm(self, model: str, sequences: Sequences) -> None:
        if (timer := self._timers.pop(model, None)) is not None:
            timer.cancel()
        if (sweep_at := sequences.next_sweep_at) is not None:
            self._timers[model] = asyncio.get_running_loop().call_at(sweep_at, self._sweep, model, sequences)

    def _sweep(self, model: str, sequences: Sequences) -> None:
        sequences.sweep(clock.now())
        self._arm(model, sequences)

    def __repr__(self) -> str:
        return f"<SequenceStates {', '.join(map(repr, self._sequences.values())) or 'of nothing'}>"


def _zeros(manifest: Manifest, kept: Stateful, arrays: Arrays) -> Arrays:
    """The state before the first step, with the axes as long as the request has them."""
    lengths = {
        axis: length
        for spec in manifest.inputs
        if spec.name in arrays
        for axis, length in zip(spec.shape, arrays[spec.name].shape, strict=True)
        if isinstance(axis, str)
    }
    states = [spec for spec in manifest.inputs if spec.name in kept.state_inputs]
    return {spec.name: np.zeros(_shape(spec, lengths, manifest), spec.datatype.numpy_name) for spec in states}


def _shape(spec: TensorSpec, lengths: Mapping[str, int], manifest: Manifest) -> tuple[int, ...]:
    return tuple(
        entry if isinstance(entry, int) else lengths.get(entry, manifest.axes[entry].min) for entry in spec.shape
    )


def _check_rows(sequence: Sequence, fresh: Arrays) -> None:
    """A state has as many rows as the request that began it. Raises InvalidRequest."""
    if sequence.state is None:
        return
    for name, array in fresh.items():
        if sequence.state[name].shape != array.shape:
            raise InvalidRequest(
                f"sequence {sequence.id!r} keeps {name!r} as {list(sequence.state[name].shape)}, but this step would "
                f"need {list(array.shape)}; all steps of a sequence have the same rows"
            )
