"""How soon a device whose language model is broken is found, and how often an intact one is accused.

    python -m tests.bench.agreement_tokens [--quick] [--months N] [--repository FOLDER]

SmolLM2 in int4 as a device runs it, and in bf16 as a pool does. The device answers prompts by its own engine. The
pool's likeliest token at each position of that answer is read from one pass over prompt and answer, with the same
weights in fp32, since that takes a processor less time: but for roundings it is what greedy runs behind the known
tokens give. The real comparison (`TokenComparison`) then makes a score of each.

What is recorded is measured as `tidegate model quantize` does: the pool's answers, followed by the device's variant.
Faults are put into the weights' file in a copy of the folder:

    bits flipped         one byte in a thousand of all weights has its highest bit turned
    a layer's rows       the rows of one layer's MLP moved by one, as by a file that was put together wrongly
    another vocabulary   the rows of the last matrix moved by one: each token says its neighbour
    scales               those of one layer's attention twice as large
    positions            the table of angles moved by one row
    flip N               the highest bit of the exponent of one of the scales, drawn by chance

The real core then lives through months of such scores, as in `tests.bench.agreement`, which has the other metrics. The
pool's extra work is what the real budget lets through of answers that take a pool 4 s each, half of them at devices, as
the section `agreement` is meant (1 % of devices' answers is drawn) and where every answer is drawn.

Aims: each fault that matters is found within 200 compared answers; at most one false alarm in a device-month; at most
2 % more pool work.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import onnx

from gateway.core.agreement.disagreement import AnswerComparison
from gateway.core.agreement.expectation import AgreementTerms, agreement_terms, slice_of
from gateway.core.agreement.token_comparison import MOST_POSITIONS, TokenComparison
from tests.bench.agreement import (
    EVERY_S,
    WITHIN,
    Scores,
    delays,
    extra_work,
    false_alarms,
    mean_of,
    returns_after,
)
from tests.bench.generate_exact import ENDINGS, Ids, generated
from tests.bench.harness import Goal, Report, parser, table
from tests.support.models.demo_models import generating_repository
from tests.support.stepping import run_one
from tidegate.engines.engine import load_generative_engine
from tidegate.engines.generation.limits import limits_of
from tidegate.generate.engine import GenerativeEngine
from tidegate.generate.request import GenerateRequest
from tidegate.generate.teacher_forcing import KnownAnswer, TeacherForcing, total
from tidegate.models.manifest import Manifest
from tidegate.models.repository import Repository
from tidegate.tools.build.evaluate.prompts import PROMPTS, prompt_ids

Weights = dict[str, np.ndarray[Any, np.dtype[np.uint8]]]  # bytes by tensor, rows first

DATA: Final = "model.onnx.data"
_GOLDEN_TOKENS: Final = 24


@dataclass
class Pair:
    """The folder of the version, and what the pool says."""

    folder: Path
    manifest: Manifest
    model: Any

    def device(self, folder: Path) -> GenerativeEngine:
        variant = self.manifest.variant("int4")
        assert variant is not None
        limits = limits_of(self.manifest, variant)
        assert limits is not None
        return load_generative_engine("onnxruntime-genai", folder / variant.artefact, limits=limits)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        assert self.manifest.generative is not None
        return self.manifest.generative.stop_tokens

    def likeliest(self, known: KnownAnswer) -> list[int]:
        """The pool's likeliest token at each position of an answer, behind the known ones."""
        import torch

        with torch.inference_mode():
            logits = self.model(torch.tensor([[*known.prompt, *known.ids]])).logits[0]
        found: list[int] = logits[len(known.prompt) - 1 :].float().argmax(-1).tolist()
        return found[: known.positions]


def score_of(pair: Pair, known: KnownAnswer) -> float:
    """As shadowing scores it: the pool follows the device's answer."""
    likeliest, comparison = pair.likeliest(known), TokenComparison(known)
    while (asked := comparison.next_request()) is not None:
        at = len(asked.prompt) - len(known.prompt)
        run = [id for id in likeliest[at:] if id not in pair.stop_tokens]  # up to a difference it is the known text
        ends = next((place for place in range(at, known.positions) if likeliest[place] in pair.stop_tokens), None)
        comparison.take(run if ends is None else likeliest[at:ends], stopped=ends is not None)
    return comparison.score


