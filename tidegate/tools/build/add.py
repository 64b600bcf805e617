"""A user's own model is added in four steps: inspect its artefacts, check that they agree, run them, write a manifest.

The order matters: artefacts that disagree are refused before anything is run (`agree.py`), what cannot be run as
described is refused before anything is measured (`trial.py`), and the model appears in the repository whole or not at
all.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tidegate.engines.engine import Engine, EngineError, load_engine
from tidegate.models.digest import sha256_of
from tidegate.models.example import example_arrays, least_lengths
from tidegate.models.manifest import EngineName, Manifest, Packed, Quality, Variant, Where
from tidegate.models.packing import packing_of
from tidegate.models.repository import save_manifest
from tidegate.models.trusted_digests import CODE_ENGINES, TrustedDigests
from tidegate.models.validate import problems
from tidegate.tools.build.agree import agreed_signature, disagreements
from tidegate.tools.build.draft import Draft, DraftOptions, draft
from tidegate.tools.build.errors import BuildError
from tidegate.tools.build.evaluate.compare import Metric, closeness, measured_output
from tidegate.tools.build.inspect.onnx_file import inspect_onnx
from tidegate.tools.build.inspect.onnx_weights import in_one_file
from tidegate.tools.build.inspect.signature import ModelSignature
from tidegate.tools.build.pipeline_options import check_files, parse_step, parse_tensor, with_pipeline
from tidegate.tools.build.samples import Samples, load_samples
from tidegate.tools.build.staging import check_vacant, model_lock, staged_version
from tidegate.tools.build.step_trial import try_steps
from tidegate.tools.build.trial import check_answers, edge_limits, limited_by_running, with_joining, with_padding

_MADE_UP = 8
_ENGINES: dict[str, EngineName] = {
    ".onnx": "onnx", ".pt2": "torch-export", ".pt": "torchscript", ".ts": "torchscript",
    ".safetensors": "torch-packed", ".engine": "tensorrt", ".plan": "tensorrt",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class AddRequest:
    """The options of `tidegate model add`. At least one of `edge` and `pool` is given."""

    name: str
    version: str
    edge: Path | None
    pool: Path | None
    wishes: DraftOptions
    tokenizer: Path | None = None
    outputs: tuple[str, ...] = ()
    samples: Path | None = None
    metric: Metric = "cosine"
    edge_max_batch: int | None = None
    edge_max_tokens: int | None = None
    engine: EngineName | None = None  # of the pool's artefact; None: by its suffix
    steps: tuple[str, ...] = ()  # of a pipeline around the artefacts, as `pipeline_options.py` reads them
    tensors: tuple[str, ...] = ()
    trust: bool = False  # whether the user vouches for artefacts that can run code


@dataclass(frozen=True, slots=True)
class AddedModel:
    """`notes` are sentences on what was found and chosen, in order."""

    manifest: Manifest
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _PlacedArtefact:
    """One artefact with the place it is for."""

    where: Where
    path: Path
    engine: EngineName
    signature: ModelSignature | None


def add_model(request: AddRequest, root: Path, *, force: bool = False) -> AddedModel:
    """Put the model into the repository at `root`.

    Raises:
        BuildError: an artefact cannot be read or run, artefacts disagree, or the version exists and `force` is not set.
    """
    check_vacant(root, request.name, request.version, force=force)
    trusted = TrustedDigests(root)
    with model_lock(root, request.name), ExitStack() as stack:
        check_vacant(root, request.name, request.version, force=force)  # another may have added it meanwhile
        if request.trust:  # under the lock: what one add takes off the list again, no other one of this model needs
            stack.enter_context(_trust(request, trusted))
        return _added(request, root, _parts(request, trusted, stack), trusted)


def _added(request: AddRequest, root: Path, parts: Sequence[_PlacedArtefact], trusted: TrustedDigests) -> AddedModel:
    steps = [parse_step(one) for one in request.steps]  # what is misspelt is told before anything is run
    tensors = [parse_tensor(one) for one in request.tensors]
    drafted = _drafted(request, parts)
    engines = _loaded(parts, drafted.manifest, trusted)
    notes = list(drafted.choices)
    manifest = limited_by_running(drafted, engines, notes)
    check_answers(manifest, engines)
    manifest = with_joining(manifest, engines, notes)
    manifest = with_padding(manifest, engines, notes)
    variants = _variants(request, parts, manifest, engines, notes)
    manifest = _with_digest(msgspec.structs.replace(manifest, variants=variants), request.tokenizer)
    files = {path.name: path for _, path in steps if path is not None}
    if steps or tensors:
        manifest = with_pipeline(manifest, [step for step, _ in steps], tensors, request.wishes.axes)
        check_files(manifest, files)
        if found := problems(manifest):
            raise BuildError("the steps do not fit the model:\n" + "\n".join(f"  {one}" for one in found))
        try_steps(manifest, files, engines, notes)
    _store(request, root, parts, manifest, files)
    return AddedModel(manifest, tuple(notes))


def engine_of(path: Path, wished: EngineName | None = None) -> EngineName:
    """The engine that was wished for, or else the one that runs files of this name. Raises BuildError."""
    engine = wished or _ENGINES.get(path.suffix)
    if engine is None:
        raise BuildError(f"{path}: unknown kind of artefact {path.suffix!r} (known: {', '.join(_ENGINES)})")
    if not path.is_file():
        raise BuildError(f"{path}: there is no such file")
    return engine


@contextmanager
def _trust(request: AddRequest, trusted: TrustedDigests) -> Iterator[None]:
    """Put the artefacts that can run code on the trust list, and take back what is new there if the block fails.

    A model that is added has a line in the audit log; one that is refused has none, so nothing may stay trusted for it.
    """
    model = f"{request.name}:{request.version}"
    programs = {
        sha256_of(path): f"{model} for the {where}, by model add --trust"
        for where, path, engine in _given(request)
        if engine in CODE_ENGINES
    }
    new = set(programs) - set(trusted.entries())
    trusted.add(programs)
    try:
        yield
    except BaseException:
        for digest in new:
            trusted.remove(digest)
        raise


def _parts(request: AddRequest, trusted: TrustedDigests, stack: ExitStack) -> tuple[_PlacedArtefact, ...]:
    return tuple(_part(where, path, engine, trusted, stack) for where, path, engine in _given(request))


def _part(where: Where, path: Path, engine: EngineName, trusted: TrustedDigests, stack: ExitStack) -> _PlacedArtefact:
    if engine == "onnx":
        path = stack.enter_context(in_one_file(path))
    return _PlacedArtefact(where, path, engine, _inspect(path, engine, trusted))


def _given(request: AddRequest) -> list[tuple[Where, Path, EngineName]]:
    given: list[tuple[Where, Path]] = []
    if request.edge is not None:
        given.append(("edge", request.edge))
    if request.pool is not None:
        given.append(("pool", request.pool))
    if not given:
        raise BuildError("nothing to add: give --edge, --pool or both")
    return [(where, path, engine_of(path, request.engine if where == "pool" else None)) for where, path in given]


def _inspect(path: Path, engine: EngineName, trusted: TrustedDigests) -> ModelSignature | None:
    if engine == "onnx":
        return inspect_onnx(path)
    if engine == "torch-export":
        try:
            from tidegate.tools.build.inspect.exported_program import inspect_program
        except ImportError as error:
            raise BuildError(f"{path} needs PyTorch: pip install 'tidegate[cloud]'") from error
        return inspect_program(path, trusted)
    if engine == "torch-packed":
        try:
            from tidegate.tools.build.inspect.packed_weights import inspect_packed
        except ImportError as error:
            raise BuildError(f"{path} needs PyTorch and safetensors: pip install 'tidegate[cloud]'") from error
        return inspect_packed(path)
    if engine == "tensorrt":
        _loads(path, engine)
    return None  # TorchScript does not say


def _drafted(request: AddRequest, parts: Sequence[_PlacedArtefact]) -> Draft:
    signatures = [part.signature for part in parts if part.signature is not None]
    if not signatures:
        raise BuildError(f"{parts[0].path.name}: TorchScript does not say what it takes; add it beside an ONNX --edge")
    if found := disagreements(signatures):
        raise BuildError("the artefacts disagree:\n" + "\n".join(f"  {one}" for one in found))
    count = len(signatures[0].outputs)
    if request.outputs and len(request.outputs) != count:
        raise BuildError(f"--output: {len(request.outputs)} names for {count} outputs")
    for part in parts:
        if part.engine == "onnx" and part.signature and request.outputs:
            _check_onnx_names(part.signature, request.outputs)
    return draft(request.name, request.version, agreed_signature(signatures, request.outputs), request.wishes)


def _check_onnx_names(signature: ModelSignature, names: Sequence[str]) -> None:
    own = [port.name for port in signature.outputs]
    if own != list(names):
        raise BuildError(f"--output: {signature.source} itself names its outputs {', '.join(own)}")


def _loaded(parts: Sequence[_PlacedArtefact], manifest: Manifest, trusted: TrustedDigests) -> dict[Where, Engine]:
    outputs = tuple(spec.name for spec in manifest.outputs)
    try:
        return {
            part.where: load_engine(
                part.engine,
                part.path,
                outputs=outputs,
                packing=packing_of(manifest, _packed(part, manifest)),
                trusted=trusted,
            )
            for part in parts
        }
    except EngineError as error:
        raise BuildError(str(error)) from error


def _loads(path: Path, engine: EngineName) -> None:
    """Raise BuildError with the engine's own words where it does not."""
    try:
        load_engine(engine, path, outputs=())
    except EngineError as error:
        raise BuildError(str(error)) from error


