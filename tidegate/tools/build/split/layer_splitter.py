"""`tidegate model split-layers`: cut a model, measure its halves and what travels between them, and write all of it.

    1  find the cuts of the fp32 graph (`graph_cut.py`), see their shapes (`observation.py`), keep some
       (`cut_choice.py`)
    2  for each, make the halves with each way to compress the tensor (`activation_codec.py`), and run them on samples:
       the mean cosine of the answers to the whole's is the cut's, and the cheapest way that is close enough is kept
    3  time the whole and the halves, interleaved on one thread
    4  write the halves as models of their own, and the section `split` into the model's manifest, last

The head is cut from what edges run as well, where that is an ONNX file with the same tensor: its int8 weights are then
the ones that were measured before. Its quality is of both halves together, so that a caller's demand for a quality
holds for an answer that came through the cut.

A build that is cut off leaves halves that no manifest names, or names of halves that were there before; the next one
replaces them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal

import msgspec
import numpy as np
import onnx
from numpy.typing import NDArray

from tidegate.engines.engine import Engine, EngineError, load_engine
from tidegate.models.digest import sha256_of
from tidegate.models.example import example_arrays, least_lengths
from tidegate.models.manifest import Batching, Cost, Manifest, Quality, TensorSpec, Variant, Where
from tidegate.models.repository import Repository, save_manifest
from tidegate.models.split.layer_split import UNCUT, Activation, LayerSplit, SplitCut, SplitHalf, SplitTimes
from tidegate.tools.build.draft import batch_axis, mask_of, row_axis
from tidegate.tools.build.errors import BuildError
from tidegate.tools.build.evaluate.measure import cosines, interleaved_s, top1
from tidegate.tools.build.inspect.onnx_file import is_quantized
from tidegate.tools.build.inspect.onnx_weights import load_onnx
from tidegate.tools.build.progress import Progress
from tidegate.tools.build.samples import load_samples
from tidegate.tools.build.split.activation_codec import ACTIVATION, activation_specs, compress, decompress
from tidegate.tools.build.split.cut_choice import FoundCut, chosen_cuts
from tidegate.tools.build.split.graph_cut import cut_tensors, head_of, tail_of
from tidegate.tools.build.split.observation import (
    Arrays,
    multiplications,
    products,
    shape_of,
    tensors_of,
    two_runs,
)
from tidegate.tools.build.staging import model_lock, staged_version

LEAST_COSINE: Final = 0.99
_CHEAPEST_FIRST: Final[tuple[Activation, ...]] = ("int8", "fp16", "fp32")
_MADE_UP: Final = 16
_MOST_SAMPLES: Final = 256
_TYPICAL_LENGTH: Final = 64
_HEAD_FILE, _TAIL_FILE = "head", "tail"

HeadPrecision = Literal["auto", "fp32"]


@dataclass(frozen=True, slots=True)
class SplitOptions:
    """What the user asks for; None and empty: chosen."""

    source: Path | None = None  # the fp32 ONNX file; None: of the model's variants
    layers: tuple[str, ...] = ()
    most: int = 4
    activation: Activation | None = None
    head: HeadPrecision = "auto"
    least_cosine: float = LEAST_COSINE
    samples: Path | None = None


@dataclass(frozen=True, slots=True)
class CutReport:
    """One cut that was built, with the mean cosine of each way to compress its tensor."""

    cut: SplitCut
    cosines: Mapping[Activation, float]


@dataclass(frozen=True, slots=True)
class SplitResult:
    """`manifest` is the model's own, with its section `split`."""

    manifest: Manifest
    cuts: tuple[CutReport, ...]
    whole_bytes: int  # of the inputs of one row, to compare with
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _BuiltHalf:
    """A half's graph with its manifest, whose variants have no digests yet."""

    manifest: Manifest
    graphs: Mapping[str, onnx.ModelProto]  # by variant


def split_layers(
    repository: Repository, name: str, options: SplitOptions, progress: Progress, *, version: str = ""
) -> SplitResult:
    """Cut the model in the repository, and write the halves and its manifest. Blocks for as long as it measures.

    Raises:
        BuildError: there is no graph to cut, it has no cut, or a named layer is none.
        ModelNotFound, RepositoryError: the model is not there, or its artefacts are not what its manifest says.
    """
    manifest = repository.manifest(name, version)
    _check_can_be_cut(manifest)
    splitter = _LayerSplitter(repository, manifest, options)
    try:
        return splitter.build(progress)
    except EngineError as error:
        raise BuildError(f"{name}, version {manifest.version}, cannot be cut: {error}") from error


