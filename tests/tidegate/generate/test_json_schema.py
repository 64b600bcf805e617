"""Which texts are a JSON schema, and where in one a mistake is."""

from __future__ import annotations

import json

import pytest

from tidegate.generate.json_schema import MAX_BYTES, MAX_DEPTH, BadSchema, check_schema_text


def nested(levels: int) -> str:
    return '{"not":' * (levels - 1) + "{}" + "}" * (levels - 1)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        {"type": ["string", "null"]},
        {"type": "object", "properties": {"a": {"enum": ["x", {"b": [1]}]}}, "required": ["a"]},
        {"$defs": {"a": {"type": "integer"}}, "items": {"$ref": "#/$defs/a"}, "anyOf": [{"type": "array"}, False]},
        {"properties": {"$ref": {"type": "string"}, "ключ": {"description": "{[}"}}},
        {"properties": {"$dynamicRef": {"$ref": "#"}, "const": {"$ref": "#/$defs/const"}}, "$defs": {"const": {}}},
        {"const": {"$ref": "http://a/b"}, "properties": {"a": {"enum": [{"$ref": "x"}], "default": {"$ref": "x"}}}},
        {"properties": {"properties": {"const": {"$ref": "http://a/b"}}}},  # a property of this name has a value
        {"examples": [{"a": {"$ref": "http://a/b"}}], "items": [{"$ref": "#/$defs/a"}], "$defs": {"a": {}}},
    ],
)
def test_a_schema_is_taken(schema: object) -> None:
    check_schema_text(json.dumps(schema))
    check_schema_text(json.dumps(schema, ensure_ascii=False))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is no JSON"),
        ("", "is no JSON"),
        ('{}, "n_predict": 100000', "is no JSON"),
        ('{}}, "model": {"a": 1', "is no JSON"),
        ('{"maximum": NaN}', "is no JSON"),
        ('{"a": "\ud800"}', "is no text of Unicode"),
        ("[" * 60_000, "nested too deeply"),
        ("[" * 30_000 + "]" * 30_000, "nested too deeply"),
        (nested(MAX_DEPTH + 1), "nested too deeply: at most 32 levels"),
        (json.dumps({"description": "x" * MAX_BYTES}), "at most 65536 may be"),
        (json.dumps({"description": "ä" * (MAX_BYTES // 2)}, ensure_ascii=False), "at most 65536 may be"),
        ("[]", "schema is no JSON schema: an object is wanted"),
        ('"x"', "schema is no JSON schema"),
        ('{"type": "flaot"}', r"schema\.type is 'flaot': one of array, boolean"),
        ('{"type": [5]}', r"schema\.type is '5'"),
        ('{"items": {"$ref": "http://127.0.0.1/x"}}', r"schema\.items\.\$ref leads elsewhere"),
        ('{"properties": []}', r"schema\.properties must be an object of schemas"),
        ('{"anyOf": {}}', r"schema\.anyOf must be a list of schemas"),
        ('{"anyOf": [{}, 1]}', r"schema\.anyOf\[1\] is no JSON schema"),
        ('{"required": "a"}', r"schema\.required must be a list of names"),
    ],
)
def test_what_is_none_is_refused_with_the_place(text: str, words: str) -> None:
    with pytest.raises(BadSchema, match=words):
        check_schema_text(text)


AWAY = {"$ref": "http://169.254.169.254/x"}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (AWAY, "schema"),
        ({"$dynamicRef": "http://a/b#c"}, "schema"),
        ({"$recursiveRef": "other.json"}, "schema"),
        ({"if": AWAY}, "schema.if"),
        ({"then": {"else": AWAY}}, "schema.then.else"),
        ({"contains": AWAY}, "schema.contains"),
        ({"items": [{}, AWAY]}, "schema.items[1]"),
        ({"additionalItems": AWAY, "unevaluatedProperties": AWAY}, "schema.additionalItems"),
        ({"propertyNames": AWAY}, "schema.propertyNames"),
        ({"dependentSchemas": {"default": AWAY}}, "schema.dependentSchemas.default"),
        ({"dependencies": {"enum": AWAY}}, "schema.dependencies.enum"),
        ({"properties": {"const": AWAY}}, "schema.properties.const"),
        ({"$defs": {"properties": {"properties": {"enum": AWAY}}}}, "schema.$defs.properties.properties.enum"),
        ({"$defs": {"examples": AWAY}}, "schema.$defs.examples"),
        ({"x-of-nobody": {"a": [[AWAY]]}}, "schema.x-of-nobody.a[0][0]"),
        ({"properties": {"a": {"$ref": AWAY}}}, "schema.properties.a.$ref"),
        # data becomes a schema where a reference leads into it
        ({"const": AWAY, "$ref": "#/const"}, "schema.const"),
        ({"enum": [AWAY], "not": {"$ref": "#/%65num/0"}}, "schema.enum[0]"),
        ({"x": {"default": {"y": AWAY}}, "items": {"$dynamicRef": "#/x/default/y"}}, "schema.x.default.y"),
        ({"examples": [{**AWAY, "$anchor": "there"}], "items": {"$ref": "#there"}}, "schema.examples[0]"),
    ],
)  # fmt: skip
def test_a_reference_out_of_the_schema_is_refused_under_any_keyword(schema: object, place: str) -> None:
    with pytest.raises(BadSchema) as caught:
        check_schema_text(json.dumps(schema))
    assert str(caught.value).startswith(f"{place}.$")
    assert "leads elsewhere" in str(caught.value)


def test_as_many_levels_as_may_be_are_taken() -> None:
    check_schema_text(nested(MAX_DEPTH))


def test_what_an_error_quotes_of_a_schema_is_short() -> None:
    for text in (json.dumps({"type": "x" * 5000}), json.dumps({"properties": {"x" * 5000: 1}})):
        with pytest.raises(BadSchema) as caught:
            check_schema_text(text)
        assert len(str(caught.value)) < 250
