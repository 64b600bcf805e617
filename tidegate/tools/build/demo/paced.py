"""A paced model: the shapes of a real one and the time that it takes, with nothing behind it.

For trying out routing, deadlines, fleets and faults without models, and for benches in which two cores play a fleet.
What it takes and gives is copied from a model of the repository, or is a plain text encoder's (token ids and a mask in,
a vector out). What it costs is given in the points that scenarios of the simulator have: one file describes a fleet
for both. The engine itself is `tidegate/engines/paced.py`.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec
import yaml

from tidegate.engines.errors import EngineError
from tidegate.engines.paced import PacedModel, read_pace
from tidegate.models.digest import sha256_of
from tidegate.models.manifest import (
    Axis,
    Batching,
    Bounds,
    Cost,
    Feature,
    Manifest,
    Quality,
    TensorSpec,
    Variant,
    Where,
)
from tidegate.models.repository import Repository, save_manifest
from tidegate.tools.build.errors import BuildError
from tidegate.tools.build.staging import model_lock, staged_version
from tidegate.types import Datatype

Points = tuple[tuple[float, float], ...]
_VERSION = "1"
_LONGEST_ROW = 4096
_WIDTH = 384
_PRECISIONS: dict[Where, str] = {"edge": "int8", "pool": "fp32"}


class PacedCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What it costs where; the keys of a scenario's model. None: it does not run there."""

    edge_ms: Points | None = None
    pool_ms: Points | None = None
    feature: Feature = "tokens"
    edge_quality: float | None = None  # None: as the model that it is like, else 1
    pool_quality: float | None = None
    edge_max_units: int | None = None  # the same, else no limit
    max_batch: int = 32


@dataclass(frozen=True, slots=True)
class PacedNoise:
    """Of the logarithm of a call's time, by place, and the seed of its chance."""

    edge: float = 0.1
    pool: float = 0.05
    seed: int = 1


def add_paced(
    name: str, costs: PacedCosts, root: Path, *, like: str = "", noise: PacedNoise = PacedNoise(), force: bool = False
) -> Manifest:
    """Put a paced model into the repository at `root`. Raises BuildError, ModelNotFound, RepositoryError."""
    place = root / name / _VERSION
    if place.exists() and not force:
        raise BuildError(f"{place} exists; choose another name, or --force to replace it")
    repository = Repository(root)
    shape = repository.manifest(like) if like else text_encoder(costs.feature, costs.max_batch)
    tokenizer = repository.tokenizer(shape) if like else None
    with model_lock(root, name), staged_version(root, name, _VERSION) as folder:
        given: tuple[tuple[Where, Points | None], ...] = (("edge", costs.edge_ms), ("pool", costs.pool_ms))
        variants = tuple(
            _variant(where, cost_ms, folder, shape, costs, noise) for where, cost_ms in given if cost_ms is not None
        )
        if not variants:
            raise BuildError("it runs nowhere: give --edge-ms, --pool-ms, both, or a --scenario")
        if tokenizer is not None:
            shutil.copyfile(tokenizer, folder / tokenizer.name)
        summary = "Paced: takes the time of a model, computes nothing, answers with zeros."
        manifest = msgspec.structs.replace(shape, name=name, version=_VERSION, variants=variants, summary=summary)
        save_manifest(folder, manifest)
    return manifest


def text_encoder(feature: Feature = "tokens", max_batch: int = 32) -> Manifest:
    """Token ids and a mask in, a vector for each row out; without variants."""
    row: tuple[int | str, ...] = ("batch", "sequence")
    return Manifest(
        name="encoder",
        version=_VERSION,
        inputs=(
            TensorSpec("input_ids", Datatype.INT64, row, Bounds(0, 30521)),
            TensorSpec("attention_mask", Datatype.INT64, row, Bounds(0, 1)),
        ),
        outputs=(TensorSpec("sentence_embedding", Datatype.FP32, ("batch", _WIDTH)),),
        variants=(),
        cost=Cost(feature, "input_ids"),
        axes={"batch": Axis(1, 64), "sequence": Axis(1, _LONGEST_ROW)},
        batching=Batching(max_batch_size=max_batch, pad_axis="sequence"),
    )


