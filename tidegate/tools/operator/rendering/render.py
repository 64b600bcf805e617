"""A resource, with the resources that it names, becomes Kubernetes objects (pure but for the configuration models)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidegate.tools.operator.conditions import ResourceCondition
from tidegate.tools.operator.rendering.fleet import render_fleet
from tidegate.tools.operator.rendering.gateway import render_gateway
from tidegate.tools.operator.rendering.model import MountedModel, manifest_of, mounted, render_model
from tidegate.tools.operator.rendering.objects import Object, digest
from tidegate.tools.operator.rendering.pool import render_pool
from tidegate.tools.operator.resource import CustomResource, Refused, ResourceKey
from tidegate.tools.operator.specs import TidegateModelSpec


@dataclass(frozen=True, slots=True)
class Rendered:
    """What a resource becomes, in the order in which it is applied, and what its status says of it.

    Attributes:
        conditions: beside `Accepted` and `Ready`; a message says what was asked for and left out.
    """

    objects: list[Object]
    fields: Mapping[str, Any]
    conditions: Sequence[ResourceCondition] = ()


def render(resource: CustomResource, known: Mapping[ResourceKey, CustomResource]) -> Rendered:
    """Return the objects of a resource; a rollout has none.

    Args:
        known: every resource that there is, for those that are named.

    Raises:
        Refused: it cannot be rendered, with the reason.
    """
    match resource.key.kind:
        case "TidegateGateway":
            objects, monitored = render_gateway(resource, _models(resource, known, with_files=False))
            return Rendered(objects, {}, [monitored])
        case "TidegatePool":
            gateway = next(
                (known[key] for key in resource.named if key in known and key.kind == "TidegateGateway"), None
            )
            objects, conditions = render_pool(resource, _models(resource, known, with_files=True), gateway)
            return Rendered(objects, {}, conditions)
        case "TidegateModel":
            return _rendered_model(resource, known)
        case "TidegateFleet":
            objects, checksum, monitored = render_fleet(resource)
            return Rendered(objects, {"configHash": checksum}, [monitored])
    return Rendered([], {})


def mentions(key: ResourceKey, known: Iterable[CustomResource]) -> Iterator[ResourceKey]:
    """The resources that change when this one does.

    Those that mount a model, the models that they mount, and the pools that a gateway scales.
    """
    for one in known:
        if one.key.namespace != key.namespace or one.key == key:
            continue
        if key in one.named:
            yield one.key
        elif one.key.kind == "TidegateModel" and key.kind in ("TidegateGateway", "TidegatePool"):
            yield one.key  # counts who uses it


def _models(
    resource: CustomResource, known: Mapping[ResourceKey, CustomResource], *, with_files: bool
) -> list[MountedModel]:
    found = []
    for name in resource.model_names:
        model = known.get(ResourceKey("TidegateModel", resource.key.namespace, name))
        if model is None:
            raise Refused("NoModel", f"spec.models: there is no TidegateModel {name!r} in {resource.key.namespace}")
        found.append(mounted(model, with_files=with_files))
    return found


def _rendered_model(resource: CustomResource, known: Mapping[ResourceKey, CustomResource]) -> Rendered:
    spec = resource.parsed(TidegateModelSpec)
    objects = render_model(resource)
    users = sum(
        resource.key.name in one.model_names for one in known.values() if one.key.namespace == resource.key.namespace
    )
    fields = {
        "manifestDigest": digest(objects[0]["data"]), "variants": len(manifest_of(spec).variants), "usedBy": users
    }  # fmt: skip
    return Rendered(objects, fields)