def _check_can_be_cut(manifest: Manifest) -> None:
    for key in UNCUT:  # first of all: halves of a model that may have none would stay without it
        if getattr(manifest, key) is not None:
            raise BuildError(f"{manifest.name}: a model with the key {key!r} is not cut")
    rows, row = batch_axis(manifest), row_axis(manifest)
    inputs = {entry for spec in manifest.inputs for entry in spec.shape if isinstance(entry, str)}
    if loose := sorted(inputs - {rows, row}):
        raise BuildError(
            f"{manifest.name}: the axis {loose[0]!r} varies, and the work of the tail would not follow from the work "
            f"of the whole: fix its length in the export"
        )


class _LayerSplitter:
    """One model on its way to halves: what was read of it, and what it is compared on."""

    def __init__(self, repository: Repository, manifest: Manifest, options: SplitOptions) -> None:
        self._repository = repository
        self._manifest = manifest
        self._options = options
        self._path = _source(repository, manifest, options)
        self._model = load_onnx(self._path)
        self._runs = two_runs(manifest)
        self._notes: list[str] = []

    def build(self, progress: Progress) -> SplitResult:
        manifest, options = self._manifest, self._options
        progress("looking for cuts", 0.0)
        chosen = self._chosen(self._found())
        whole = _loaded(self._model)
        feeds = self._feeds()
        truth = [whole.infer(feed) for feed in feeds]
        edges = dict(self._edge_graphs())
        reports: list[CutReport] = []
        halves: list[_BuiltHalf] = []
        for number, cut in enumerate(chosen, start=1):
            progress(f"cutting at {cut.tensor}", number / (len(chosen) + 1))
            report, pair = self._built(cut, number, edges, whole, feeds, truth)
            reports.append(report)
            halves.extend(pair)
        split = LayerSplit(tuple(report.cut for report in reports))
        manifest = msgspec.structs.replace(manifest, split=split)
        for half in halves:
            _write(self._repository.root, half)
        with model_lock(self._repository.root, manifest.name):
            save_manifest(self._repository.folder(manifest), manifest)
        self._remove_others(split)
        if options.samples is None:
            self._notes.append("compared on made-up inputs; real ones are better: --samples FILE.npz")
        return SplitResult(manifest, tuple(reports), _bytes_of(feeds[0]), tuple(self._notes))

    def _remove_others(self, split: LayerSplit) -> None:
        """Remove the halves of earlier builds that the manifest names no more: targets would load them for nothing."""
        whole, root = self._manifest, self._repository.root
        named = {name for cut in split.cuts for name in (cut.head, cut.tail)}
        for one in self._repository.manifests():  # as they were before
            is_ours = one.half is not None and one.half.of == whole.name and one.name.startswith(f"{whole.name}.")
            if is_ours and one.version == whole.version and one.name not in named:
                with model_lock(root, one.name):
                    shutil.rmtree(root / one.name / one.version, ignore_errors=True)

    # finding

    def _found(self) -> tuple[FoundCut, ...]:
        graph, runs = self._model.graph, self._runs
        names = cut_tensors(graph, self._manifest.cost.input, self._path)
        if not names:
            raise BuildError(
                f"{self._path}: no tensor separates {self._manifest.cost.input!r} from the outputs: there is no cut"
            )
        counted = products(graph)
        made = {name for node in graph.node for name in node.output}
        watched = {*names, *(node.output[0] for node in counted)}
        watched |= {name for node in counted for name in node.input[:2] if name in made}
        first = tensors_of(self._model, sorted(watched), self._manifest, runs.first)
        second = tensors_of(self._model, names, self._manifest, runs.second)
        seen = {name: tuple(array.shape) for name, array in first.items()}
        seen |= {one.name: tuple(one.dims) for one in graph.initializer}
        seen |= {name: tuple(a.shape) for name, a in example_arrays(self._manifest, runs.first).items()}
        shares = _shares(graph, seen)
        found = []
        for name in names:
            shape = shape_of(first[name], second[name], runs)
            if shape is not None and (not isinstance(shape[0], int) or batch_axis(self._manifest) is None):
                elements = first[name].size // max(1, first[name].shape[0])
                found.append(FoundCut(name, shape, elements, shares[name]))
        return tuple(found)

    def _chosen(self, found: tuple[FoundCut, ...]) -> tuple[FoundCut, ...]:
        by_name = {one.tensor: one for one in found}
        if self._options.layers:
            for layer in self._options.layers:
                if layer not in by_name:
                    some = ", ".join(list(by_name)[:12]) + (", …" if len(by_name) > 12 else "")
                    raise BuildError(f"--layer {layer!r}: the model cannot be cut there (it can at {some or 'none'})")
            return tuple(sorted((by_name[one] for one in set(self._options.layers)), key=lambda one: one.head_share))
        chosen = chosen_cuts(found, self._options.most)
        if not chosen:
            raise BuildError(f"{self._path}: every cut has all of the work on one side; name one with --layer")
        self._notes.append(f"{len(found)} tensors can be cut at; {len(chosen)} of them are apart in work and small")
        return chosen

    def _edge_graphs(self) -> Iterator[tuple[Variant, onnx.ModelProto]]:
        """What edges run of the whole, where that is a graph, and else the source by itself."""
        if self._options.head == "auto":
            for variant in self._manifest.variants_for("edge"):
                path = self._repository.artefact(self._manifest, variant)
                if variant.engine == "onnx" and path != self._path:
                    self._repository.verify(self._manifest, variant)
                    yield variant, load_onnx(path)
        yield _unwritten("fp32", "edge"), self._model

    # samples

    def _feeds(self) -> list[Arrays]:
        names = [spec.name for spec in self._manifest.inputs if not spec.optional]
        if self._options.samples is not None:
            return list(load_samples(self._options.samples, names, most=_MOST_SAMPLES).feeds)
        row, lengths = row_axis(self._manifest), least_lengths(self._manifest)
        if row is not None:
            lengths[row] = max(self._manifest.axes[row].min, min(_TYPICAL_LENGTH, self._manifest.axes[row].max))
        return [example_arrays(self._manifest, lengths, seed) for seed in range(_MADE_UP)]

    # building

    def _built(
        self,
        found: FoundCut,
        number: int,
        edges: Mapping[Variant, onnx.ModelProto],
        whole: Engine,
        feeds: Sequence[Arrays],
        truth: Sequence[Arrays],
    ) -> tuple[CutReport, tuple[_BuiltHalf, _BuiltHalf]]:
        activation, tried = self._activation(found, feeds, truth)
        trials = self._trials(found, activation, edges)
        heads = tuple(self._head_variant(variant, trial, feeds, truth) for variant, trial in trials)
        shown = trials[0][1]
        names = f"{self._manifest.name}.head-{number}", f"{self._manifest.name}.tail-{number}"
        per_row, per_unit = self._bytes(shown)
        cut = SplitCut(
            layer=found.tensor,
            head=names[0],
            tail=names[1],
            activation=activation,
            bytes_per_row=per_row,
            bytes_per_unit=per_unit,
            head_share=round(found.head_share, 4),
            cosine=round(min(1.0, shown.cosine(feeds, truth)), 6),
            samples=len(feeds),
            measured=shown.times_ms(whole, feeds[0]),
        )
        head = self._head_manifest(names[0], shown, heads)
        tail = self._tail_manifest(names[1], shown, tried[activation], len(feeds))
        graphs = {variant.name: trial.head for variant, trial in trials}
        return CutReport(cut, tried), (_BuiltHalf(head, graphs), _BuiltHalf(tail, {"fp32": shown.tail}))

    def _activation(
        self, found: FoundCut, feeds: Sequence[Arrays], truth: Sequence[Arrays]
    ) -> tuple[Activation, dict[Activation, float]]:
        """The cheapest way to compress the tensor that is close enough, or the one that was asked for, and what each of
        those tried gave."""
        wished, tried = self._options.activation, dict[Activation, float]()
        for activation in (wished,) if wished is not None else _CHEAPEST_FIRST:
            if activation == "fp32" and wished is None and max(tried.values()) >= self._options.least_cosine:
                break
            tried[activation] = _Trial(self._model, self._model, found, activation).cosine(feeds, truth)
        good = [one for one in tried if tried[one] >= self._options.least_cosine]
        return wished or (good[0] if good else "fp32"), tried

    def _trials(
        self, found: FoundCut, activation: Activation, edges: Mapping[Variant, onnx.ModelProto]
    ) -> list[tuple[Variant, _Trial]]:
        """The cut of each graph that edges run; of the source, where none of them has the tensor."""
        trials: list[tuple[Variant, _Trial]] = []
        for variant, graph in edges.items():
            if graph is self._model:
                if not trials:
                    trials.append((variant, _Trial(graph, self._model, found, activation)))
            elif found.tensor in cut_tensors(graph.graph, self._manifest.cost.input, Path(variant.artefact)):
                trials.append((variant, _Trial(graph, self._model, found, activation)))
            else:
                self._notes.append(f"{found.tensor}: {variant.name} has no such tensor, so its head is not cut from it")
        return trials

    def _head_variant(
        self, variant: Variant, trial: _Trial, feeds: Sequence[Arrays], truth: Sequence[Arrays]
    ) -> Variant:
        return msgspec.structs.replace(
            variant,
            artefact=f"{_HEAD_FILE}-{variant.name}.onnx",
            where=("edge",),
            precision="int8" if is_quantized(trial.head.graph) else "fp32",
            files=(),
            quality=self._quality(trial, feeds, truth),
        )

    def _quality(self, trial: _Trial, feeds: Sequence[Arrays], truth: Sequence[Arrays]) -> Quality:
        """Of both halves' answers, in the measure in which the whole's variants are measured."""
        known = [one.quality for one in self._manifest.variants if one.quality is not None]
        if known and known[0].metric == "top1":
            best = max(one.value for one in known)
            share = trial.agreement(feeds, truth)
            return Quality("top1", round(best * share, 5), len(feeds), how="agreement with the whole, times its own")
        return Quality("cosine", round(min(1.0, trial.cosine(feeds, truth)), 5), len(feeds), how="to the whole model")

    def _bytes(self, trial: _Trial) -> tuple[float, float]:
        """(bytes of a row, bytes of a unit of the whole's work) that travel, from two lengths."""
        feature, name = self._manifest.cost.feature, self._manifest.cost.input
        points = []
        for lengths in self._runs:
            feed = example_arrays(self._manifest, lengths)
            rows = feed[name].shape[0] if feed[name].ndim else 1
            units = {"items": float(rows), "bytes": float(feed[name].nbytes)}.get(feature, float(feed[name].size))
            points.append((units / rows, _bytes_of(trial.between(feed)) / rows))
        (units, size), (other_units, other_size) = points
        slope = (other_size - size) / (other_units - units) if other_units != units else 0.0
        return round(size - slope * units, 3), round(slope, 6)

    def _head_manifest(self, name: str, trial: _Trial, variants: tuple[Variant, ...]) -> Manifest:
        whole = self._manifest
        taken = {one.name for one in trial.head.graph.input}
        inputs = tuple(spec for spec in whole.inputs if spec.name in taken)
        return _half_of(whole, name, "head", inputs, activation_specs(trial.found.shape, trial.activation), variants)

    def _tail_manifest(self, name: str, trial: _Trial, cosine: float, samples: int) -> Manifest:
        whole = self._manifest
        taken = {one.name for one in trial.tail.graph.input}
        carried = tuple(spec for spec in whole.inputs if spec.name in taken)
        inputs = (*activation_specs(trial.found.shape, trial.activation), *carried)
        quality = Quality("cosine", round(min(1.0, cosine), 5), samples, how="to the whole model")
        variant = msgspec.structs.replace(
            _unwritten("fp32", "pool"), artefact=f"{_TAIL_FILE}-fp32.onnx", quality=quality
        )
        made = _half_of(whole, name, "tail", inputs, whole.outputs, (variant,))
        mask = mask_of(whole)
        if mask is not None and mask.name in taken and whole.cost.feature == "tokens":
            return msgspec.structs.replace(made, cost=Cost("tokens", mask.name))
        batching = msgspec.structs.replace(made.batching, max_work=None, pad_axis=None)
        return msgspec.structs.replace(made, cost=Cost("items", ACTIVATION), batching=batching)


