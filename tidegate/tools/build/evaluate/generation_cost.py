"""Measures what a generating engine's tokens cost here: each of a prompt, and a step of one sequence and of several.

The engine is driven as its worker drives it, one step after another, with ids of chance: a transformer's time does not
depend on which tokens they are. Medians, because a machine that builds a model does other things too.

Where prompts are slow, as in bf16 on a processor that emulates it, those of several sequences are shorter: a step costs
hardly more behind long ones.
"""

from __future__ import annotations

from statistics import median
from typing import Final

from tidegate import clock
from tidegate.generate.engine import GenerativeEngine
from tidegate.generate.request import GenerateRequest
from tidegate.models.generative import GenerationCost, Generative
from tidegate.tools.build.errors import BuildError

_PROMPT: Final = 128
_LEAST_PROMPT: Final = 16
_PROMPTS_S: Final = 5.0  # that the prompts of all sequences may take together, where shorter ones make it possible
_STEPS: Final = 12
_ANSWER: Final = 1024  # tokens asked for: more than the steps bring, also beside the prompts of others
_LONGEST_S: Final = 120.0  # for one engine to be measured


def measure_generation(engine: GenerativeEngine, model: Generative, *, cache_bytes: int) -> GenerationCost:
    """The costs of one and of all of the engine's sequences. Raises BuildError: it gives no tokens."""
    alone = _Run(engine, model)
    alone.begin([0])  # the first run of a runtime allocates
    alone.end()
    prefill_s = alone.begin([1])
    steps = [(1, 1e3 * alone.step_s())]
    alone.end()
    if engine.slots > 1:
        together = _Run(engine, model, most_tokens=int(_PROMPTS_S / engine.slots * alone.prompt_tokens / prefill_s))
        together.begin(list(range(2, 2 + engine.slots)))
        steps.append((engine.slots, 1e3 * together.step_s()))
        together.end()
    return GenerationCost(
        prefill_ms=1e3 * max(0.0, prefill_s - steps[0][1] / 1e3) / alone.prompt_tokens,
        step_ms=tuple(steps),
        cache_bytes=cache_bytes,
        slots=engine.slots,
    )


class _Run:
    """Some sequences in an engine."""

    def __init__(self, engine: GenerativeEngine, model: Generative, *, most_tokens: int = _PROMPT) -> None:
        """Args: most_tokens: of each prompt; never less than `_LEAST_PROMPT` is asked for."""
        self._engine = engine
        self._model = model
        self.prompt_tokens = max(1, min(_PROMPT, max(_LEAST_PROMPT, most_tokens), model.context // 2))
        self._ids: list[int] = []
        self._counts: dict[int, int] = {}

    def begin(self, ids: list[int]) -> float:
        """Begin all, and run until each has its first token; the seconds that it took."""
        began_at = clock.now()
        self._ids, self._counts = ids, dict.fromkeys(ids, 0)
        for id in ids:
            prompt = tuple((7919 * (id + 1) * (n + 1)) % self._model.vocabulary_size for n in range(self.prompt_tokens))
            self._engine.begin(id, GenerateRequest(prompt, _ANSWER, ignore_stop=True))
        while min(self._counts.values()) == 0:
            self._step(began_at)
        return clock.now() - began_at

    def step_s(self) -> float:
        """The median seconds in which each sequence gets one more token."""
        took = []
        for _ in range(_STEPS):
            began_at, wanted = clock.now(), {id: count + 1 for id, count in self._counts.items()}
            while any(self._counts[id] < wanted[id] for id in self._ids):
                self._step(began_at)
            took.append(clock.now() - began_at)
        return median(took)

    def end(self) -> None:
        for id in self._ids:
            self._engine.cancel(id)

    def _step(self, began_at: float) -> None:
        # The one that has least comes first: an engine whose batch is smaller takes them in turns.
        for progress in self._engine.step(sorted(self._ids, key=self._counts.__getitem__)):
            if progress.error or progress.finished is not None:
                raise BuildError(f"the engine ended a sequence that it should go on with: {progress}")
            if progress.batch is not None and progress.id in self._counts:
                self._counts[progress.id] += len(progress.batch.ids)
        if clock.now() - began_at > _LONGEST_S:
            raise BuildError(f"the engine gave no token within {_LONGEST_S:g} s")
