"""Writes the processes' configuration into the chart's `values.schema.json`.

    python -m tests.support.chart.values_schema

What the chart itself understands is written in that file by hand. Its `$defs` come from the configuration models, so
Helm refuses a key that a process would refuse, before anything is installed. A test holds the file against the models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tidegate.tools.config_cli import config_model

FILE: Final = Path(__file__).parents[3] / "deploy" / "helm" / "tidegate" / "values.schema.json"
ROLES: Final = ("gateway", "pool")
# Words for people: Helm keeps the schema with each release, in a Secret that has room for 1 MiB.
_LEFT_OUT: Final = ("title", "description", "default", "examples")


def definitions() -> dict[str, Any]:
    """The `$defs`: each process's model, and the sections that it consists of, under names of its own."""
    found: dict[str, Any] = {}
    for role in ROLES:
        schema = config_model(role).model_json_schema()
        sections = schema.pop("$defs", {})
        found[f"{role}-config"] = _of_role(schema, role)
        found |= {f"{role}-{name}": _of_role(one, role) for name, one in sections.items()}
    return dict(sorted(found.items()))


def _of_role(schema: Any, role: str, *, names: bool = False) -> Any:
    """Args:
    names: whether the keys of this mapping are the names of a configuration's keys, not words of JSON schema.
    """
    if isinstance(schema, list):
        return [_of_role(one, role) for one in schema]
    if not isinstance(schema, dict):
        return schema.replace("#/$defs/", f"#/$defs/{role}-") if isinstance(schema, str) else schema
    kept = {key: one for key, one in schema.items() if names or key not in _LEFT_OUT}
    return {key: _of_role(one, role, names=key == "properties" and not names) for key, one in kept.items()}


def text() -> str:
    """The file as it should be."""
    return json.dumps(json.loads(FILE.read_text()) | {"$defs": definitions()}, indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
