"""The plan of a model version is made from its folder, the operator's options, and golden cases if there are any."""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tidegate.models.array_files import load_npz
from tidegate.models.manifest import Manifest
from tidegate.models.repository import Repository, RepositoryError
from tidegate.rollout.golden_prompts import BadGoldenPrompts, decode_prompts
from tidegate.rollout.plan import MANIFEST_PATH, ModelPlan
from tidegate.storage.scratch_folder import ScratchFolder
from tidegate.tools.delivery.files import LocalArtefact, files_of, local_artefact

GOLDEN_NAME: Final = "golden.msgpack"


def plan_of(files: tuple[LocalArtefact, ...], version: str, **rules: Any) -> ModelPlan:
    """The plan of a version with these files; `rules` as `ModelPlan` has them."""
    manifest = next(one.artefact.sha256 for one in files if one.artefact.path == MANIFEST_PATH)
    return ModelPlan(version=version, manifest=manifest, files=tuple(one.artefact for one in files), **rules)


def version_files(repository: Repository, name: str, version: str) -> tuple[Manifest, tuple[LocalArtefact, ...]]:
    """Raises RepositoryError, ModelNotFound."""
    manifest = repository.manifest(name, version)
    return manifest, files_of(repository, manifest)


def recorded_golden(repository: Repository, manifest: Manifest) -> LocalArtefact | None:
    """The golden prompts that were recorded with the variant for edges; None of a model that has none.

    Raises:
        RepositoryError: they are not as the manifest says.
    """
    file = next((one.golden for one in manifest.variants_for("edge") if one.golden is not None), None)
    if file is None:
        return None
    path = repository.folder(manifest) / file.name
    found = golden_of(path, manifest)
    if found.artefact.sha256 != file.sha256:
        way = f"`tidegate model golden {manifest.name}` records them anew"
        raise RepositoryError(f"{path}: are not the golden prompts that the manifest names; {way}")
    return found


def golden_of(path: Path, manifest: Manifest) -> LocalArtefact:
    """The golden cases in a file: .npz with an array for each input and output, or the artefact itself.

    Of a model that generates, the file that `tidegate model golden` writes.

    Raises:
        RepositoryError: it holds none that fit the model.
    """
    # It takes numpy, which no help needs.
    from tidegate.rollout.golden import MAX_GOLDEN_BYTES, decode_golden

    try:
        if path.suffix == ".npz" and manifest.generative is None:
            raw = _from_arrays(path, manifest)
        else:
            with path.open("rb") as file:
                raw = file.read(MAX_GOLDEN_BYTES + 1)
        if manifest.generative is None:
            decode_golden(raw)
        else:
            decode_prompts(raw, manifest.generative)
    except BadGoldenPrompts as error:
        way = f"`tidegate model golden {manifest.name} --out FILE` writes golden prompts"
        raise RepositoryError(f"{path}: {error}; {way}") from error
    except (OSError, ValueError) as error:
        raise RepositoryError(f"{path}: no golden cases: {error}") from error
    scratch = ScratchFolder.make("tidegate-golden-")
    atexit.register(scratch.remove)  # it is sent once the plan is made
    kept = scratch.files / GOLDEN_NAME
    kept.write_bytes(raw)
    return local_artefact(kept, GOLDEN_NAME)


def _from_arrays(path: Path, manifest: Manifest) -> bytes:
    from tidegate.rollout.golden import MAX_GOLDEN_BYTES, encode_golden

    arrays: Mapping[str, Any] = load_npz(path, most_bytes=MAX_GOLDEN_BYTES)
    datatypes = {spec.name: spec.datatype for spec in (*manifest.inputs, *manifest.outputs)}
    inputs = {spec.name: arrays[spec.name] for spec in manifest.inputs if spec.name in arrays}
    outputs = {spec.name: arrays[spec.name] for spec in manifest.outputs if spec.name in arrays}
    lacking = [spec.name for spec in manifest.inputs if spec.name not in arrays and not spec.optional]
    if lacking or not outputs or set(arrays) - set(datatypes):
        wanted = ", ".join(datatypes)
        raise ValueError(
            f"it has the arrays {', '.join(arrays) or 'none'}; the model's inputs and outputs are {wanted}"
        )
    return encode_golden([(inputs, outputs)], datatypes)
