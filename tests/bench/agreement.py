"""How soon a device whose answers drift is found, how often an intact one is accused, and what looking costs.

    python -m tests.bench.agreement [--quick] [--months N] [--flips N]

Natural disagreement is measured on real pairs: MiniLM's int8 artefact as devices run it against fp32, on real texts
alone, cut to a few words, and joined to long ones; the digits' int8 against fp32 on held-out images. Then faults are
put into the artefact or in front of it, and their disagreement is measured on the same inputs:

    bit flips        one bit of one stored number of the int8 file, drawn by chance among exponents and signs of scales,
                     biases and norms, and among the highest bits of int8 weights. A flip matters if it moves the mean
                     over the limit; one bit in 22 million weights seldom does
    normalisation    the last step left out of the graph; images scaled to [-1, 1], or not scaled from bytes
    wrong model      the encoder with another model's vocabulary (each token takes its neighbour's row); answers of
                     another model of the same width (rows of its own); a classifier with two classes exchanged
    preprocessing    texts without their end marks, cut at eight tokens; images turned, or half covered

The real core (`gateway/core/agreement`) then lives through months: scores are drawn from what was measured in stretches
of an hour of one kind of input each, at the highest rate that a device is shadowed at. Delays are in shadowed answers,
after a natural life of a day. False alarms are counted in device-months in which nothing is wrong, natural ones, and
hostile ones whose mean lies on the limit exactly in the form that alarms most (all or nothing).

The pools' extra work is what the real budget lets through of a mixed traffic in a simulated day. The cost on a
request's way is the layer's, on against left out.

Aims: each fault that matters is found within 200 shadowed answers; at most one false alarm in a device-month; at most
2 % more pool work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import numpy_helper
from tokenizers import Tokenizer

from gateway.core.agreement.agreement_watch import MONTH_S, AgreementWatch, AnswerSource, ShadowedAnswer
from gateway.core.agreement.disagreement import AnswerComparison, row_disagreement
from gateway.core.agreement.expectation import AgreementTerms, Metric, agreement_terms, slice_of
from gateway.core.agreement.shadow_budget import ShadowBudget
from gateway.layers.shadow import shadow
from tests.bench.harness import Goal, Report, parser, table
from tests.support.models.demo_models import standard_repository
from tidegate.engines.engine import load_engine
from tidegate.models.manifest import Manifest
from tidegate.models.repository import Repository
from tidegate.tools.build.demo.corpus import texts
from tidegate.types import Call, InferRequest, InferResponse, Reply, Route

Rows = NDArray[np.float64]
Feed = dict[str, NDArray[Any]]
Scores = dict[int, list[AnswerComparison]]  # by slice

EVERY_S: Final = 10.0
WITHIN: Final = 200
_HOUR: Final = int(3600 / EVERY_S)
_DAY: Final = 24 * _HOUR
_MOST_TOKENS: Final = 128
_SOURCE: Final = AnswerSource("edge/a", "model", "1", "int8")


class Session:
    """One artefact that runs on one thread."""

    def __init__(self, model: Path | bytes) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        source = str(model) if isinstance(model, Path) else model
        self._session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])

    def rows(self, feed: Feed) -> Rows:
        with np.errstate(all="ignore"):
            return np.asarray(self._session.run(None, feed)[0], np.float64)


# what is measured


def text_feeds(tokenizer: Tokenizer, count: int) -> list[tuple[int, Feed]]:
    """Real texts in three lengths, each alone, with its slice."""
    found = texts(count)
    short = [" ".join(text.split()[:3]) for text in found[: count // 3]]
    long = [" ".join(found[at : at + 6]) for at in range(0, count - 6, 6)]
    ids = [encoding.ids for encoding in tokenizer.encode_batch([*found, *short, *long])]
    return [_text_feed(one if len(one) <= _MOST_TOKENS else [*one[: _MOST_TOKENS - 1], one[-1]]) for one in ids]


def _text_feed(ids: Sequence[int]) -> tuple[int, Feed]:
    row = np.array([ids], dtype=np.int64)
    return slice_of(len(ids)), {"input_ids": row, "attention_mask": np.ones_like(row)}


def image_feeds(count: int) -> list[tuple[int, Feed]]:
    from tidegate.tools.build.demo.digits import held_out

    images, _ = held_out()
    return [(slice_of(64), {"image": image[None]}) for image in images[:count]]


def scores_of(
    metric: Metric,
    truth: Sequence[Rows],
    feeds: Sequence[tuple[int, Feed]],
    answer: Callable[[Feed], Rows],
    change: Callable[[Feed], Feed] = lambda feed: feed,
) -> Scores:
    """The disagreement of each input, by slice. `change` is what a device does to its inputs."""
    found: Scores = {}
    for (size, feed), reference in zip(feeds, truth, strict=True):
        rows = answer(change(feed))
        score, apart = (row_disagreement(one, rows, reference) for one in (metric, "cosine"))
        found.setdefault(size, []).append(
            AnswerComparison(score if score == score else 1.0, apart if apart == apart else 1.0)
        )
    return found


def mean_of(scores: Scores) -> float:
    return float(np.mean([one.score for of in scores.values() for one in of]))


# faults


def flipped(model: onnx.ModelProto, draw: Random) -> tuple[str, bytes]:
    """The model with one bit flipped, and in words which one."""
    broken = onnx.ModelProto()
    broken.CopyFrom(model)
    kinds = {onnx.TensorProto.FLOAT: (np.uint32, (31, 30, 29, 26)), onnx.TensorProto.INT8: (np.uint8, (7, 6))}
    tensors = [one for one in broken.graph.initializer if one.data_type in kinds and len(one.raw_data)]
    floats = [one for one in tensors if one.data_type == onnx.TensorProto.FLOAT]
    tensor = draw.choice(floats if draw.random() < 0.8 and floats else tensors)
    unsigned, bits = kinds[tensor.data_type]
    array = numpy_helper.to_array(tensor).copy()
    flat = array.view(unsigned).reshape(-1)
    at, bit = draw.randrange(len(flat)), draw.choice(bits)
    flat[at] ^= unsigned(1 << bit)
    tensor.raw_data = array.tobytes()
    return f"bit {bit} of {tensor.name[:40]}[{at}]", broken.SerializeToString()


def without_normalisation(model: onnx.ModelProto) -> bytes:
    """The model whose output is what its last division divides."""
    broken = onnx.ModelProto()
    broken.CopyFrom(model)
    output = broken.graph.output[0].name
    last = next(node for node in broken.graph.node if output in node.output)
    assert last.op_type == "Div", f"the last step is {last.op_type}"
    last.op_type = "Identity"
    del last.input[1:]
    return broken.SerializeToString()


def with_other_vocabulary(model: onnx.ModelProto) -> bytes:
    """The model whose largest table of rows is moved by one row: ids mean other tokens."""
    broken = onnx.ModelProto()
    broken.CopyFrom(model)
    table_of = max(broken.graph.initializer, key=lambda one: one.dims[0] if len(one.dims) == 2 else 0)
    array = np.roll(numpy_helper.to_array(table_of), 1, axis=0)
    table_of.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array), table_of.name))
    return broken.SerializeToString()


def _cut(most: int, *, ends: bool = True) -> Callable[[Feed], Feed]:
    def change(feed: Feed) -> Feed:
        ids = feed["input_ids"]
        cut = ids[:, :most] if ends else ids[:, 1:-1][:, :most]
        cut = cut if cut.shape[1] else ids
        return {"input_ids": cut, "attention_mask": np.ones_like(cut)}

    return change


def _image(change: Callable[[NDArray[Any]], NDArray[Any]]) -> Callable[[Feed], Feed]:
    return lambda feed: {"image": np.ascontiguousarray(change(feed["image"]), np.float32)}


def _half_covered(image: NDArray[Any]) -> NDArray[Any]:
    covered = image.copy()
    covered[..., :4, :] = 0.0
    return covered


# the real core, living


def stretches(scores: Scores, draw: Random) -> Iterator[tuple[int, AnswerComparison]]:
    """Scores in hours of one slice each, without end."""
    sizes = [size for size, found in scores.items() if len(found) >= 5]
    while True:
        size = draw.choice(sizes)
        found = scores[size]
        for _ in range(_HOUR):
            yield size, found[int(draw.random() * len(found))]


def mixed(scores: Scores, draw: Random) -> Iterator[tuple[int, AnswerComparison]]:
    every = [(size, one) for size, found in scores.items() for one in found]
    while True:
        yield draw.choice(every)


def compared_answer(terms: AgreementTerms, size: int, found: AnswerComparison) -> ShadowedAnswer:
    return ShadowedAnswer(_SOURCE, "pool/main's fp32", found.score, terms, size, "tokens", apart=found.apart)


def alarms_of(
    watch: AgreementWatch, terms: AgreementTerms, life: Iterator[tuple[int, AnswerComparison]], count: int
) -> list[int]:
    """After how many of `count` answers it was accused, each time; a device that comes back is watched again."""
    found = []
    for number in range(count):
        turn = watch.record(compared_answer(terms, *next(life)), number * EVERY_S)
        if turn is not None and turn.turn != "returned":
            found.append(number + 1)
    return found


def delays(terms: AgreementTerms, natural: Scores, faulty: Scores, seeds: int) -> list[int]:
    """Shadowed answers until a fault is found, after a natural day; `10 * WITHIN` where it was not by then."""
    found = []
    for seed in range(seeds):
        draw = Random(f"delay {seed}")
        watch = AgreementWatch(EVERY_S)
        before = alarms_of(watch, terms, stretches(natural, draw), _DAY)
        assert not before, "an intact device was accused"
        alarms = alarms_of(watch, terms, mixed(faulty, draw), 10 * WITHIN)
        found.append(alarms[0] if alarms else 10 * WITHIN)
    return found


def false_alarms(terms: AgreementTerms, natural: Scores, months: int, seed: int) -> int:
    draw = Random(f"months {seed}")
    return sum(
        len(alarms_of(AgreementWatch(EVERY_S), terms, stretches(natural, draw), int(MONTH_S / EVERY_S)))
        for _ in range(months)
    )


def on_the_limit(terms: AgreementTerms, draw: Random) -> Iterator[tuple[int, AnswerComparison]]:
    while True:
        score = 1.0 if draw.random() < terms.limit else 0.0
        yield 2, AnswerComparison(score, score)


def hostile_alarms(terms: AgreementTerms, months: int) -> int:
    draw = Random("hostile")
    count = int(MONTH_S / EVERY_S)
    return sum(
        len(alarms_of(AgreementWatch(EVERY_S), terms, on_the_limit(terms, draw), count)[:1]) for _ in range(months)
    )


def returns_after(terms: AgreementTerms, natural: Scores, faulty: Scores, seeds: int) -> list[int]:
    """Rechecked answers from the repair until the device is back."""
    found = []
    for seed in range(seeds):
        draw = Random(f"return {seed}")
        watch = AgreementWatch(EVERY_S)
        alarms_of(watch, terms, mixed(faulty, draw), 1000)
        assert watch.drifting, "the fault was not found"
        life, number = mixed(natural, draw), 0
        while watch.drifting and number < 5000:
            watch.record(compared_answer(terms, *next(life)), 1e6 + number)
            number += 1
        found.append(number)
    return found


def extra_work(
    seconds: float,
    edge_per_s: float,
    pool_per_s: float,
    share: float,
    devices: int,
    *,
    compute_s: float = 0.010,
    shadow_s: float = 0.010,
) -> dict[str, float]:
    """What the real budget and the real spacing let through of steady traffic.

    Args:
        compute_s: what a request takes a pool; `shadow_s`: what comparing an answer takes it.
    """
    draw, watch, budget = Random("work"), AgreementWatch(EVERY_S), ShadowBudget(0.02)
    now, worked_s, shadows = 0.0, 0.0, 0
    while now < seconds:
        now += draw.expovariate(edge_per_s + pool_per_s)
        if draw.random() < pool_per_s / (edge_per_s + pool_per_s):
            worked_s += compute_s
            budget.worked(compute_s)
            continue
        target = f"edge/{draw.randrange(devices)}"
        if draw.random() < share and watch.is_due(target, now) and budget.affords(1, now):
            watch.asked(target, now)
            budget.spent(shadow_s)
            shadows += 1
    return {
        "of_pool_work": budget.spent_s / worked_s if worked_s else 0.0,
        "of_pool_time": budget.spent_s / seconds,
        "shadows_per_hour": shadows / seconds * 3600.0,
    }


def cost_on_the_way(count: int) -> float:
    """Nanoseconds that the layer adds to a request that is not drawn."""
    call = Call(InferRequest("model", (), "1"), "oip-http", 0.0, 1.0)
    reply = Reply(InferResponse("model", "1", ()), route=Route("edge/a", "cheapest", "int8"))

    async def inner(_call: Call) -> Reply:
        return reply

    class Undrawn:
        """Shadowing's first line, with its draw."""

        def __init__(self) -> None:
            self._draw = Random(1).random

        def answered(self, _call: Call, reply: Reply) -> None:
            if reply.route is not None and reply.route.served_by.startswith("pool/"):
                return
            if self._draw() >= 0.0:
                return

    async def took_s(service: Callable[[Call], Any]) -> float:
        began = time.process_time()
        for _ in range(count):
            await service(call)
        return time.process_time() - began

    async def measured() -> float:
        on = shadow(Undrawn())(inner)
        pairs = [(await took_s(on), await took_s(inner)) for _ in range(5)]
        return median((with_it - without) / count * 1e9 for with_it, without in pairs)

    return asyncio.run(measured())