def _packed(part: _PlacedArtefact, manifest: Manifest) -> Packed | None:
    """What packed weights take: fixed, but for the name of the axis, which another artefact may have given."""
    mask = next((spec for spec in manifest.inputs if spec.name == "attention_mask"), None)
    if part.engine != "torch-packed" or mask is None or not isinstance(mask.shape[-1], str):
        return None
    return Packed(mask.shape[-1], mask=mask.name)


def _variants(
    request: AddRequest,
    parts: Sequence[_PlacedArtefact],
    manifest: Manifest,
    engines: Mapping[Where, Engine],
    notes: list[str],
) -> tuple[Variant, ...]:
    qualities = _qualities(request, manifest, engines, notes)
    names: list[str] = []
    variants = []
    for part in parts:
        precision = part.signature.precision if part.signature else "fp32"
        names.append(precision if precision not in names else f"{precision}-{part.where}")
        limits = _limits(request, manifest, engines["edge"], notes) if part.where == "edge" else (None, None)
        variants.append(
            Variant(
                name=names[-1],
                artefact=f"{part.where}{part.path.suffix}",
                engine=part.engine,
                precision=precision,
                where=(part.where,),
                sha256=sha256_of(part.path),
                size_bytes=part.path.stat().st_size,
                quality=qualities.get(part.where),
                max_batch=limits[0],
                max_tokens=limits[1],
                packed=_packed(part, manifest),
            )
        )
    return tuple(variants)


