"""What all objects of the operator have in common: a name, labels, an owner, and a digest of their content.

The name of a ConfigMap carries the digest of what is in it. So a pod that starts again in the middle of a change, or
beside a change that cannot start, still finds the configuration that it was made with, and a Deployment whose new pods
do not come up keeps its old ones whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

import yaml

from tidegate.tools.operator.definitions import API_VERSION
from tidegate.tools.operator.resource import CustomResource

Object = dict[str, Any]
MANAGER: Final = "tidegate-operator"
MANAGED_BY: Final = "app.kubernetes.io/managed-by"
OWNER_KIND: Final = "tidegate.dev/kind"
OWNER_NAME: Final = "tidegate.dev/name"
CHECKSUM: Final = "checksum/config"
MAX_CONFIG_MAP_BYTES: Final = 900_000  # Kubernetes takes 1 MiB with everything around it


@dataclass(frozen=True, slots=True)
class ObjectFamily:
    """What one resource's objects are called and known by.

    Attributes:
        name: of the objects.
        component: "gateway", "pool", "edge" or "model".
    """

    resource: CustomResource
    name: str
    component: str

    @property
    def selector(self) -> dict[str, str]:
        return {
            "app.kubernetes.io/name": "tidegate",
            "app.kubernetes.io/instance": self.resource.key.name,
            "app.kubernetes.io/component": self.component,
        }

    @property
    def labels(self) -> dict[str, str]:
        key = self.resource.key
        return {**self.selector, MANAGED_BY: MANAGER, OWNER_KIND: key.kind, OWNER_NAME: key.name}

    def object(
        self, api: str, kind: str, name: str = "", *, labels: Mapping[str, str] | None = None, **rest: Any
    ) -> Object:
        """An object that goes when its resource does: Kubernetes collects what its owner leaves behind."""
        key = self.resource.key
        owner = {
            "apiVersion": API_VERSION, "kind": key.kind, "name": key.name, "uid": self.resource.uid, "controller": True
        }  # fmt: skip
        meta = {
            "name": name or self.name,
            "namespace": key.namespace,
            "labels": {**self.labels, **(labels or {})},
            "ownerReferences": [owner],
        }
        return {"apiVersion": api, "kind": kind, "metadata": meta, **rest}

    def config_map(self, data: Mapping[str, str], *, name: str = "") -> Object:
        """A ConfigMap; without a name it is immutable, and its name carries its digest."""
        if name:
            return self.object("v1", "ConfigMap", name, data=dict(data))
        return self.object("v1", "ConfigMap", f"{self.name}-{digest(data)[:10]}", data=dict(data), immutable=True)


def digest(content: Any) -> str:
    """SHA-256 of a value of JSON, in hexadecimal."""
    return sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class _Plain(yaml.SafeDumper):
    """Without anchors, which people and `kubectl diff` read badly."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def as_yaml(content: Mapping[str, Any], *, sort_keys: bool = True) -> str:
    return yaml.dump(dict(content), Dumper=_Plain, sort_keys=sort_keys, allow_unicode=True, width=120)
