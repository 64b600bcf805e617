"""Custom resources as the operator reads them, after the API server's defaults, and what they are rendered to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.support.operator.api_rules import defaulted, kept_schema, refusals
from tidegate.tools.operator.definitions import API_VERSION
from tidegate.tools.operator.rendering.objects import Object
from tidegate.tools.operator.rendering.render import render
from tidegate.tools.operator.resource import CustomResource

VOLUME: dict[str, Any] = {"persistentVolumeClaim": {"claimName": "models"}}
_MODEL = Path(__file__).parents[3] / "deploy" / "operator" / "examples" / "model.yaml"
MODEL: dict[str, Any] = yaml.safe_load(_MODEL.read_text())["spec"]


def body(kind: str, name: str, **spec: Any) -> Object:
    """A resource as `kubectl apply` sends it."""
    return {
        "apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name, "namespace": "prod"}, "spec": spec
    }  # fmt: skip


def stored(sent: Object) -> CustomResource:
    """A resource as the API server has it; it refuses none of these."""
    assert refusals(sent) == []
    full = defaulted(kept_schema(sent["kind"]), sent)
    full["metadata"] = {"uid": f"uid-{sent['metadata']['name']}", "generation": 1, **full["metadata"]}
    return CustomResource.of(sent["kind"], full)


def objects_of(sent: Object, *others: Object) -> list[Object]:
    known = {one.key: one for one in (stored(other) for other in others)}
    return render(stored(sent), known).objects


def one_of(objects: list[Object], kind: str, ending: str = "") -> Object:
    found = [one for one in objects if one["kind"] == kind and one["metadata"]["name"].endswith(ending)]
    assert len(found) == 1, [f"{one['kind']} {one['metadata']['name']}" for one in objects]
    return found[0]
