"""A custom resource as the operator has read it, and what its spec says once the models have judged it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from tidegate.config import explain

SpecT = TypeVar("SpecT", bound=BaseModel)


class Refused(Exception):
    """A resource cannot become anything; `reason` is one word for programs, the text names key, value and way out."""

    def __init__(self, reason: str, words: str) -> None:
        super().__init__(words)
        self.reason = reason


class ResourceKey(NamedTuple):
    """What one resource is known by."""

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class CustomResource:
    """One custom resource of ours, of a generation."""

    key: ResourceKey
    uid: str
    generation: int
    spec: Mapping[str, Any]
    status: Mapping[str, Any]

    @classmethod
    def of(cls, kind: str, body: Mapping[str, Any]) -> CustomResource:
        meta = body["metadata"]
        key = ResourceKey(kind, str(meta.get("namespace", "")), str(meta["name"]))
        return cls(key, str(meta.get("uid", "")), int(meta.get("generation", 1)), body.get("spec") or {},
                   body.get("status") or {})  # fmt: skip

    @property
    def model_names(self) -> tuple[str, ...]:
        """The TidegateModels that it mounts; none where its spec is wrong, which `parsed` tells."""
        names = self.spec.get("models")
        return tuple(str(one) for one in names) if isinstance(names, (list, tuple)) else ()

    @property
    def named(self) -> tuple[ResourceKey, ...]:
        """The resources beside it that what it becomes depends on: its models, and the gateway that scales it."""
        found = [ResourceKey("TidegateModel", self.key.namespace, name) for name in self.model_names]
        scaling = self.spec.get("autoscaling")
        if isinstance(scaling, Mapping) and scaling.get("kind") == "keda":
            found.append(ResourceKey("TidegateGateway", self.key.namespace, str(scaling.get("gateway"))))
        return tuple(found)

    def parsed(self, model: type[SpecT]) -> SpecT:
        """Return the spec. Raises Refused: it was made by other rules than those of this operator."""
        try:
            return model.model_validate(dict(self.spec))
        except ValidationError as error:
            words = "; ".join(explain(model, dict(one)) for one in error.errors())
            raise Refused("InvalidSpec", f"spec: {words}"[:2000]) from error

    def __repr__(self) -> str:
        return f"<CustomResource {self.key} generation {self.generation}>"