class _Trial:
    """Both halves of one cut, loaded, with one way to compress what is between them."""

    def __init__(self, head: onnx.ModelProto, tail: onnx.ModelProto, found: FoundCut, activation: Activation) -> None:
        self.found, self.activation = found, activation
        self.head, self.tail = head_of(head, found.tensor), tail_of(tail, found.tensor)
        compress(self.head, found.tensor, found.shape, activation)
        decompress(self.tail, found.tensor, found.shape, activation)
        self._engines = _loaded(self.head), _loaded(self.tail)
        self._answers: list[Mapping[str, NDArray[Any]]] | None = None

    def between(self, feed: Arrays) -> dict[str, NDArray[Any]]:
        """What the tail takes for this input of the whole."""
        head, _ = self._engines
        given = {**feed, **head.infer({one.name: feed[one.name] for one in self.head.graph.input})}
        return {one.name: given[one.name] for one in self.tail.graph.input}

    def answers(self, feeds: Sequence[Arrays]) -> list[Mapping[str, NDArray[Any]]]:
        if self._answers is None:
            self._answers = [self._engines[1].infer(self.between(feed)) for feed in feeds]
        return self._answers

    def cosine(self, feeds: Sequence[Arrays], truth: Sequence[Arrays]) -> float:
        """The mean over rows and outputs."""
        found = [
            cosines(np.atleast_2d(wanted[name]), np.atleast_2d(answer[name]))
            for wanted, answer in zip(truth, self.answers(feeds), strict=True)
            for name in wanted
        ]
        return float(np.concatenate(found).mean())

    def agreement(self, feeds: Sequence[Arrays], truth: Sequence[Arrays]) -> float:
        """The share of rows whose highest score is the whole's, in the first output."""
        name = next(iter(truth[0]))
        wanted = np.concatenate([one[name] for one in truth])
        return top1(np.concatenate([one[name] for one in self.answers(feeds)]), wanted.argmax(axis=-1))

    def times_ms(self, whole: Engine, feed: Arrays) -> SplitTimes:
        head, tail = self._engines
        taken = {one.name: feed[one.name] for one in self.head.graph.input}
        between = self.between(feed)
        seconds = interleaved_s(
            {"whole": lambda: whole.infer(feed), "head": lambda: head.infer(taken), "tail": lambda: tail.infer(between)}
        )
        return SplitTimes(*(round(seconds[name] * 1e3, 4) for name in ("whole", "head", "tail")))

    def __repr__(self) -> str:
        return f"<_Trial {self.found.tensor} as {self.activation}>"