def terms_of(manifest: Manifest, reference: str) -> AgreementTerms:
    qualities = [one.quality for name in ("int8", reference) if (one := manifest.variant(name)) is not None]
    edge, pool = (1.0 if one is None else one.value for one in qualities)
    terms = agreement_terms(manifest, "int8", edge, pool)
    assert terms is not None
    return terms


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--months", type=int, default=30, help="device-months to live through, of each model")
    options.add_argument("--flips", type=int, default=60, help="bits to flip, one by one")
    chosen = options.parse_args()
    quick = chosen.quick
    seeds, months, flips, inputs = (3, 1, 6, 60) if quick else (12, chosen.months, chosen.flips, 240)
    repository = standard_repository()
    figures: dict[str, Any] = {}
    found: dict[str, tuple[AgreementTerms, Scores, Scores]] = {}
    natural_of: dict[str, tuple[AgreementTerms, Scores]] = {}
    for measure in (_minilm, _digits):
        name, terms, natural, faults = measure(repository, inputs, flips)
        natural_of[name] = terms, natural
        found |= {f"{name}: {fault}": (terms, natural, scores) for fault, scores in faults.items()}
        figures[f"natural_{name}"] = {
            "mean": mean_of(natural),
            "limit": terms.limit,
            "most": max(one.score for of in natural.values() for one in of),
            **{f"slice_{size}_mean": mean_of({size: of}) for size, of in sorted(natural.items())},
            "apart": float(np.mean([one.apart for of in natural.values() for one in of])),
        }
        print(f"{name}: natural disagreement {figures[f'natural_{name}']}", flush=True)
    config = {"seeds": seeds, "months": months, "flips": flips, "inputs": inputs, "every_s": EVERY_S}
    _judge(figures, found, natural_of, config, quick=quick)