def _limits(request: AddRequest, manifest: Manifest, engine: Engine, notes: list[str]) -> tuple[int | None, int | None]:
    return edge_limits(manifest, engine, notes, max_batch=request.edge_max_batch, max_tokens=request.edge_max_tokens)


def _qualities(
    request: AddRequest, manifest: Manifest, engines: Mapping[Where, Engine], notes: list[str]
) -> dict[Where, Quality]:
    """Measured on the user's samples, against their labels or the pool. Made-up inputs are for the eye only."""
    inputs, output = [spec.name for spec in manifest.inputs], measured_output(manifest)
    samples = load_samples(request.samples, inputs) if request.samples else None
    by_label = request.metric == "top1" and samples is not None and samples.labels is not None
    if len(engines) < 2 and not by_label:
        return {}
    if output is None:
        notes.append("quality: not measured, since no output is of numbers")
        return {}
    edge, pool = engines.get("edge", engines.get("pool")), engines.get("pool", engines.get("edge"))
    assert edge is not None and pool is not None  # there is at least one engine
    lengths = least_lengths(manifest)
    measured = samples or Samples(tuple(example_arrays(manifest, lengths, seed) for seed in range(_MADE_UP)))
    labels = measured.labels if by_label else None
    try:
        found = closeness(pool, edge, measured.feeds, output=output, metric=request.metric, labels=labels)
    except EngineError as error:
        raise BuildError(f"{request.samples or 'made-up inputs'}: {error}") from error
    if samples is None:
        notes.append(
            f"edge against pool on made-up inputs: {found.metric} {found.value:.4f}; "
            "for a quality in the manifest give real ones (--samples x.npz)"
        )
        return {}
    values: dict[Where, float] = {"edge": found.value, "pool": 1.0 if found.reference is None else found.reference}
    told = f"on {found.samples} samples of {output.name}"
    notes += [f"{where}: {found.metric} {values[where]:.4f} {told}" for where in engines]
    return {where: Quality(found.metric, round(values[where], 5), found.samples) for where in engines}


def _with_digest(manifest: Manifest, tokenizer: Path | None) -> Manifest:
    if manifest.text is None or tokenizer is None:
        return manifest
    return msgspec.structs.replace(manifest, text=msgspec.structs.replace(manifest.text, sha256=sha256_of(tokenizer)))


def _store(
    request: AddRequest,
    root: Path,
    parts: Sequence[_PlacedArtefact],
    manifest: Manifest,
    files: Mapping[str, Path],
) -> None:
    with staged_version(root, request.name, request.version) as folder:
        for part, variant in zip(parts, manifest.variants, strict=True):
            shutil.copyfile(part.path, folder / variant.artefact)
            _check_copy(folder / variant.artefact, variant.sha256, part.path)
        for one in manifest.step_files:
            shutil.copyfile(files[one.name], folder / one.name)
            _check_copy(folder / one.name, one.sha256, files[one.name])
        if request.tokenizer is not None:
            shutil.copyfile(request.tokenizer, folder / request.tokenizer.name)
            if manifest.text is not None and manifest.text.sha256 is not None:
                _check_copy(folder / request.tokenizer.name, manifest.text.sha256, request.tokenizer)
        save_manifest(folder, manifest)


def _check_copy(copied: Path, sha256: str, source: Path) -> None:
    if sha256_of(copied) != sha256:
        raise BuildError(f"{source}: changed while it was being added; add it again when it is written")
