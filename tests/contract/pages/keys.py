"""The keys of each process's configuration are read from its model and written as a user does: `targets[].zone`.

The models say it; the pages are held to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tests.contract.surface.declared import CONFIGS, loaded

REQUIRED: Final = object()
ROLES: Final = ("gateway", "edge", "pool")


@dataclass(frozen=True)
class Key:
    """One key, and what its model says of it."""

    role: str
    path: str
    field: FieldInfo
    model: type[BaseModel]  # of which it is a field
    section: type[BaseModel] | None  # that it holds, alone, in a list or by name

    @property
    def default(self) -> Any:
        return REQUIRED if self.field.is_required() else self.field.get_default(call_default_factory=True)

    @property
    def is_path(self) -> bool:
        return Path in _leaves(self.field.annotation)


def keys(role: str) -> list[Key]:
    """The keys of a process in the order of its model, each section's own after it."""
    return list(_keys(role, models()[role], ""))


def models() -> dict[str, type[BaseModel]]:
    found = loaded(CONFIGS)
    return {role: found[role] for role in ROLES}


def _keys(role: str, model: type[BaseModel], prefix: str) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        section = _section(field.annotation)
        yield Key(role, f"{prefix}{name}", field, model, section)
        if section is not None:
            yield from _keys(role, section, f"{prefix}{name}{_of_each(field.annotation)}.")


def _section(annotation: Any) -> type[BaseModel] | None:
    return next((one for one in _leaves(annotation) if isinstance(one, type) and issubclass(one, BaseModel)), None)


def _leaves(annotation: Any) -> list[Any]:
    inner = get_args(annotation)
    return [annotation] if not inner else [leaf for one in inner for leaf in _leaves(one)]


def _of_each(annotation: Any) -> str:
    """How the keys of a section are reached: `[]` in a list, `.*` by a name."""
    text = str(annotation)
    return "[]" if "tuple[" in text else ".*" if "dict[" in text else ""
