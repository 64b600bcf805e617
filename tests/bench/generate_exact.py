"""Greedy answers in bf16 against transformers' own `generate`, token by token, and what `batch_invariant` costs.

    generate      one prompt after another, by transformers alone
    batched       the pool's engine as it is, 16 sequences at a time, and the first 16 prompts one at a time
    invariant     the same with `batch_invariant`, in two orders of the prompts

All on the same weights, in this process, with one thread. An answer is the same when all of its tokens are. Cost is the
process's own CPU time for a token with its share of the prompts, so that other processes matter little.

    python -m tests.bench.generate_exact [--quick] [--repository FOLDER]
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from random import Random
from time import process_time
from typing import Any, Final, NamedTuple

from tests.bench.harness import Goal, Report, parser, table
from tests.support.models.demo_models import generating_repository
from tests.support.stepping import run
from tidegate.engines.engine import load_generative_engine
from tidegate.engines.generation.limits import GenerationLimits
from tidegate.generate.engine import GenerativeEngine
from tidegate.generate.request import GenerateRequest
from tidegate.models.manifest import Manifest
from tidegate.models.repository import Repository
from tidegate.tools.build.evaluate.prompts import PROMPTS, prompt_ids

MODEL: Final = "smollm2"
COMPANY: Final = 16
ALONE: Final = 16  # prompts that are also given one at a time
ENDINGS: Final = (
    "", " Be brief.", " Explain it to a child.", " Answer in one sentence.", " Answer in a long text, with details.",
    " Then say it again in other words.", " Begin with the word Well.", " I asked this yesterday as well.",
)  # fmt: skip

Ids = tuple[int, ...]


class Answers(NamedTuple):
    """Of all prompts, in their order, and the CPU time of a token."""

    ids: list[Ids]
    cpu_ms: float


def generated(
    weights: Path, prompts: Sequence[Ids], tokens: int, stop_tokens: Sequence[int], device: str = "cpu"
) -> Answers:
    import torch

    from tidegate.engines.generation.continuous_batching import load_causal_model

    model: Any = load_causal_model(weights, torch.device(device))
    found, began = list[Ids](), process_time()
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        words = {"attention_mask": torch.ones_like(ids), "eos_token_id": list(stop_tokens), "do_sample": False}
        said = model.generate(ids, max_new_tokens=tokens, **words)[0, len(prompt) :].tolist()
        found.append(tuple(said[:-1] if said[-1] in stop_tokens else said))
    return answers(found, began)


def batched(engine: GenerativeEngine, prompts: Sequence[Ids], tokens: int, company: int) -> Answers:
    """So many at a time; the next ones begin when all of them have ended."""
    found, began = list[Ids](), process_time()
    for at in range(0, len(prompts), company):
        requests = [GenerateRequest(prompt, tokens) for prompt in prompts[at : at + company]]
        found += [text.ids for text in run(engine, *requests)]
    return answers(found, began)


def answers(found: list[Ids], began: float) -> Answers:
    return Answers(found, 1e3 * (process_time() - began) / sum(map(len, found)))


def shuffled(prompts: Sequence[Ids]) -> tuple[list[int], list[Ids]]:
    order = list(range(len(prompts)))
    Random(7).shuffle(order)
    return order, [prompts[at] for at in order]


def bench(manifest: Manifest, folder: Path, count: int, tokens: int) -> Report:
    import torch

    torch.set_num_threads(1)
    report = Report("generate_exact", {"prompts": count, "tokens": tokens, "company": COMPANY})
    assert manifest.generative is not None
    stop_tokens = manifest.generative.stop_tokens
    weights = folder / next(one.artefact for one in manifest.variants if one.engine == "transformers")
    words = [f"{prompt}{ending}" for ending in ENDINGS for prompt in PROMPTS][:count]
    prompts = list(asyncio.run(prompt_ids(folder, manifest, words, max_tokens=tokens)))
    expected = generated(weights, prompts, tokens, stop_tokens)
    found: dict[str, Answers] = {"generate": expected}
    for name, invariant in (("batched", False), ("invariant", True)):
        limits = GenerationLimits(slots=COMPANY, stop_tokens=stop_tokens, batch_invariant=invariant)
        engine = load_generative_engine("transformers", weights, limits=limits)
        found[f"{name}_1"] = batched(engine, prompts[:ALONE], tokens, 1)
        found[f"{name}_{COMPANY}"] = batched(engine, prompts, tokens, COMPANY)
        order, mixed = shuffled(prompts)
        again = batched(engine, mixed, tokens, COMPANY)
        back = [ids for _, ids in sorted(zip(order, again.ids, strict=True))]
        found[f"{name}_{COMPANY}_mixed"] = again._replace(ids=back)
    rows = []
    for name, one in found.items():
        same = sum(a == b for a, b in zip(one.ids, expected.ids, strict=False))
        report.figures[f"{name}.same"], report.figures[f"{name}.cpu_ms"] = same, one.cpu_ms
        rows.append((name, f"{same} of {len(one.ids)}", f"{one.cpu_ms:.1f}"))
    table(("", "the same as generate", "CPU ms a token"), rows)
    for name in (f"invariant_{COMPANY}", f"invariant_{COMPANY}_mixed"):
        report.goal(Goal(f"{name}.same", report.figures[f"{name}.same"], count))
    report.figures["cost"] = found[f"invariant_{COMPANY}"].cpu_ms / found[f"batched_{COMPANY}"].cpu_ms
    report.goal(Goal("cost", report.figures["cost"], 2.0, "<="))
    return report


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--repository", type=Path, help="one that holds smollm2; else it is built")
    chosen = options.parse_args()
    repository = Repository(chosen.repository) if chosen.repository else generating_repository()
    manifest = next(one for one in repository.manifests() if one.name == MODEL)
    count, tokens = (16, 16) if chosen.quick else (64, 64)
    bench(manifest, repository.folder(manifest), count, tokens).write()


if __name__ == "__main__":
    main()
