"""Affinity sends the steps of a sequence to the target that holds the state of the steps before.

A model that remembers keeps its state where the sequence was begun (`cloud_pool/core/batching/sequences.py`), so for a
sequence there is one target that can go on, and asking two would make two memories of it. So a step is asked once: it
is never hedged, moved, escalated or tried elsewhere. The first goes where placement says, the later ones where that
was. Only a first whose connection ended is sent again. A step whose target is gone fails with the reason: no other
target knows what came before. A step of which nothing is known here (another gateway began it, or this one was
restarted) is placed like any request, and a target without its state refuses it.

Mutable: what is known is bounded, by the time that the model's manifest gives to idle sequences, and by `most`: the one
that was idle for longest is forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from gateway.core.placement.ask import Ask
from gateway.core.placement.placement import Placement
from gateway.core.placement.placer import Decision
from tidegate.oip.sequence import SequenceStep
from tidegate.outcome import NothingAlive, Unreachable

MAX_SEQUENCES = 100_000


class Affinity:
    """The target of each sequence."""

    def __init__(self, most: int = MAX_SEQUENCES) -> None:
        self._most = most
        self._homes: OrderedDict[tuple[str, int | str], tuple[str, float]] = OrderedDict()  # target, and until when

    def home(self, model: str, id: int | str, now: float) -> str | None:
        """The target that remembers a sequence."""
        known = self._homes.get((model, id))
        return known[0] if known is not None and known[1] > now else None

    def answered(self, model: str, step: SequenceStep, target: str, until: float) -> None:
        """A step was answered there; it is remembered until then, or no more after its end."""
        self._homes.pop((model, step.id), None)
        if not step.end:
            self._homes[model, step.id] = target, until
            while len(self._homes) > self._most:
                self._homes.popitem(last=False)

    def placement(
        self, model: str, step: SequenceStep, placement: Placement, now: float, told: str | None = None
    ) -> Placement:
        """The placement that decides where this step goes.

        Args:
            told: the home that the client brought with it, which is younger than what is known here.
        """
        home = None if step.start else told or self.home(model, step.id, now)
        return StickyPlacer(placement, home, start=step.start)

    def __len__(self) -> int:
        return len(self._homes)

    def __repr__(self) -> str:
        return f"<Affinity of {len(self)} sequences>"


class StickyPlacer:
    """Decides for one step. `home`: the only target that will do; None where any may."""

    def __init__(self, placement: Placement, home: str | None, *, start: bool) -> None:
        self._placement = placement
        self._home = home
        self._start = start
        self._asked = False

    def decide(self, ask: Ask, now: float, exclude: Collection[str] = ()) -> Decision:
        if self._asked and not self._start:
            words = "a step of a sequence is asked once: whether the lost one counted is not known"
            return Decision(now, ask, (), None, "", Unreachable(words))
        placed = ask if self._home is None else ask._replace(home=self._home)
        decision = self._placement.decide(placed, now, exclude)
        self._asked = decision.chosen is not None  # what was refused is not sent, and may be looked at again
        if self._home is not None and isinstance(decision.refusal, NothingAlive):
            words = f"{self._home} remembers this sequence and cannot be asked now; begin it anew with sequence_start"
            return decision._replace(refusal=NothingAlive(words, retry_after_s=decision.refusal.retry_after_s))
        return decision