def costs_of_scenario(path: Path, model: str = "") -> PacedCosts:
    """The costs of a scenario's model, which needs no name where there is one only. Raises BuildError."""
    try:
        raw: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BuildError(f"{path}: is no readable YAML: {error}") from error
    models = raw.get("models") if isinstance(raw, dict) else None
    if not isinstance(models, dict) or not models:
        raise BuildError(f"{path}: key 'models': a scenario has models with edge_ms or pool_ms")
    if not model and len(models) > 1:
        raise BuildError(f"{path}: has several models: choose one with --model ({', '.join(models)})")
    name = model or next(iter(models))
    if name not in models:
        raise BuildError(f"{path}: there is no model {name!r} (models: {', '.join(models)})")
    try:
        return msgspec.convert(models[name], PacedCosts)
    except msgspec.ValidationError as error:
        raise BuildError(f"{path}: key 'models.{name}': {error}") from error


def parse_points(flag: str, words: str) -> Points:
    """ "8:8,512:250" as points of (work units, milliseconds). Raises BuildError."""
    try:
        pairs = [pair.split(":") for pair in words.split(",")]
        points = tuple((float(units), float(ms)) for units, ms in pairs)
    except ValueError as error:
        raise BuildError(f"{flag} {words!r}: must look like UNITS:MS,UNITS:MS, with numbers") from error
    if not all(isfinite(number) for point in points for number in point):
        raise BuildError(f"{flag} {words!r}: every number must be finite")
    return points


def _variant(
    where: Where, cost_ms: Points, folder: Path, shape: Manifest, costs: PacedCosts, noise: PacedNoise
) -> Variant:
    precision = _PRECISIONS[where]
    path = folder / f"{precision}.paced.yaml"
    pace = PacedModel(
        input=shape.cost.input,
        inputs={spec.name: spec.shape for spec in shape.inputs},
        cost_ms=cost_ms,
        feature=shape.cost.feature,
        outputs=tuple(shape.outputs),
        noise_sigma=noise.edge if where == "edge" else noise.pool,
        seed=noise.seed,
    )
    path.write_text(yaml.safe_dump(msgspec.to_builtins(pace), sort_keys=False, default_flow_style=None))
    _check(path)
    edge = where == "edge"
    original = next(iter(shape.variants_for(where)), None)
    limit = costs.edge_max_units or (original.max_tokens if original is not None else None)
    quality = costs.edge_quality if edge else costs.pool_quality
    lent = original.quality if original is not None else None
    return Variant(
        name=precision,
        artefact=path.name,
        engine="paced",
        precision=precision,
        where=(where,),
        sha256=sha256_of(path),
        size_bytes=path.stat().st_size,
        quality=lent
        if quality is None and lent is not None
        else Quality("cosine", 1.0 if quality is None else quality, 1),
        # An edge computes one request at a time, so rows of a request would only make its warm-up longer.
        max_batch=1 if edge else None,
        max_tokens=_longest(shape, limit) if edge else None,
    )


def _longest(shape: Manifest, wanted: int | None) -> int | None:
    limits: Sequence[int] = [
        axis.max for entry in _counted(shape).shape[-1:] if isinstance(entry, str) and (axis := shape.axes.get(entry))
    ]
    return min([wanted, *limits]) if wanted is not None else None


def _counted(shape: Manifest) -> TensorSpec:
    return next(spec for spec in shape.inputs if spec.name == shape.cost.input)


def _check(path: Path) -> None:
    try:
        read_pace(path)
    except EngineError as error:
        raise BuildError(str(error)) from error
