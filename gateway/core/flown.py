"""What is remembered of a finished request, so that it can be explained when somebody asks: references and numbers.

Whoever performs a request notes what happens as it happens (`Note`): one small tuple an event, no text. Formatting
belongs to `gateway/explanation.py`, which runs when an operator looks. Memory is bounded: the last so many requests,
and of a large fleet only some candidates, the chosen one always. Nothing here may hold on to a request's tensors:
errors are kept as their words, since an exception that was raised keeps every frame that it passed through.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import Final, Literal, NamedTuple

from gateway.core.placement import Candidate, Decision
from gateway.core.request import Answer, RequestMachine

MOST_CANDIDATES: Final = 64

What = Literal["look", "launched", "accepted", "answered", "failed", "cancelled"]


class Note(NamedTuple):
    """Something that happened to a request. What goes with it depends on `what`:

    look        `at` is when a hedge will be thought of, if there is no answer by then
    launched    `candidate`
    accepted    `seconds`: until the target will be done, as it says
    answered    `stages`, `seconds`: the link's share, and `confidence` where the model judges itself
    failed      `words`
    cancelled   nothing: nobody waits for that attempt any more
    """

    at: float
    what: What
    attempt: int
    candidate: Candidate | None = None
    seconds: float = 0.0
    stages: Mapping[str, float] | None = None
    words: str = ""
    confidence: float | None = None


class Flown(NamedTuple):
    """One finished request. `decision` is the first one, without the error that it may have ended in."""

    number: int  # counts this gateway's requests: what to ask for where the caller gave no id
    request_id: str
    arrived_at: float
    decision: Decision | None
    reasons: tuple[str, ...]  # by attempt: why it was launched
    notes: tuple[Note, ...]
    end: Answer | str  # or the error in words
    elapsed_s: float


class Memory:
    """Mutable: the last `most` requests, oldest first."""

    def __init__(self, most: int) -> None:
        self._kept: deque[Flown] = deque(maxlen=most)
        self._numbers = count(1)

    def add(
        self,
        request_id: str,
        arrived_at: float,
        machine: RequestMachine,
        notes: Iterable[Note],
        end: Answer | str,
        elapsed_s: float,
    ) -> None:
        decision, reasons = remembered(machine.decision), tuple(machine.reasons)
        number = next(self._numbers)
        self._kept.append(Flown(number, request_id, arrived_at, decision, reasons, tuple(notes), end, elapsed_s))

    def __iter__(self) -> Iterator[Flown]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def __repr__(self) -> str:
        return f"<Memory of {len(self._kept)} requests>"


def remembered(decision: Decision | None) -> Decision | None:
    """The decision as it may be kept: without its error, and without most of ten thousand candidates."""
    if decision is None:
        return None
    if decision.refusal is not None:
        decision = decision._replace(refusal=None)
    if len(decision.candidates) <= MOST_CANDIDATES:
        return decision
    kept = [place for place, one in enumerate(decision.judged) if one is not None][:MOST_CANDIDATES]
    kept = kept or list(range(MOST_CANDIDATES))
    chosen = decision.chosen
    if chosen is not None:
        same = (place for place, one in enumerate(decision.candidates) if one.offered is chosen.offered)
        kept = sorted({*kept, *same})
    judged = [decision.judged[place] for place in kept] if decision.judged else ()
    return decision._replace(candidates=tuple([decision.candidates[place] for place in kept]), judged=judged)
