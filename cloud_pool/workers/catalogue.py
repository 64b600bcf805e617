"""The catalogue lists what a pool serves: the loadable variants of the configured models in the configured precision.

Each model is served in its highest version that has a variant for pools (`tidegate/serving/served_version.py`), in
those of them that have the configured precision, and behind them those of the further precisions, for callers that
demand them; or, if it has none of these, in all of them: the variant's name is declared in every offer and answer, so
this is never silent. A version that is damaged is passed over where the model has another one, and is among the
`problems`.

A model that is named in the configuration must be there and be right. Without names everything with a pool variant is
served that is right: what is wrong with one model is among the `problems` too, and keeps no other away.

Artefacts are verified against their digests before anything is loaded: this reads every byte of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import prod
from pathlib import Path

from cloud_pool.core.memory.device_memory import MemoryNeed, shortfall
from cloud_pool.core.memory.footprint import expected_bytes_per_unit
from cloud_pool.workers.device_worker import PoolLoadable
from tidegate.models.manifest import EngineName, Manifest, Variant
from tidegate.models.repository import Damaged, ReadManifests, Repository, RepositoryError
from tidegate.models.trust import TRUSTED
from tidegate.runtime.process import StartError
from tidegate.serving.served_version import read_version, versions_for


@dataclass(frozen=True, slots=True)
class PoolCatalogue:
    """What a pool may serve of its repository, and why not the rest of what is wanted.

    Attributes:
        loadables: verified variants, the preferred one of each model first.
        problems: by name and version, why each cannot be served.
        wrong_files: those of the problems that are of files beside the manifest, where a lower version is served.
        unfit: by name and version, why higher ones than those that are served are nothing for a pool.
    """

    loadables: tuple[PoolLoadable, ...]
    problems: Damaged
    wrong_files: Damaged = field(default_factory=dict)
    unfit: Damaged = field(default_factory=dict)

    def no_model(self, root: Path) -> StartError:
        """The error of a pool that could serve none of what is wanted."""
        reasons = "".join(f"\n{name}: {why}" for (name, _), why in sorted(self.problems.items()))
        return StartError(f"no model of {root} could be loaded:{reasons}")


def read_catalogue(
    repository: Repository,
    models: Sequence[str] | None,
    precision: str,
    also: Sequence[str] = (),
    allowed: tuple[EngineName, ...] = TRUSTED,
    *,
    check: Callable[[Manifest], None] = lambda _: None,
    or_lower: bool = True,
) -> PoolCatalogue:
    """The named models, or all that have a variant for pools and are right. Blocks.

    Args:
        check: raises StartError for a model that may not run here.
        or_lower: whether a version whose files are wrong is passed over where a lower one is right.

    Raises:
        RepositoryError: a named model is wrong, or there is nothing to serve.
        StartError: a named model does not exist, or may not run here; or none can be served.
    """
    root = repository.root

    def read(wanted: str) -> PoolCatalogue:
        found = _read_model(root, wanted, (precision, *also), allowed, or_lower)
        for one in found.loadables:
            check(one.public or one.manifest)
        return found

    found = _what_is_right(root, read) if models is None else _joined([read(one) for one in sorted(set(models))])
    if not found.loadables and found.problems:
        raise found.no_model(root)
    if not found.loadables:
        raise RepositoryError(f"{root}: no model has a variant for the pool, so there is nothing to serve")
    return found


def check_memory(loadables: Sequence[PoolLoadable], *, workers: int, limit_bytes: float, device: str) -> None:
    """Refuse to load what cannot fit. `workers`: so many on this device, each with all of it. Raises StartError."""
    needs = [
        MemoryNeed(
            one.key,
            one.variant.engine,
            weights_bytes(one.variant),
            expected_bytes_per_unit(one.manifest, one.variant) * _least_units(one.manifest),
        )
        for one in loadables
    ]
    if reason := shortfall(needs, workers=workers, limit_bytes=limit_bytes, device=device):
        raise StartError(reason)


def what_fits(
    loadables: Sequence[PoolLoadable], check: Callable[[Sequence[PoolLoadable]], None]
) -> tuple[list[PoolLoadable], list[tuple[Manifest, str]]]:
    """Those of the models that fit beside those before them, and why each other one does not.

    Args:
        check: raises StartError for what does not fit together.
    """
    fitting, others = list[PoolLoadable](), list[tuple[Manifest, str]]()
    for _, group in groupby(loadables, key=lambda one: (one.manifest.name, one.manifest.version)):
        model = list(group)
        try:
            check([*fitting, *model])
        except StartError as error:
            others.append((model[0].manifest, str(error)))
        else:
            fitting += model
    return fitting, others


def weights_bytes(variant: Variant) -> int:
    """Of its artefact, with the files beside it."""
    return variant.size_bytes + sum(one.size_bytes for one in variant.files)


def _least_units(manifest: Manifest) -> float:
    """The work of the smallest request that the manifest allows."""
    spec = next((spec for spec in manifest.inputs if spec.name == manifest.cost.input), None)
    if spec is None or manifest.cost.feature == "items":
        return 1.0
    elements = prod(entry if isinstance(entry, int) else manifest.axes[entry].min for entry in spec.shape)
    return max(1.0, float(elements * (spec.datatype.itemsize if manifest.cost.feature == "bytes" else 1)))


def _what_is_right(root: Path, read: Callable[[str], PoolCatalogue]) -> PoolCatalogue:
    """Each model with a variant for pools that can be read."""
    manifests = ReadManifests(root)
    versions, _ = manifests.look()
    parts, problems = list[PoolCatalogue](), dict(manifests.damaged)
    for name, ones in sorted(versions.items()):
        fitting, _ = versions_for("pool", ones)
        if not fitting:
            continue
        try:
            parts.append(read(name))
        except (RepositoryError, StartError) as error:
            problems[name, fitting[0].version] = str(error)
    found = _joined(parts)
    return replace(found, problems=problems | dict(found.problems))


def _joined(parts: Iterable[PoolCatalogue]) -> PoolCatalogue:
    ones = list(parts)
    loadables = {one.key: one for part in ones for one in part.loadables}
    problems = {of: why for part in ones for of, why in part.problems.items()}
    wrong_files = {of: why for part in ones for of, why in part.wrong_files.items()}
    unfit = {of: why for part in ones for of, why in part.unfit.items()}
    return PoolCatalogue(tuple(loadables.values()), problems, wrong_files, unfit)


def _read_model(
    root: Path, wanted: str, precisions: Sequence[str], allowed: tuple[EngineName, ...], or_lower: bool
) -> PoolCatalogue:
    choose = lambda manifest: _variants(manifest, precisions)  # noqa: E731
    found = read_version(root, wanted, "pool", choose, allowed, or_lower=or_lower)
    manifest, name = found.manifest, found.manifest.name
    artefacts, public = manifest.of_model, None if manifest.pipeline is None else manifest
    return PoolCatalogue(
        tuple(PoolLoadable(artefacts, one, found.repository.artefact(manifest, one), public) for one in found.variants),
        *(_of(name, reasons) for reasons in ({**found.damaged, **found.wrong_files}, found.wrong_files, found.unfit)),
    )


def _of(name: str, reasons: Mapping[str, str]) -> Damaged:
    return {(name, version): why for version, why in reasons.items()}


def _variants(manifest: Manifest, precisions: Sequence[str]) -> tuple[Variant, ...]:
    """In the order of the wishes; the first is what answers where nobody demands one."""
    here = manifest.variants_for("pool")
    found = [one for precision in dict.fromkeys(precisions) for one in here if one.precision == precision]
    return tuple(found) or here
