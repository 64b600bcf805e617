"""The warm-up of a generating engine: a few short generations, whose times are the first cost points.

    a short prompt, with one token and with `_TOKENS`     → what a step takes
    a longer prompt, with one token                       → what a token of a prompt takes

Times are the engine's own (`Usage`), by the work that a request of these tokens counts as. What a batch of several
sequences adds is learned from real calls.
"""

from __future__ import annotations

from typing import Final, Protocol

from tidegate import clock
from tidegate.generate.request import GenerateRequest
from tidegate.generate.usage import Generated
from tidegate.models.generative import Generative
from tidegate.models.manifest import Manifest
from tidegate.models.work import generated_units
from tidegate.token_sink import TokenSink
from tidegate.workers.generation.silence import FEWEST_STEPS

_SHORT: Final = 8
_LONG: Final = 128
_TOKENS: Final = FEWEST_STEPS
_LEAST_S: Final = 1e-6
_INTERVAL_S: Final = 0.001  # nothing else runs
GenerationPoints = tuple[tuple[float, float], ...]


class SequenceComputer(Protocol):
    """The part of a WorkerProcess that is needed here."""

    async def generate(
        self,
        key: str,
        request: GenerateRequest,
        sink: TokenSink | None,
        *,
        token_interval_s: float,
        first_token_s: float | None = None,
    ) -> Generated: ...


async def measure_generation(
    worker: SequenceComputer, key: str, manifest: Manifest, *, budget_s: float = 10.0
) -> GenerationPoints:
    """Warm the engine under `key` and return (work units, seconds) points, by work.

    Args:
        budget_s: the longer prompt is left out where the short ones took half of it.

    Raises:
        ServeError: whatever the worker raised.
    """
    assert manifest.generative is not None
    began_at = clock.now()
    short, long, tokens = _sizes(manifest.generative)
    await warm_generation(worker, key, manifest)
    points: dict[float, float] = {}

    async def run(prompt: int, answer: int) -> None:
        done = await _generate(worker, key, manifest.generative, prompt, answer)
        took = done.usage
        computed = prompt - took.cached_tokens
        for made, seconds in ((1, took.prefill_s), (took.completion_tokens, took.prefill_s + took.decode_s)):
            units = generated_units(manifest, computed, made)
            points[units] = max(_LEAST_S, seconds, points.get(units, 0.0))

    await run(short, tokens)
    if clock.now() - began_at < 0.5 * budget_s and long > short:
        await run(long, 1)
    return tuple(sorted(points.items()))


async def warm_generation(worker: SequenceComputer, key: str, manifest: Manifest) -> None:
    """Generate once: for a restarted worker whose costs are known.

    As many tokens as it takes to know how long its steps are, since a worker that hangs before that is known is waited
    for until its callers' own deadlines (`silence.py`).
    """
    short, _, tokens = _sizes(manifest.generative)
    await _generate(worker, key, manifest.generative, short, tokens)


def _sizes(generative: Generative | None) -> tuple[int, int, int]:
    """Tokens of the short and of the longer prompt, and of an answer: never more than half of the context in all."""
    assert generative is not None
    half = max(1, generative.context // 2)
    return min(_SHORT, half), min(_LONG, half), max(1, min(_TOKENS, generative.context - half))


async def _generate(
    worker: SequenceComputer, key: str, generative: Generative | None, prompt: int, answer: int
) -> Generated:
    assert generative is not None
    # Not all the same id, for a prompt that repeats itself may be cached; nor one that ends the text.
    ids = [id for id in range(min(generative.vocabulary_size, 4 * prompt + 64)) if id not in generative.stop_tokens]
    ids = ids or [0]
    asked = GenerateRequest(tuple(ids[(7 * at + prompt) % len(ids)] for at in range(prompt)), answer, ignore_stop=True)
    return await worker.generate(key, asked, None, token_interval_s=_INTERVAL_S)