def scores_of(pair: Pair, engine: GenerativeEngine, prompts: Sequence[Ids]) -> Scores:
    found: Scores = {}
    for prompt in prompts:
        text = run_one(engine, GenerateRequest(prompt, MOST_POSITIONS))
        known = KnownAnswer(prompt, text.ids, stopped=text.end is not None and text.end.finished == "stop")
        score = score_of(pair, known)
        found.setdefault(slice_of(len(prompt)), []).append(AnswerComparison(score, score))
    return found


def recorded_share(engine: GenerativeEngine, answers: Sequence[KnownAnswer]) -> float:
    """Of the positions of the pool's greedy answers, those at which the device's variant says the same."""
    found = []
    for known in answers:
        forcing = TeacherForcing(known)
        while (asked := forcing.next_request()) is not None:
            text = run_one(engine, asked)
            forcing.take(text.ids, stopped=text.end is not None and text.end.finished == "stop")
        found.append(forcing.agreement)
    return total(found).share


# faults


def broken_copy(source: Path, folder: Path, fault: Callable[[Weights], None]) -> Path:
    """A folder with the same model, whose weights have a fault."""
    for path in source.iterdir():
        if path.name != DATA:
            os.link(path, folder / path.name) if path.stat().st_dev == folder.stat().st_dev else shutil.copyfile(
                path, folder / path.name
            )
    content = np.fromfile(source / DATA, dtype=np.uint8)
    tensors: Weights = {}
    for tensor in onnx.load(source / "model.onnx", load_external_data=False).graph.initializer:
        place = {one.key: one.value for one in tensor.external_data}
        if place:
            begin = int(place["offset"])
            part = content[begin : begin + int(place["length"])]
            tensors[tensor.name] = part.reshape(tensor.dims[0], -1)
    fault(tensors)
    content.tofile(folder / DATA)
    return folder


def _moved(*words: str) -> Callable[[Weights], None]:
    """The rows of the tensors whose names hold one of these, moved by one."""

    def fault(tensors: Weights) -> None:
        for name, rows in tensors.items():
            if any(one in name for one in words):
                rows[:] = np.roll(rows, 1, axis=0)

    return fault


