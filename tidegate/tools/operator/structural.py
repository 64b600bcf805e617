"""A structural schema is what Kubernetes takes of JSON schema: every node has one type, and nothing refers elsewhere.

pydantic's schemas are fuller, so this translates: references are put in place, `X or null` becomes `nullable`,
constants become enumerations, and what has any shape becomes
`x-kubernetes-preserve-unknown-fields`. The result takes everything that the model takes, and more: what only the model
can tell is told by the operator, with the model's own words.

A keyword without a translation is an error and not left out: a new kind of field in a configuration is to be seen when
the schemas are generated.

Source: Kubernetes documentation, "Extend the Kubernetes API with CustomResourceDefinitions", "Specifying a structural
schema"; OpenAPI 3.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

Schema = dict[str, Any]
ANYTHING: Final[Schema] = {"x-kubernetes-preserve-unknown-fields": True}
# Taken as they are; `x-kubernetes-…` too.
_KEPT: Final = frozenset(
    {
        "type", "description", "enum", "required", "minimum", "maximum", "minLength", "maxLength", "pattern",
        "minItems", "maxItems", "minProperties", "maxProperties", "multipleOf",
    }
)  # fmt: skip
# Words for other readers; and `format`, of which Kubernetes knows none of pydantic's.
_LEFT_OUT: Final = frozenset({"title", "examples", "format", "$defs", "default"})


def structural(schema: Mapping[str, Any], *, keep_defaults: bool = False) -> Schema:
    """Return the structural schema of a pydantic model's JSON schema.

    Args:
        keep_defaults: whether the API server shall write defaults into objects. A configuration has none in its
            resource: it would be frozen at the defaults of the version that wrote it.

    Raises:
        ValueError: a keyword has no translation, or a section contains itself.
    """
    return _Translation(schema.get("$defs", {}), keep_defaults).of(schema, ())


class _Translation:
    def __init__(self, sections: Mapping[str, Any], keep_defaults: bool) -> None:
        self._sections = sections
        self._keep_defaults = keep_defaults

    def of(self, schema: Mapping[str, Any], within: tuple[str, ...]) -> Schema:
        """Args:
        within: the names of the sections around this node, from the outermost on.
        """
        if reference := schema.get("$ref"):
            name = str(reference).removeprefix("#/$defs/")
            if name in within:
                raise ValueError(f"the section {name} contains itself, which no structural schema can say")
            beside = {key: one for key, one in schema.items() if key != "$ref"}
            return self.of({**self._sections[name], **beside}, (*within, name))
        if alternatives := schema.get("anyOf"):
            return self._nullable(schema, alternatives, within)
        made: Schema = {}
        for key, value in schema.items():
            self._put(made, key, value, within)
        if "default" in schema and self._keep_defaults:
            made["default"] = schema["default"]
        if "type" not in made:
            return {**({"description": made["description"]} if "description" in made else {}), **ANYTHING}
        return made

    def _property(self, schema: Mapping[str, Any], within: tuple[str, ...]) -> Schema:
        """A section's defaults stand at its own keys, where they hold as well for a section that is given in part."""
        made = self.of(schema, within)
        if self._keep_defaults and "properties" in made and "default" in made:
            made["default"] = {}
        return made

    def _nullable(self, schema: Mapping[str, Any], alternatives: list[Any], within: tuple[str, ...]) -> Schema:
        kinds = [one for one in alternatives if one.get("type") != "null"]
        if len(kinds) != 1:
            raise ValueError(f"a value of several types has no structural schema: {alternatives}")
        beside = {key: one for key, one in schema.items() if key not in ("anyOf", "default")}
        made = self.of({**kinds[0], **beside}, within)
        if len(kinds) < len(alternatives):
            made["nullable"] = True
            if "enum" in made:
                made["enum"] = [*made["enum"], None]
        return made

    def _put(self, made: Schema, key: str, value: Any, within: tuple[str, ...]) -> None:
        match key:
            case "properties":
                made[key] = {name: self._property(one, within) for name, one in value.items()}
            case "items":
                made[key] = self.of(value, within)
            case "additionalProperties":
                made |= self._of_more(value, within)
            case "const":
                made["enum"] = [value]
            case "exclusiveMinimum" | "exclusiveMaximum":
                made[key.replace("exclusiveM", "m")] = value
                made[key] = True
            case "description":
                made[key] = " ".join(value.split())
            case _ if key in _KEPT or key.startswith("x-kubernetes-"):
                made[key] = value
            case _ if key not in _LEFT_OUT:
                raise ValueError(f"{key}: {value} has no translation into a structural schema")

    def _of_more(self, value: Any, within: tuple[str, ...]) -> Schema:
        """Unknown keys: Kubernetes refuses or prunes them by itself, so `false` is not said."""
        if value is False:
            return {}
        return dict(ANYTHING) if value is True else {"additionalProperties": self.of(value, within)}
