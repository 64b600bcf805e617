"""Checks a JSON schema that an answer has to follow, before another server or an engine is given it.

A schema reaches us as text, and is handed on as text: into the middle of a foreign server's JSON, and to parsers that
recurse. So it has to be one whole value of JSON, of few bytes and levels. What is checked of its words are the mistakes
that can be told without knowing an engine's dialect; the engine says the rest.

A reference out of the schema is refused under whichever keyword it stands, known here or not: an engine that follows
it would fetch an address that a caller chose.

Pure. It is foreign input: texts that its errors quote are cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final
from urllib.parse import unquote

import msgspec

MAX_BYTES: Final = 64 * 1024
MAX_DEPTH: Final = 32
_TYPES: Final = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_OF_SCHEMAS: Final = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
_BY_NAME: Final = frozenset({*_OF_SCHEMAS, "dependencies"})  # keywords whose keys are names, and no keywords themselves
_LISTS_OF_SCHEMAS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE_SCHEMAS: Final = ("items", "additionalProperties", "not")
_DATA: Final = frozenset({"enum", "const", "default", "examples"})  # keywords whose values are no schemas
_REFERENCES: Final = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})
_SHOWN: Final = 60  # characters of a foreign text
_TOO_DEEP: Final = f"the schema is nested too deeply: at most {MAX_DEPTH} levels may be"


class BadSchema(ValueError):
    """Says where in the schema, and what is wanted there."""


def check_schema_text(text: str) -> None:
    """Raises BadSchema where the text is not one JSON schema within the bounds."""
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        raise BadSchema("the schema is no text of Unicode") from error
    if len(encoded) > MAX_BYTES:
        raise BadSchema(f"the schema has {len(encoded)} bytes; at most {MAX_BYTES} may be")
    try:
        schema = msgspec.json.decode(encoded)
    except RecursionError as error:
        raise BadSchema(_TOO_DEEP) from error
    except msgspec.DecodeError as error:
        raise BadSchema(f"the schema is no JSON: {error}") from error
    _check_depth(schema, MAX_DEPTH)
    _check(schema, "schema")
    _check_references(schema)


def check_bounds(schema: object) -> None:
    """Raises BadSchema where a value nests too deeply or refers to something outside it; its words are not checked.

    For schemas that say what may be called rather than what must be answered: tools' authors spell them freely, and
    a server behind the gateway may make a grammar of them all the same.
    """
    _check_depth(schema, MAX_DEPTH)
    _check_references(schema)


def _check_depth(value: object, left: int) -> None:
    if not isinstance(value, dict | list):
        return
    if left == 0:
        raise BadSchema(_TOO_DEEP)
    for one in value.values() if isinstance(value, dict) else value:
        _check_depth(one, left - 1)


def _check_references(schema: object) -> None:
    within = _inner_references(schema, data_too=False)
    if any(map(_may_lead_into_data, within)):
        _inner_references(schema, data_too=True)


def _inner_references(schema: object, *, data_too: bool) -> list[str]:
    """The references that stay within the schema. Raises BadSchema for one that does not."""
    within = []
    for where, reference in _references(schema, "schema", data_too=data_too):
        if not reference.startswith("#"):
            raise BadSchema(f"{where} leads elsewhere: only #/… within the schema is followed")
        within.append(reference)
    return within


def _references(value: object, where: str, *, data_too: bool, by_name: bool = False) -> Iterator[tuple[str, str]]:
    """Each reference in a value, behind its place.

    Args:
        data_too: look into values that are data as well.
        by_name: the keys of the value are names: what stands under `const` there is a schema.
    """
    if isinstance(value, list):
        for index, one in enumerate(value):
            yield from _references(one, f"{where}[{index}]", data_too=data_too)
    if not isinstance(value, dict):
        return
    for key, one in value.items():
        place = f"{where}.{key[:_SHOWN]}"
        if key in _REFERENCES and isinstance(one, str):  # an object under this key is the schema of such a property
            yield place, one
        elif by_name or data_too or key not in _DATA:
            yield from _references(one, place, data_too=data_too, by_name=key in _BY_NAME and not by_name)


def _may_lead_into_data(reference: str) -> bool:
    """Whether a reference within the schema may make a schema of what is data otherwise.

    `#/const/x` does so, and an anchor may: some libraries look for anchors everywhere.
    """
    pointer = unquote(reference)
    return pointer[1:2] not in ("", "/") or not _DATA.isdisjoint(pointer.split("/"))


def _check(schema: object, where: str) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise BadSchema(f"{where} is no JSON schema: an object is wanted")
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if not isinstance(kind, str) or kind not in _TYPES:
            known = ", ".join(sorted(_TYPES))
            raise BadSchema(f"{where}.type is {str(kind)[:_SHOWN]!r}: one of {known} is wanted")
    for key in _OF_SCHEMAS:
        entries = schema.get(key, {})
        if not isinstance(entries, dict):
            raise BadSchema(f"{where}.{key} must be an object of schemas")
        for name, one in entries.items():
            _check(one, f"{where}.{key}.{name[:_SHOWN]}")
    for key in _LISTS_OF_SCHEMAS:
        entries = schema.get(key, [])
        if not isinstance(entries, list):
            raise BadSchema(f"{where}.{key} must be a list of schemas")
        for index, one in enumerate(entries):
            _check(one, f"{where}.{key}[{index}]")
    for key in _SINGLE_SCHEMAS:
        if key in schema and not isinstance(schema[key], list):
            _check(schema[key], f"{where}.{key}")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        raise BadSchema(f"{where}.required must be a list of names")