def _unwritten(name: str, where: Where) -> Variant:
    """A variant whose artefact is not on the disk yet."""
    return Variant(
        name=name, artefact="", engine="onnx", precision="fp32", where=(where,), sha256="0" * 64, size_bytes=0
    )


def _half_of(
    whole: Manifest,
    name: str,
    role: Literal["head", "tail"],
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    variants: tuple[Variant, ...],
) -> Manifest:
    entries = {entry for spec in (*inputs, *outputs) for entry in spec.shape}
    batching = whole.batching
    if batching.pad_axis is not None and batching.pad_axis not in {entry for spec in inputs for entry in spec.shape}:
        batching = msgspec.structs.replace(batching, pad_axis=None)
    return Manifest(
        name=name,
        version=whole.version,
        summary=f"The {role} of {whole.name}, cut between layers.",
        inputs=inputs,
        outputs=outputs,
        variants=variants,
        cost=whole.cost,
        axes={axis: limits for axis, limits in whole.axes.items() if axis in entries},
        default_budget_s=whole.default_budget_s,
        batching=batching if role == "tail" else Batching(max_batch_size=batching.max_batch_size),
        pin=whole.pin if whole.pin != "edge-input" else "edge" if role == "head" else "any",
        require=whole.require,
        half=SplitHalf(whole.name, role),
        modality=whole.kind,
        cacheable=False,
    )