def _minilm(repository: Repository, inputs: int, flips: int) -> tuple[str, AgreementTerms, Scores, dict[str, Scores]]:
    manifest = repository.manifest("minilm")
    folder = repository.root / "minilm" / manifest.version
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    feeds = text_feeds(tokenizer, inputs)
    reference = Session(folder / "fp32.onnx")
    truth = [reference.rows(feed) for _, feed in feeds]
    int8, model = Session(folder / "int8.onnx"), onnx.load(folder / "int8.onnx")
    natural = scores_of("cosine", truth, feeds, int8.rows)
    few = list(range(0, len(feeds), max(1, len(feeds) // 48)))
    some, some_truth = [feeds[at] for at in few], [truth[at] for at in few]
    random = np.random.default_rng(7)
    projection = random.normal(size=(384, 384)) / np.sqrt(384)
    bare = Session(without_normalisation(model))
    faults = {
        "no normalisation": scores_of("cosine", some_truth, some, bare.rows),
        "another vocabulary": scores_of("cosine", some_truth, some, Session(with_other_vocabulary(model)).rows),
        "another model": scores_of("cosine", some_truth, some, lambda feed: int8.rows(feed) @ projection),
        "no end marks": scores_of("cosine", some_truth, some, int8.rows, _cut(_MOST_TOKENS, ends=False)),
        "cut at 8 tokens": scores_of("cosine", some_truth, some, int8.rows, _cut(8)),
    }
    draw = Random("flips")
    for number in range(flips):
        words, broken = flipped(model, draw)
        faults[f"flip {number}, {words}"] = scores_of("cosine", some_truth, some, Session(broken).rows)
    return "minilm", terms_of(manifest, "fp32"), natural, faults


def _digits(repository: Repository, inputs: int, flips: int) -> tuple[str, AgreementTerms, Scores, dict[str, Scores]]:
    manifest = repository.manifest("digits")
    folder = repository.root / "digits" / manifest.version
    feeds = image_feeds(max(inputs, 300))
    reference = load_engine("torch-export", folder / "fp32.pt2", outputs=("probabilities",), threads=1)
    int8 = Session(folder / "int8.onnx")
    truth = [np.asarray(reference.infer(feed)["probabilities"], np.float64) for _, feed in feeds]
    swapped = [1, 0, *range(2, 10)]
    faults = {
        "images from -1 to 1": scores_of("top1", truth, feeds, int8.rows, _image(lambda image: image * 2 - 1)),
        "images in bytes": scores_of("top1", truth, feeds, int8.rows, _image(lambda image: image * 255)),
        "images turned": scores_of("top1", truth, feeds, int8.rows, _image(lambda image: np.rot90(image, 1, (2, 3)))),
        "images half covered": scores_of("top1", truth, feeds, int8.rows, _image(_half_covered)),
        "two classes exchanged": scores_of("top1", truth, feeds, lambda feed: int8.rows(feed)[:, swapped]),
    }
    draw, model = Random("flips"), onnx.load(folder / "int8.onnx")
    for number in range(flips // 3):
        words, broken = flipped(model, draw)
        faults[f"flip {number}, {words}"] = scores_of("top1", truth, feeds, Session(broken).rows)
    return "digits", terms_of(manifest, "fp32"), scores_of("top1", truth, feeds, int8.rows), faults


def _judge(
    figures: dict[str, Any],
    found: Mapping[str, tuple[AgreementTerms, Scores, Scores]],
    natural_of: Mapping[str, tuple[AgreementTerms, Scores]],
    config: dict[str, Any],
    *,
    quick: bool,
) -> None:
    seeds, months = config["seeds"], config["months"]
    rows, late, matter, missed_flips = [], 0, 0, 0
    for name, (terms, natural, faulty) in found.items():
        mean = mean_of(faulty)
        is_flip = ": flip " in name
        if mean <= terms.limit:
            missed_flips += is_flip
            if not is_flip:
                rows.append([name, f"{mean:.4f}", f"{terms.limit:.4f}", "-", "-", "no matter"])
            continue
        matter += 1
        took = delays(terms, natural, faulty, max(2, seeds // 4) if is_flip else seeds)
        late += sum(one > WITHIN for one in took) > len(took) * 0.05
        figures.setdefault("delays", {})[name] = {"mean": mean, "median": median(took), "most": max(took)}
        rows.append([name, f"{mean:.4f}", f"{terms.limit:.4f}", f"{median(took):.0f}", f"{max(took)}", ""])
    table(["fault", "mean", "limit", "median answers", "most", ""], rows)
    natural_alarms, hostile, back = 0, 0, []
    for number, (name, (terms, natural)) in enumerate(natural_of.items()):
        natural_alarms += false_alarms(terms, natural, months, number)
        hostile += hostile_alarms(terms, max(1, months // 4))
        gross = next(faulty for key, (_, _, faulty) in found.items() if key.startswith(name) and mean_of(faulty) > 0.1)
        back += returns_after(terms, natural, gross, seeds)
    lived = months * len(natural_of)
    work = {
        "half_at_edges": extra_work(3600.0 * (2 if quick else 24), 10.0, 10.0, 0.01, 20),
        "most_at_edges": extra_work(3600.0 * (2 if quick else 24), 19.0, 1.0, 0.01, 20),
        "all_at_edges": extra_work(3600.0 * (2 if quick else 24), 20.0, 0.0, 0.01, 20),
    }
    added_ns = cost_on_the_way(2_000 if quick else 100_000)
    figures |= {
        "faults_that_matter": matter,
        "flips_that_do_not_matter": missed_flips,
        "faults_found_late": late,
        "false_alarms_per_device_month": natural_alarms / lived,
        "hostile_alarms_per_device_month": hostile / (max(1, months // 4) * len(natural_of)),
        "return_after_median": median(back),
        "return_after_most": max(back),
        "pool_work": work,
        "added_ns_per_request": added_ns,
    }
    print(f"{matter} faults matter, {missed_flips} flips do not; {natural_alarms} false alarms in {lived:g} months")
    print(f"back after {median(back):.0f} answers (at most {max(back)}); pool work {work}; {added_ns:.0f} ns a request")
    report = Report("agreement", config, figures)
    report.goal(Goal("agreement_faults_found_late", float(late), 0.0, "<="))
    report.goal(Goal("agreement_false_alarms_per_device_month", natural_alarms / lived, 1.0, "<="))
    report.goal(
        Goal("agreement_hostile_alarms_per_device_month", figures["hostile_alarms_per_device_month"], 1.0, "<=")
    )
    report.goal(Goal("agreement_pool_work_ratio", work["half_at_edges"]["of_pool_work"], 0.02, "<="))
    report.write()


if __name__ == "__main__":
    main()
