"""The CustomResourceDefinitions, generated from the specs and from the processes' configuration models.

One version, so no conversion is ever needed. Each `config` has the schema of the process's own model, without
defaults and with nothing required: the operator adds its part before the model judges the whole. Rules that relate
several fields are CEL (`x-kubernetes-validations`), so the API server refuses what could never run
before anything is changed. Rules look at bounded values only: the API server weighs what a rule could cost at most,
and refuses dear ones.

Source: Kubernetes documentation, "Validation rules", "Structural schemas".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import BaseModel

from tidegate.rollout.device_settings import DEVICE_KEYS, DeviceKey
from tidegate.tools.config_cli import config_model
from tidegate.tools.operator.specs import (
    TidegateFleetSpec,
    TidegateGatewaySpec,
    TidegateModelSpec,
    TidegatePoolSpec,
    TidegateRolloutSpec,
)
from tidegate.tools.operator.structural import Schema, structural

GROUP: Final = "tidegate.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
# 40 characters have room in a certificate's name; Kubernetes adds "-gateway", 17 of a ReplicaSet and a pod.
LONGEST_NAME_WITH_CSI: Final = 15
LONGEST_NAME: Final = 40


@dataclass(frozen=True, slots=True)
class Rule:
    """A CEL expression that holds, and what is said where it does not."""

    expression: str
    message: str

    @property
    def as_schema(self) -> dict[str, str]:
        return {"rule": self.expression, "message": self.message}


@dataclass(frozen=True, slots=True)
class Kind:
    """One custom resource.

    Attributes:
        role: the process whose configuration is in `spec.config`; "" for none.
        rules: of `spec`; `whole`: of the resource, which can see its name.
        columns: of `kubectl get`: a title, a type and a path.
    """

    name: str
    spec: type[BaseModel]
    role: str
    description: str
    rules: tuple[Rule, ...] = ()
    whole: tuple[Rule, ...] = ()
    columns: tuple[tuple[str, str, str], ...] = ()
    status: dict[str, Schema] = field(default_factory=dict)
    scale: bool = False

    @property
    def plural(self) -> str:
        return f"{self.name.lower()}s"


_INTEGER: Final[Schema] = {"type": "integer", "minimum": 0}
_TEXT: Final[Schema] = {"type": "string", "maxLength": 2048}
_MODELS: Final = Rule(
    "size(self.models) > 0 || has(self.modelsVolume)", "name TidegateModels in models, or a modelsVolume"
)
_NOT_BOTH: Final = Rule("size(self.models) == 0 || !has(self.modelsVolume)", "models or modelsVolume, not both")
_CSI: Final = Rule("self.tls.mode != 'csi' || self.tls.issuerName != ''", "tls.mode csi needs tls.issuerName")
_SECRET: Final = Rule("self.tls.mode != 'secret' || self.tls.secret != ''", "tls.mode secret needs tls.secret")
_NO_NAME: Final = Rule("!has(self.config.name)", "config.name is the pod's name: leave it out")
_NO_TLS: Final = Rule("!has(self.config.tls) || self.tls.mode == 'none'", "tls or config.tls, not both")
_SHORT: Final = Rule(f"self.metadata.name.size() <= {LONGEST_NAME}", f"a name has at most {LONGEST_NAME} characters")
_CSI_NAME: Final = Rule(
    f"self.spec.tls.mode != 'csi' || self.metadata.name.size() <= {LONGEST_NAME_WITH_CSI}",
    f"with tls.mode csi a name has at most {LONGEST_NAME_WITH_CSI} characters: pods' names are in certificates",
)
# Where a rule is of a pool that is not on Ray, or says nothing of one that is.
_ON_RAY: Final = "!has(self.ray) || "
_RAY_RULES: Final = (
    Rule(f"{_ON_RAY}self.autoscaling.kind == 'none'",
         "with ray nothing but replicas and `tidegate ray-scale` says how many there are: leave autoscaling out"),
    Rule(f"{_ON_RAY}self.tls.mode == 'none'",
         "with ray certificates are of nodes: mount them by extraVolumes, and name them in config.tls"),
    Rule(f"{_ON_RAY}(self.replicas >= 1 && self.replicas <= self.ray.maxWorkers)",
         "with ray there is one replica at least, and at most ray.maxWorkers"),
    Rule(f"{_ON_RAY}!self.serviceMonitor.enabled",
         "with ray no Service has the replicas' metrics: leave serviceMonitor out"),
    Rule(f"{_ON_RAY}!has(self.config.advertise)", "with ray replicas have an address each: leave config.advertise out"),
)  # fmt: skip
_READY: Final = ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status')
_REASON: Final = ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason')
_COUNTS: Final = {
    "configHash": _TEXT, "replicas": _INTEGER, "readyReplicas": _INTEGER, "updatedReplicas": _INTEGER, "selector": _TEXT
}  # fmt: skip

KINDS: Final = (
    Kind(
        "TidegateGateway", TidegateGatewaySpec, "gateway", "Gateways of one name, behind a Service.",
        rules=(
            _MODELS, _NOT_BOTH, _CSI, _SECRET, _NO_NAME, _NO_TLS,
            Rule("self.tls.mode != 'secret' || self.replicas <= 1",
                 "tls.mode secret is one certificate, and so one name: set replicas to 1, or take csi"),
            Rule("size(self.pools) == 0 || !has(self.config.discovery)", "pools or config.discovery, not both"),
            Rule("!has(self.config.drain_s) || double(self.config.drain_s) <= double(self.drainSeconds)",
                 "config.drain_s is longer than drainSeconds: pods would be ended before"),
        ),
        whole=(_SHORT, _CSI_NAME),
        columns=(("Replicas", "integer", ".status.replicas"), ("Up", "integer", ".status.readyReplicas"), _READY,
                 _REASON),
        status=_COUNTS,
    ),
    Kind(
        "TidegatePool", TidegatePoolSpec, "pool", "A pool of workers on cores or GPUs.",
        rules=(
            _MODELS, _NOT_BOTH, _CSI, _SECRET, _NO_NAME, _NO_TLS,
            Rule("self.tls.mode != 'secret' || (self.replicas <= 1 && self.autoscaling.kind == 'none')",
                 "tls.mode secret is one certificate, and so one name: set replicas to 1 without autoscaling, or take "
                 "csi"),
            Rule("self.autoscaling.minReplicas <= self.autoscaling.maxReplicas", "minReplicas is above maxReplicas"),
            Rule("self.autoscaling.kind != 'keda' || self.autoscaling.gateway != ''",
                 "autoscaling.kind keda needs autoscaling.gateway, which is asked"),
            Rule("!has(self.config.device) || self.config.device == 'auto' || "
                 "self.config.device.startsWith('cuda') == (self.device == 'cuda')",
                 "config.device is not the device that the image is for"),
            *_RAY_RULES,
        ),
        whole=(
            _SHORT, _CSI_NAME,
            Rule("!has(self.spec.ray) || self.metadata.name.matches('^[a-z]')",
                 "with ray a name begins with a letter: Services of KubeRay are named after it"),
        ),
        columns=(("Replicas", "integer", ".status.replicas"), ("Up", "integer", ".status.readyReplicas"), _READY,
                 _REASON),
        status=_COUNTS,
        scale=True,
    ),
    Kind(
        "TidegateModel", TidegateModelSpec, "", "One version of a model, which gateways and pools mount.",
        rules=(
            Rule("self.model == oldSelf.model && self.version == oldSelf.version",
                 "model and version stay: another version is another TidegateModel"),
        ),
        whole=(_SHORT,),
        columns=(("Model", "string", ".spec.model"), ("Version", "string", ".spec.version"), _READY, _REASON),
        status={"manifestDigest": _TEXT, "variants": _INTEGER, "usedBy": _INTEGER},
    ),
    Kind(
        "TidegateFleet", TidegateFleetSpec, "edge", "Edge agents on nodes, by group.",
        rules=(
            _NO_NAME,
            Rule("!has(self.config.device_file)", "config.device_file is set for each group: use settings"),
            Rule("self.groups.all(one, one.name != 'all')", "no group is called all: that means every device"),
            Rule("self.groups.all(one, !has(one.nodeGroup) || size(one.nodeSelector) == 0)",
                 "nodeSelector or nodeGroup of a group, not both"),
            Rule("size(self.operatorKeys) == 0 || !has(self.config.rollout) || !has(self.config.rollout.keys)",
                 "operatorKeys or config.rollout.keys, not both"),
        ),
        whole=(_SHORT,),
        columns=(("Devices", "integer", ".status.devices"), ("Up", "integer", ".status.readyDevices"), _READY, _REASON),
        status={"configHash": _TEXT, "groups": _INTEGER, "devices": _INTEGER, "readyDevices": _INTEGER,
                "updatedDevices": _INTEGER},
    ),
    Kind(
        "TidegateRollout", TidegateRolloutSpec, "", "A signed rollout, handed to the gateway that conducts it.",
        rules=(
            Rule("self.order == oldSelf.order && self.gateway == oldSelf.gateway",
                 "a rollout that is ordered stays as it is: make another one"),
            Rule("oldSelf.state != 'aborted' || self.state == 'aborted'", "what is aborted stays so"),
        ),
        whole=(_SHORT,),
        columns=(("Phase", "string", ".status.phase"), ("Wave", "integer", ".status.wave"), _READY, _REASON),
        status={"id": _TEXT, "phase": _TEXT, "reason": _TEXT, "wave": _INTEGER, "waves": _INTEGER,
                "counts": {"type": "object", "additionalProperties": _INTEGER}},
    ),
)  # fmt: skip
KIND_OF: Final = {kind.name: kind for kind in KINDS}


def definition(kind: Kind) -> dict[str, Any]:
    """The CustomResourceDefinition of a kind."""
    subresources: dict[str, Any] = {"status": {}}
    if kind.scale:
        subresources["scale"] = {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        }
    columns = [{"name": title, "type": what, "jsonPath": path} for title, what, path in kind.columns]
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema_of(kind)},
        "subresources": subresources,
        "additionalPrinterColumns": [
            *columns,
            {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
        ],
    }
    names = {"kind": kind.name, "plural": kind.plural, "singular": kind.name.lower(), "categories": ["tidegate"]}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{GROUP}"},
        "spec": {"group": GROUP, "names": {**names, "listKind": f"{kind.name}List"}, "scope": "Namespaced",
                 "versions": [version]},
    }  # fmt: skip


def schema_of(kind: Kind) -> Schema:
    spec = structural(kind.spec.model_json_schema(), keep_defaults=True)
    if kind.role:
        spec["properties"]["config"] = _of_config(kind.role, spec["properties"]["config"])
    if kind.spec is TidegateFleetSpec:
        _settle_groups(spec["properties"]["groups"])
    spec["x-kubernetes-validations"] = [rule.as_schema for rule in kind.rules]
    return {
        "type": "object",
        "description": kind.description,
        "required": ["spec"],
        "x-kubernetes-validations": [rule.as_schema for rule in kind.whole],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": _of_status(kind),
        },
    }


def _of_config(role: str, said: Schema) -> Schema:
    made = structural(config_model(role).model_json_schema())
    made.pop("required", None)
    return {**made, "description": said["description"], "default": {}}


def _settle_groups(groups: Schema) -> None:
    """Groups are told apart by name, and their settings are the keys that agents follow."""
    groups |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
    keys = groups["items"]["properties"]["settings"]
    keys.pop("x-kubernetes-preserve-unknown-fields")
    keys["properties"] = _of_settings()


def _of_settings() -> dict[str, Schema]:
    made: dict[str, Schema] = {}
    for key, known in DEVICE_KEYS.items():
        section, dot, name = key.partition(".")
        inside = made.setdefault(section, {"type": "object", "properties": {}})["properties"] if dot else made
        inside[name or section] = _of_setting(known)
    return made


def _of_setting(known: DeviceKey) -> Schema:
    if known.kind is str:
        return {"type": "string", "enum": list(known.choices)}
    made: Schema = {"type": {bool: "boolean", int: "integer", float: "number"}[known.kind]}
    if known.least > -float("inf"):
        made["minimum"] = known.least
        if known.above_least:
            made["exclusiveMinimum"] = True
    if known.most < float("inf"):
        made["maximum"] = known.most
    return {**made, "nullable": True} if known.nullable else made


def _of_status(kind: Kind) -> Schema:
    condition = {
        "type": "object",
        "required": ["type", "status", "reason", "message", "lastTransitionTime"],
        "properties": {
            "type": {"type": "string", "maxLength": 64},
            "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
            "reason": {"type": "string", "maxLength": 64},
            "message": {"type": "string", "maxLength": 4096},
            "lastTransitionTime": {"type": "string", "format": "date-time"},
            "observedGeneration": {"type": "integer"},
        },
    }
    conditions = {
        "type": "array",
        "items": condition,
        "maxItems": 8,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
    }
    properties = {"observedGeneration": {"type": "integer"}, "conditions": conditions, **kind.status}
    return {"type": "object", "properties": properties}
