"""Generating on a GPU: tokens a second and first tokens of continuous batching, and whether its texts are right.

    generate   transformers' own: one prompt after another, and as many at once as there are slots, padded
    bare       the pool's engine stepped in a loop with so many sequences
    served     streamed completions by HTTP through gateway, link and pool

Greedy texts in bf16 are compared with those of `generate` one at a time, with and without `batch_invariant`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from tests.bench.gateway_overhead import Timing
from tests.bench.generate_exact import ENDINGS, batched, generated
from tests.bench.generate_pool import MODEL, PROMPT, TOKENS, Rate, start_bare, start_served, variant_of
from tests.bench.generate_pool import measure as measure_rate
from tests.bench.harness import Child, Goal, Report, Spread, ratios, table
from tidegate.engines.engine import load_generative_engine
from tidegate.engines.generation.limits import GenerationLimits
from tidegate.models.manifest import Manifest, Variant
from tidegate.models.repository import Repository
from tidegate.tools.build.evaluate.prompts import PROMPTS, prompt_ids

COMPANY: Final = 16
STREAMS: Final = (1, 16)
LEAST_OF_BARE: Final = 0.95


def measure(report: Report, root: Path, timing: Timing, texts: int) -> None:
    repository = Repository(root)
    manifest = next(one for one in repository.manifests() if one.name == MODEL)
    variant = variant_of(manifest, "pool")
    weights = repository.folder(manifest) / variant.artefact
    report.figures["generate_tokens_per_s"] = _padded_rate(weights)
    _compare(report, manifest, repository.folder(manifest), weights, texts)
    asyncio.run(_rates(report, root, variant, timing))


def _compare(report: Report, manifest: Manifest, folder: Path, weights: Path, texts: int) -> None:
    assert manifest.generative is not None
    stop_tokens = manifest.generative.stop_tokens
    words = [f"{prompt}{ending}" for ending in ENDINGS for prompt in PROMPTS][:texts]
    prompts = list(asyncio.run(prompt_ids(folder, manifest, words, max_tokens=TOKENS)))
    expected = generated(weights, prompts, TOKENS, stop_tokens, "cuda")
    for name, invariant in (("batched", False), ("invariant", True)):
        limits = GenerationLimits(slots=COMPANY, stop_tokens=stop_tokens, batch_invariant=invariant)
        engine = load_generative_engine("transformers", weights, limits=limits, device="cuda")
        began = time.perf_counter()
        found = batched(engine, prompts, TOKENS, COMPANY)
        took = time.perf_counter() - began
        same = sum(a == b for a, b in zip(found.ids, expected.ids, strict=True))
        report.figures[f"{name}.same"] = same / len(prompts)
        report.figures[f"{name}.tokens_per_s"] = sum(map(len, found.ids)) / took
        print(f"{name}, {COMPANY} at a time: {same} of {len(prompts)} texts are those of generate")
        del engine
    report.goal(Goal("invariant.same", report.figures["invariant.same"], 1.0))


def _padded_rate(weights: Path) -> dict[str, float]:
    import torch

    from tidegate.engines.generation.continuous_batching import load_causal_model

    model: Any = load_causal_model(weights, torch.device("cuda"))
    rates = {}
    for at_once in STREAMS:
        ids = torch.randint(3, 300, (at_once, PROMPT), device="cuda")
        words = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
        for _ in range(2):
            torch.cuda.synchronize()
            began = time.perf_counter()
            model.generate(ids, max_new_tokens=TOKENS, **words)
            torch.cuda.synchronize()
            rates[f"c{at_once}"] = at_once * TOKENS / (time.perf_counter() - began)
    return rates


async def _rates(report: Report, root: Path, variant: Variant, timing: Timing) -> None:
    found: dict[tuple[str, int], list[Rate]] = {}
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory(prefix="tidegate-bench-")))
        bare = await start_bare(stack, root, variant, None, "cuda")
        port = await start_served(stack, scratch, root, "pool", None, None, "cuda")
        callers = await stack.enter_async_context(Child("callers", "-m", "tests.bench.token_callers", MODEL))
        for _ in range(timing.repeats):
            for streams in STREAMS:
                for name, child, words in (("bare", bare, {}), ("served", callers, {"port": port})):
                    found.setdefault((name, streams), []).append(await measure_rate(child, streams, timing, **words))
    _tell(report, found)


def _tell(report: Report, found: dict[tuple[str, int], list[Rate]]) -> None:
    rows = []
    for (name, streams), rates in found.items():
        per_s, first = _per_s(rates), Spread.of(1e3 * one.first_p50_s for one in rates)
        errors = sum(one.errors for one in rates)
        report.figures[f"{name}_c{streams}"] = {"tokens_per_s": Spread.of(per_s), "first_ms": first, "errors": errors}
        rows.append((f"{name}, {streams} streams", f"{Spread.of(per_s):.0f}", f"{first:.1f}", errors))
    table(("", "tokens/s", "first token p50, ms", "errors"), rows)
    for streams in STREAMS:
        ratio = ratios(_per_s(found["served", streams]), _per_s(found["bare", streams]))
        report.figures[f"served_of_bare_c{streams}"] = ratio
        report.goal(Goal(f"generating.served_of_bare_c{streams}", ratio.median, LEAST_OF_BARE))


def _per_s(rates: Sequence[Rate]) -> list[float]:
    return [one.tokens_per_s for one in rates]