def _bits(tensors: Weights) -> None:
    random = np.random.default_rng(3)
    for name, rows in tensors.items():
        if name.endswith("_Q4"):
            flat = rows.reshape(-1)
            flat[random.choice(len(flat), len(flat) // 1000, replace=False)] ^= 0x80


def _twice_as_large(tensors: Weights) -> None:
    for name, rows in tensors.items():
        if "layers.12.attn" in name and name.endswith("_scales"):
            rows.view(np.float32)[:] *= 2.0


def _one_scale(draw: Random) -> tuple[str, Callable[[Weights], None]]:
    layer, place = draw.randrange(30), draw.random()

    def fault(tensors: Weights) -> None:
        flat = tensors[f"model.layers.{layer}.mlp.down_proj.MatMul.weight_scales"].reshape(-1).view(np.uint32)
        flat[int(place * len(flat))] ^= np.uint32(1 << 30)

    return f"a scale of layer {layer}", fault


def smollm2_scores(
    repository: Repository, inputs: int, faulty_inputs: int, flips: int
) -> tuple[AgreementTerms, Scores, dict[str, Scores]]:
    """What is compared, the natural scores, and those of each fault."""
    import torch

    from tidegate.engines.generation.continuous_batching import load_causal_model

    torch.set_num_threads(1)
    manifest = repository.manifest("smollm2")
    folder = repository.folder(manifest)
    reference = next(one for one in manifest.variants if one.engine == "transformers")
    model = load_causal_model(folder / reference.artefact, torch.device("cpu"))
    pair = Pair(folder, manifest, model.float().eval())
    words = [f"{prompt}{ending}" for ending in ENDINGS for prompt in PROMPTS]
    Random("prompts").shuffle(words)
    prompts = asyncio.run(prompt_ids(folder, manifest, words, max_tokens=MOST_POSITIONS))
    golden = asyncio.run(prompt_ids(folder, manifest, PROMPTS, max_tokens=_GOLDEN_TOKENS))
    said = generated(folder / reference.artefact, golden, _GOLDEN_TOKENS, pair.stop_tokens)
    answers = [
        KnownAnswer(prompt, ids, stopped=len(ids) < _GOLDEN_TOKENS)
        for prompt, ids in zip(golden, said.ids, strict=True)
    ]
    device = pair.device(folder)
    terms = agreement_terms(manifest, "int4", recorded_share(device, answers), 1.0)
    assert terms is not None
    natural = scores_of(pair, device, prompts[:inputs])
    draw = Random("scales")
    found: dict[str, Callable[[Weights], None]] = {
        "one bit in a thousand bytes": _bits,
        "a layer's rows": _moved("layers.12.mlp.down_proj.MatMul.weight"),
        "another vocabulary": _moved("lm_head.MatMul.weight"),
        "scales": _twice_as_large,
        "positions": _moved("cos_cache", "sin_cache"),
        **{f"flip {number}, {name}": fault for number in range(flips) for name, fault in [_one_scale(draw)]},
    }
    faults = {}
    for name, fault in found.items():
        with TemporaryDirectory() as place:
            broken = pair.device(broken_copy(folder, Path(place), fault))
            faults[name] = scores_of(pair, broken, prompts[:faulty_inputs])
    return terms, natural, faults


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--months", type=int, default=8, help="device-months to live through")
    options.add_argument("--repository", type=Path, help="one that holds smollm2; else it is built")
    chosen = options.parse_args()
    inputs, faulty_inputs, flips, seeds, months = (8, 4, 1, 3, 1) if chosen.quick else (40, 8, 3, 12, chosen.months)
    repository = Repository(chosen.repository) if chosen.repository else generating_repository()
    terms, natural, faults = smollm2_scores(repository, inputs, faulty_inputs, flips)
    config = {"inputs": inputs, "faulty_inputs": faulty_inputs, "seeds": seeds, "months": months, "every_s": EVERY_S}
    report = Report("agreement_tokens", config, {})
    report.figures["natural"] = {"recorded": terms.recorded, "limit": terms.limit, "mean": mean_of(natural)}
    rows, late = [], 0
    for name, faulty in faults.items():
        mean, matters = mean_of(faulty), mean_of(faulty) > terms.limit
        took = delays(terms, natural, faulty, seeds) if matters else [0]
        late += sum(one > WITHIN for one in took) > len(took) * 0.05
        report.figures.setdefault("delays", {})[name] = {"mean": mean, "median": median(took), "most": max(took)}
        rows.append([name, f"{mean:.3f}", f"{median(took):.0f}" if matters else "no matter", f"{max(took)}"])
    table(["fault", "mean", "median answers", "most"], rows)
    alarms = false_alarms(terms, natural, months, 0) / months
    back = returns_after(terms, natural, faults["scales"], seeds)
    seconds = 3600.0 * (1 if chosen.quick else 24)
    work = {
        name: extra_work(seconds, 0.25, 0.25, share, 20, compute_s=4.0, shadow_s=0.7)
        for name, share in (("as_meant", 0.01), ("every_answer", 1.0))
    }
    report.figures |= {
        "faults_found_late": late,
        "false_alarms_per_device_month": alarms,
        "return_after_median": median(back),
        "return_after_most": max(back),
        "pool_work": work,
    }
    print(f"natural {report.figures['natural']}; {alarms:g} false alarms a month; back after {median(back):g}; {work}")
    report.goal(Goal("agreement_tokens_faults_found_late", float(late), 0.0, "<="))
    report.goal(Goal("agreement_tokens_false_alarms_per_device_month", alarms, 1.0, "<="))
    report.goal(Goal("agreement_tokens_pool_work_ratio", work["as_meant"]["of_pool_work"], 0.02, "<="))
    report.write()


if __name__ == "__main__":
    main()
