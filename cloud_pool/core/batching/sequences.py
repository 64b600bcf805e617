"""Sequences keep the model state between the ordered steps of one conversation or stream.

    unknown ──start──▶ live ⟲ step ──end──▶ unknown          live ──idle for ttl_s──▶ unknown

A step takes the state that the step before left, and leaves its own; the outputs that the manifest names as next states
are the inputs of the next step. The state is held here, beside the workers and not in one: a worker that dies, hangs or
is recycled takes no sequence with it, and any worker may compute the next step. The price is that the state travels
with each step; a state too large for that (an attention cache) belongs in an engine of its own.

Steps of one sequence are computed in the order in which they came, never side by side. A step counts when its outputs
are there: one that fails, is refused or is cancelled leaves the sequence as it was before, so it may be sent again.

    without start, and unknown     refused: it ended, was idle for too long, or began elsewhere
    start of a live one            refused: two callers with one number would share a state
    start over `max_sequences`     refused as overload, until when one should be free

Nothing leaks when a caller vanishes: a start that fails is forgotten at once, every other sequence after `ttl_s` of
idleness, by a sweep whose instant is known (`next_sweep_at`).

Invariants: at most `max_sequences` are live; one that has a step waiting or running is never swept; each `begin` is
followed by one `over`.

Source: Triton's sequence batcher with implicit state management; Open Inference Protocol, sequence extension.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from numpy.typing import NDArray

from tidegate.outcome import InvalidRequest, Overloaded

MAX_PENDING: Final = 64  # steps of one sequence that may wait for each other
_SOONEST_S: Final = 0.05

State = Mapping[str, NDArray[Any]]
SequenceId = int | str


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """One live sequence. `state` is what the last step left; None before the first step."""

    id: SequenceId
    touched_at: float
    state: State | None = None
    pending: int = 0
    steps: int = 0


class Sequences:
    """Mutable: all sequences of one loaded model. `begin` a step, then `over` it; `sweep` when it is time.

    Args:
        model: its name, for error messages.
        ttl_s: how long an idle sequence is kept.
        max_sequences: how many may be live at a time.
    """

    def __init__(self, model: str, *, ttl_s: float, max_sequences: int) -> None:
        self.model = model
        self._ttl_s = ttl_s
        self._most = max_sequences
        self._live: dict[SequenceId, Sequence] = {}

    def begin(self, id: SequenceId, *, start: bool, now: float) -> Sequence:
        """Register a step. The sequence's state is read when the step's turn has come.

        Raises:
            InvalidRequest: the sequence is unknown and the step does not start it, or it starts a live one.
            Overloaded: there are too many sequences, or too many steps of this one.
        """
        self.sweep(now)
        sequence = self._live.get(id)
        if sequence is None:
            sequence = self._started(id, now) if start else self._unknown(id)
        elif start:
            raise InvalidRequest(
                f"sequence {id!r} of {self.model!r} is live already; end it first, or take another sequence_id"
            )
        if sequence.pending >= MAX_PENDING:
            raise Overloaded(f"{MAX_PENDING} steps of sequence {id!r} wait already", retry_after_s=_SOONEST_S)
        sequence.pending += 1
        return sequence

    def over(self, sequence: Sequence, now: float, *, state: State | None, end: bool) -> None:
        """End a step: with the state that it left, or with None when it failed."""
        sequence.pending -= 1
        sequence.touched_at = now
        if state is not None:
            sequence.state, sequence.steps = state, sequence.steps + 1
        never_was = sequence.steps == 0 and sequence.pending == 0
        if (never_was or (end and state is not None)) and self._live.get(sequence.id) is sequence:
            del self._live[sequence.id]

    def still(self, sequence: Sequence) -> bool:
        """Whether the sequence is live: a step that waited may find that the step before it was the last."""
        return self._live.get(sequence.id) is sequence

    def sweep(self, now: float) -> int:
        """Forget sequences that were idle for too long; how many."""
        idle = [one.id for one in self._live.values() if one.pending == 0 and one.touched_at + self._ttl_s <= now]
        for id in idle:
            del self._live[id]
        return len(idle)

    @property
    def next_sweep_at(self) -> float | None:
        """When the next idle sequence will have been idle for too long."""
        idle = [one.touched_at for one in self._live.values() if one.pending == 0]
        return min(idle) + self._ttl_s if idle else None

    def _started(self, id: SequenceId, now: float) -> Sequence:
        if len(self._live) >= self._most:
            sweep_at = self.next_sweep_at
            wait_s = self._ttl_s if sweep_at is None else max(_SOONEST_S, sweep_at - now)
            raise Overloaded(
                f"{self._most} sequences of {self.model!r} are live, and more may not be (max_sequences)",
                retry_after_s=wait_s,
            )
        sequence = self._live[id] = Sequence(id, now)
        return sequence

    def _unknown(self, id: SequenceId) -> Sequence:
        raise InvalidRequest(
            f"sequence {id!r} of {self.model!r} is not known here: it was not started, has ended, was idle for more "
            f"than {self._ttl_s:g} s, the pool was restarted, or the model loaded anew; begin with sequence_start"
        )

    def __len__(self) -> int:
        return len(self._live)

    def __repr__(self) -> str:
        return f"<Sequences of {self.model}: {len(self)} of {self._most} live>"