def _source(repository: Repository, manifest: Manifest, options: SplitOptions) -> Path:
    if options.source is not None:
        if not options.source.is_file():
            raise BuildError(f"{options.source}: there is no such file")
        return options.source
    for variant in manifest.variants:
        path = repository.artefact(manifest, variant)
        if variant.engine == "onnx" and variant.precision == "fp32" and path.is_file():
            repository.verify(manifest, variant)
            return path
    raise BuildError(
        f"{manifest.name}, version {manifest.version}, has no fp32 ONNX variant to cut: give its graph with "
        "--from FILE.onnx"
    )


def _shares(graph: onnx.GraphProto, seen: Mapping[str, tuple[int, ...]]) -> dict[str, float]:
    """By tensor: the share of all multiplications that its ancestors have, about: of the nodes up to its own."""
    counted = {node.output[0] for node in products(graph)}
    work = [multiplications(node, seen) if node.output[0] in counted else 0 for node in graph.node]
    work = work if any(work) else [1] * len(work)
    shares: dict[str, float] = {}
    total, done = sum(work), 0
    for node, one in zip(graph.node, work, strict=True):
        done += one
        shares |= dict.fromkeys(node.output, done / total)
    return shares


def _loaded(model: onnx.ModelProto) -> Engine:
    with TemporaryDirectory(prefix="tidegate-split-") as folder:
        path = Path(folder) / "half.onnx"
        path.write_bytes(model.SerializeToString())
        return load_engine("onnx", path, outputs=())


def _bytes_of(arrays: Arrays) -> int:
    return sum(array.nbytes for array in arrays.values())


def _write(root: Path, half: _BuiltHalf) -> None:
    manifest = half.manifest
    with model_lock(root, manifest.name), staged_version(root, manifest.name, manifest.version) as folder:
        variants = []
        for variant in manifest.variants:
            path = folder / variant.artefact
            path.write_bytes(half.graphs[variant.name].SerializeToString())
            variants.append(msgspec.structs.replace(variant, sha256=sha256_of(path), size_bytes=path.stat().st_size))
        save_manifest(folder, msgspec.structs.replace(manifest, variants=tuple(variants)))
