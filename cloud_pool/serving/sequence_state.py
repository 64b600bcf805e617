"""The sequence states keep the state of every live sequence of the pool's models, and run its steps one by one.

`cloud_pool/core/batching/sequences.py` decides; this adds what needs a loop: a lock for each sequence, so that its
steps go one after another, and a timer that sweeps when the next one has been idle for long enough, whether a
request comes or not.

Sequences belong to one loaded model: a version, and each reload of it, has its own, since its state may mean something
else or be named otherwise. `drop` forgets them when that model has ended; a step that comes for the one before finds
its sequence unknown at the one that took over.

A model without `sequence` in its manifest remembers nothing, and a sequence's parameters are ignored, as Triton does.
A request of a model with it that belongs to no sequence is one step from zeros, or from the state that it brings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping
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
    """Mutable: `remembering` runs a request with its sequence's state; `drop` ends a model's, and `close` all."""

    def __init__(self) -> None:
        self._sequences: dict[Hashable, Sequences] = {}  # by loaded model
        self._turns: WeakKeyDictionary[Sequence, asyncio.Lock] = WeakKeyDictionary()
        self._timers: dict[Hashable, asyncio.TimerHandle] = {}

    async def remembering(
        self,
        loaded: Hashable,
        manifest: Manifest,
        parameters: Parameters,
        arrays: Arrays,
        run: Callable[[Arrays], Awaitable[Any]],
    ) -> Any:
        """What `run` gives for the arrays with the state in them; its `outputs` leave the next state.

        Args:
            loaded: the loaded model whose sequences are meant; until it is dropped they are kept.

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
        return await self._step(loaded, manifest, kept, step, arrays, run)

    def live(self, model: str) -> int:
        """How many sequences there are of a model of this name, of all that are loaded."""
        return sum(len(one) for one in self._sequences.values() if one.model == model)

    def drop(self, loaded: Hashable) -> None:
        """Forget the sequences of a model that has ended."""
        self._sequences.pop(loaded, None)
        if (timer := self._timers.pop(loaded, None)) is not None:
            timer.cancel()

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()

    async def _step(
        self,
        loaded: Hashable,
        manifest: Manifest,
        kept: Stateful,
        step: SequenceStep,
        arrays: Arrays,
        run: Callable[[Arrays], Awaitable[Any]],
    ) -> Any:
        sequences = self._of(loaded, manifest, kept)
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
            self._arm(loaded, sequences)

    def _of(self, loaded: Hashable, manifest: Manifest, kept: Stateful) -> Sequences:
        if loaded not in self._sequences:
            made = Sequences(manifest.name, ttl_s=kept.ttl_s, max_sequences=kept.max_sequences)
            self._sequences[loaded] = made
        return self._sequences[loaded]

    def _arm(self, loaded: Hashable, sequences: Sequences) -> None:
        if (timer := self._timers.pop(loaded, None)) is not None:
            timer.cancel()
        if loaded in self._sequences and (sweep_at := sequences.next_sweep_at) is not None:
            self._timers[loaded] = asyncio.get_running_loop().call_at(sweep_at, self._sweep, loaded, sequences)

    def _sweep(self, loaded: Hashable, sequences: Sequences) -> None:
        sequences.sweep(clock.now())
        self._arm(loaded, sequences)

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
