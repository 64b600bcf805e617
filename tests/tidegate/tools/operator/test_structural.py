"""A structural schema takes what the model takes, and says it in the words that Kubernetes has."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from tidegate.tools.operator.structural import structural


class Inner(BaseModel):
    share: Annotated[float, Field(gt=0, le=1)] = 0.5


class Outer(BaseModel):
    inner: Inner = Inner()
    maybe: Inner | None = None
    mode: Literal["a", "b"] | None = None
    one: Literal["only"] = "only"
    numbers: dict[str, int] = {}
    any_shape: dict[str, Any] = {}
    needed: int


def test_sections_stand_where_they_are_referred_to() -> None:
    made = structural(Outer.model_json_schema())

    share = {"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 1}
    assert made["properties"]["inner"] == {"type": "object", "properties": {"share": share}}
    assert made["properties"]["maybe"] == {"type": "object", "properties": {"share": share}, "nullable": True}
    assert made["required"] == ["needed"]


def test_what_may_be_null_is_nullable_also_among_choices() -> None:
    made = structural(Outer.model_json_schema())["properties"]

    assert made["mode"] == {"type": "string", "enum": ["a", "b", None], "nullable": True}
    assert made["one"] == {"type": "string", "enum": ["only"]}


def test_mappings_keep_what_is_known_of_them() -> None:
    made = structural(Outer.model_json_schema())["properties"]

    assert made["numbers"] == {"type": "object", "additionalProperties": {"type": "integer"}}
    assert made["any_shape"] == {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def test_defaults_are_written_only_where_they_are_wanted() -> None:
    without, kept = structural(Outer.model_json_schema()), structural(Outer.model_json_schema(), keep_defaults=True)

    assert "default" not in str(without)
    assert kept["properties"]["inner"]["default"] == {}, "its keys have defaults of their own"
    assert kept["properties"]["inner"]["properties"]["share"]["default"] == 0.5


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "several types"),
        ({"type": "array", "prefixItems": [{"type": "integer"}]}, "prefixItems"),
        ({"type": "object", "patternProperties": {"^x": {}}}, "patternProperties"),
        (
            {
                "$ref": "#/$defs/Loop",
                "$defs": {"Loop": {"type": "object", "properties": {"x": {"$ref": "#/$defs/Loop"}}}},
            },
            "contains itself",
        ),
    ],
)
def test_what_has_no_translation_is_an_error_and_not_left_out(schema: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        structural(schema)
