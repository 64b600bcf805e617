"""Greedy answers of a generating variant, and how far another one agrees with them, each in a worker process.

A variant runs here as a target runs it: in a worker of its own, by the same loop and limits, with one thread unless
told otherwise. So what was recorded on one machine is what a device computes, but for its processor.

    int4 of SmolLM2 against itself, 741 positions of 24 answers, one x86-64 machine      agree
    with two threads, or prompts in chunks of 512 tokens instead of 64                   741, all answers equal
    prompts in chunks of 16                                                              737, 21 equal
    activations in fp32 instead of int8, which is more than two processors differ        725, 12 equal

Therefore positions are compared (`tidegate/generate/teacher_forcing.py`) and not texts, and nine of ten have to agree
(`GOLDEN_TOKENS_MIN`). It can be wrong for a model whose tokens are nearly all equally likely: roundings decide more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from tidegate.engines.generation.limits import limits_of
from tidegate.generate.request import MAX_LOGPROBS, GenerateRequest
from tidegate.generate.teacher_forcing import KnownAnswer, TeacherForcing, TokenAgreement
from tidegate.generate.usage import Generated
from tidegate.models.manifest import Manifest, Variant
from tidegate.outcome import ServeError
from tidegate.runtime.process import StartError
from tidegate.token_sink import TokenBatch, TokenSink
from tidegate.tools.build.errors import BuildError
from tidegate.workers.process import EngineSpec, WorkerProcess

T = TypeVar("T")
_INTERVAL_S: Final = 1.0
_RUNTIMES: Final = {  # what an engine imports, and the extra that brings it
    "onnxruntime-genai": (("onnxruntime_genai",), "edge-llm"),
    "transformers": (("torch", "transformers"), "cloud-llm"),
}


def missing_runtime(variant: Variant) -> str:
    """Which package a variant lacks to run here, and what brings it; "" for none."""
    modules, extra = _RUNTIMES.get(variant.engine, ((), ""))
    missing = [one for one in modules if find_spec(one) is None]
    return f"{', '.join(missing)}: pip install 'tidegate[{extra}]'" if missing else ""


class ScoredAnswer(NamedTuple):
    """A greedy answer as token ids, and the natural logarithm of each one's probability."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class VariantWorker:
    """One variant in a worker process."""

    def __init__(self, worker: WorkerProcess, key: str) -> None:
        self._worker = worker
        self._key = key

    async def answers(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[KnownAnswer, ...]:
        """Its greedy answers, as many at a time as it has slots. Raises ServeError."""
        done = await _all(self._generate(GenerateRequest(tuple(prompt), max_tokens), None) for prompt in prompts)
        return tuple(
            KnownAnswer(tuple(prompt), one.ids, stopped=one.usage.finish_reason == "stop")
            for prompt, one in zip(prompts, done, strict=True)
        )

    async def scored(self, prompt: Sequence[int], max_tokens: int) -> ScoredAnswer:
        """Its greedy answer, with the logarithm of each token's probability. Raises ServeError."""
        sink = _LogprobSink(max_tokens)
        done = await self._generate(GenerateRequest(tuple(prompt), max_tokens, logprobs=0), sink)
        return ScoredAnswer(done.ids, tuple(sink.logprobs[: len(done.ids)]))

    async def agreement(self, answers: Sequence[KnownAnswer], *, score: bool = False) -> list[TokenAgreement]:
        """How far it agrees with each. Raises ServeError.

        Args:
            score: whether the known tokens' log-probabilities are wanted.
        """
        return await _all(self._forced(TeacherForcing(one, logprobs=MAX_LOGPROBS if score else 0)) for one in answers)

    async def _forced(self, forcing: TeacherForcing) -> TokenAgreement:
        while not forcing.is_judged:
            await forcing.judge_next(self._generate)
        return forcing.agreement

    async def _generate(self, request: GenerateRequest, sink: TokenSink | None) -> Generated:
        return await self._worker.generate(self._key, request, sink, token_interval_s=_INTERVAL_S)

    def __repr__(self) -> str:
        return f"<VariantWorker {self._key}>"


@asynccontextmanager
async def variant_worker(
    folder: Path, manifest: Manifest, variant: Variant, *, threads: int = 1
) -> AsyncIterator[VariantWorker]:
    """The variant, loaded from its version's folder.

    Raises:
        BuildError: it does not load, or what is done with it fails; names the variant.
    """
    limits = limits_of(manifest, variant)
    assert limits is not None
    artefact = folder / variant.artefact
    spec = EngineSpec(variant.name, variant.engine, artefact, (), threads, generation=limits)
    try:
        async with WorkerProcess(f"greedy/{variant.name}") as worker:
            await worker.load(spec)
            yield VariantWorker(worker, variant.name)
    except (ServeError, StartError) as error:
        raise BuildError(f"{manifest.name}:{manifest.version} {variant.name}: {error}") from error


class _LogprobSink:
    """A `TokenSink` whose window is the whole answer."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.logprobs: list[float] = []

    def started(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Nothing: only the tokens are wanted."""

    def put(self, batch: TokenBatch) -> None:
        self.logprobs += batch.logprobs

    def on_credit(self, credit: Callable[[int], None]) -> None:
        """Nothing: the window is large enough."""


async def _all(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results, in order; the first error ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work, name=f"greedy answer {index}") for index, work in enumerate(works)]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
