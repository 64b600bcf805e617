"""A TidegateModel becomes a ConfigMap with its manifest; gateways mount that, pools the version's files as well.

The manifest is judged by the parser that the processes use. Files are not the operator's: they lie on a volume, such as
an OCI image, and the manifest that lies beside them there is the one that the pool reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tidegate.models.manifest import Manifest
from tidegate.models.repository import RepositoryError, parse_manifest
from tidegate.tools.operator.rendering.objects import MAX_CONFIG_MAP_BYTES, Object, ObjectFamily, as_yaml, digest
from tidegate.tools.operator.rendering.process_config import MODELS
from tidegate.tools.operator.resource import CustomResource, Refused
from tidegate.tools.operator.specs import TidegateModelSpec

_FILE: Final = "model.yaml"


@dataclass(frozen=True, slots=True)
class MountedModel:
    """What a pod needs of one model."""

    mounts: tuple[dict[str, Any], ...]
    volumes: tuple[dict[str, Any], ...]
    digest: str


def part_of(resource: CustomResource) -> ObjectFamily:
    return ObjectFamily(resource, f"{resource.key.name}-model", "model")


def render_model(resource: CustomResource) -> list[Object]:
    """Raises Refused."""
    return [_config_map(resource, resource.parsed(TidegateModelSpec))]


def mounted(resource: CustomResource, *, with_files: bool) -> MountedModel:
    """Return what a pod mounts of the model. Raises Refused: it is none, or a pool wants it and it has no volume."""
    spec = resource.parsed(TidegateModelSpec)
    config_map = _config_map(resource, spec)
    volume = f"model-{digest([resource.key.name])[:10]}"
    where = f"{MODELS}/{spec.model}/{spec.version}"
    if not with_files:
        return MountedModel(
            ({"name": volume, "mountPath": where, "readOnly": True},),
            ({"name": volume, "configMap": {"name": config_map["metadata"]["name"]}},),
            digest(config_map["data"]),
        )
    if spec.volume is None:
        raise Refused(
            "NoFiles", f"spec.models: the TidegateModel {resource.key.name} has no volume, so no pool can have it"
        )
    sub = {"subPath": spec.sub_path} if spec.sub_path else {}
    return MountedModel(
        ({"name": volume, "mountPath": where, "readOnly": True, **sub},),
        ({"name": volume, **spec.volume},),
        digest([spec.volume, spec.sub_path, config_map["data"]]),
    )


def manifest_of(spec: TidegateModelSpec) -> Manifest:
    """Raises Refused."""
    text = as_yaml(spec.manifest)
    if len(text.encode()) > MAX_CONFIG_MAP_BYTES:
        raise Refused(
            "InvalidManifest", f"spec.manifest has more than {MAX_CONFIG_MAP_BYTES} bytes, which no ConfigMap holds"
        )
    try:
        manifest = parse_manifest(text, Path("spec.manifest"))
    except RepositoryError as error:
        raise Refused("InvalidManifest", str(error)[:2000]) from error
    if (manifest.name, manifest.version) != (spec.model, spec.version):
        raise Refused(
            "InvalidManifest",
            f"spec.manifest is of {manifest.name} {manifest.version}, and the resource of {spec.model} {spec.version}",
        )
    return manifest


def _config_map(resource: CustomResource, spec: TidegateModelSpec) -> Object:
    manifest_of(spec)
    part = part_of(resource)
    return part.config_map({_FILE: as_yaml(spec.manifest)}, name=part.name)
