"""What an API server does with a custom resource before it stores it: unknown keys, types, defaults, CEL rules.

Structure is judged by jsonschema, after the two words of OpenAPI 3.0 that JSON schema writes otherwise are translated
(`nullable`, boolean `exclusiveMinimum`); rules by a CEL evaluator that is not ours.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import cel
import jsonschema

from tidegate.tools.operator.definitions import KIND_OF, schema_of


def refusals(resource: dict[str, Any], before: dict[str, Any] | None = None) -> list[str]:
    """What an API server says against a resource; nothing where it stores it.

    Args:
        before: the resource that it replaces.
    """
    schema = kept_schema(resource["kind"])
    found = [f"unknown field {path}" for path in _unknown(schema, resource, "")]
    found += [f"{one.json_path}: {one.message}" for one in _validator(resource["kind"]).iter_errors(resource)]
    if found:
        return found
    old = None if before is None else defaulted(schema, before)
    return list(_broken_rules(schema, defaulted(schema, resource), old, ""))


@cache
def kept_schema(kind: str) -> dict[str, Any]:
    """The kind's schema, as a server keeps it that has been given the definition once. Nobody may change it."""
    return schema_of(KIND_OF[kind])


@cache
def _validator(kind: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(_as_json_schema(kept_schema(kind)))


def defaulted(schema: dict[str, Any], value: Any) -> Any:
    """The value with the schema's defaults, at every depth."""
    if isinstance(value, list):
        return [defaulted(schema.get("items", {}), one) for one in value]
    if not isinstance(value, dict):
        return value
    made = copy.deepcopy(value)
    for key, inner in schema.get("properties", {}).items():
        if key not in made and "default" in inner:
            made[key] = copy.deepcopy(inner["default"])
        if key in made:
            made[key] = defaulted(inner, made[key])
    return made


def nodes(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every node of a structural schema, with its place."""
    yield path, schema
    for key, inner in schema.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{key}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from nodes(schema[key], f"{path}[]")


def _broken_rules(schema: dict[str, Any], value: Any, old: Any, path: str) -> Iterator[str]:
    for one in schema.get("x-kubernetes-validations", ()):
        known = {"self": value, "oldSelf": old}
        if "oldSelf" in one["rule"] and old is None:
            continue  # a rule about a change says nothing of a new resource
        if cel.evaluate(one["rule"], known) is not True:
            yield f"{path}: {one['message']}"
    for key, inner in schema.get("properties", {}).items():
        if isinstance(value, dict) and key in value:
            before = old.get(key) if isinstance(old, dict) else None
            yield from _broken_rules(inner, value[key], before, f"{path}.{key}")


def _unknown(schema: dict[str, Any], value: Any, path: str) -> Iterator[str]:
    if schema.get("x-kubernetes-preserve-unknown-fields") or path == ".metadata":
        return
    if isinstance(value, list):
        for one in value:
            yield from _unknown(schema.get("items", {}), one, f"{path}[]")
    if not isinstance(value, dict) or schema.get("type") != "object":
        return
    more = schema.get("additionalProperties")
    for key, inner in value.items():
        known = schema.get("properties", {}).get(key, more)
        if known is None:
            yield f"{path}.{key}"
        else:
            yield from _unknown(known, inner, f"{path}.{key}")


def _as_json_schema(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_as_json_schema(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _as_json_schema(one) for key, one in schema.items()}
    if made.get("nullable") is True:
        made["type"] = [made["type"], "null"]
    for end in ("Minimum", "Maximum"):
        if made.get(f"exclusive{end}") is True:
            made[f"exclusive{end}"] = made.pop(end.lower())
    return made
