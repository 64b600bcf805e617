"""The shipped OpenAPI document: a valid one, of exactly the routes that are served, and open to everybody."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from jsonschema import Draft202012Validator

from gateway.http.openapi import document
from tests.support.gateway.guarded import guarded
from tidegate import __version__
from tidegate.oip.status import _STATUS
from tidegate.outcome import Deferred

pytestmark = pytest.mark.slow
VERBS = frozenset({"get", "put", "post", "delete", "options", "head", "patch", "trace"})
# Whatever else is asked under /v1 is refused in OpenAI's form: a rule about all other paths, which OpenAPI cannot name.
CATCH_ALL = ("*", "/v1/{tail}")


def operations(found: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (verb.upper(), path): operation
        for path, item in found["paths"].items()
        for verb, operation in item.items()
        if verb in VERBS
    }


def resolved(found: dict[str, Any], node: dict[str, Any]) -> Any:
    while "$ref" in node:
        at: Any = found
        for step in node["$ref"].removeprefix("#/").split("/"):
            at = at[step]
        node = at
    return node


def references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [one for value in node.values() for one in references(value)]
    return [one for value in node for one in references(value)] if isinstance(node, list) else []


async def test_it_has_exactly_the_routes_that_are_served(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (gateway, *_):
        app = web.Application()
        app.add_routes(gateway.inference_routes())

    served = {(route.method, route.resource.canonical) for route in app.router.routes() if route.resource is not None}

    heads = {("HEAD", path) for verb, path in served if verb == "GET"}  # aiohttp's own beside each GET, as HTTP has it
    assert len(served) > 50
    assert set(operations(document())) == served - heads - {CATCH_ALL}


async def test_it_is_served_to_everybody_as_it_is_shipped(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (gateway, session, keys, _):
        for credential in ("none", "wrong", "good"):
            url = gateway.addresses["http"] + "/openapi.json"
            async with session.get(url, headers=keys.headers(credential)) as response:
                assert (response.status, response.headers["Content-Type"]) == (200, "application/json")
                assert await response.json() == document()


def test_it_is_of_this_version_and_every_schema_in_it_is_one() -> None:
    found = document()

    assert (found["openapi"], found["info"]["version"]) == ("3.1.0", __version__)
    assert not [key for key in found if key.startswith("x-")]
    for schema in found["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    for one in {*references(found)}:
        assert one.startswith("#/components/")
        resolved(found, {"$ref": one})


def test_every_part_of_a_path_is_a_parameter_and_no_other_is_in_the_path() -> None:
    found = document()
    for path, item in found["paths"].items():
        named = [resolved(found, one) for one in item.get("parameters", [])]
        assert sorted(re.findall(r"{(\w+)}", path)) == sorted(one["name"] for one in named), path
        assert all(one["in"] == "path" and one["required"] for one in named), path


def test_an_inference_may_be_refused_in_every_way_there_is_and_each_refusal_names_its_code() -> None:
    found = document()
    ours = {kind: status for kind, (status, _) in _STATUS.items() if kind is not Deferred}  # only devices give tickets
    everything = {str(status) for status in ours.values()}
    for route in (("POST", "/v2/models/{model}/infer"), ("POST", "/v1/embeddings")):
        answers = operations(found)[route]["responses"]
        assert set(answers) == everything | {"200"}
        for status in everything:
            headers = resolved(found, answers[status])["headers"]
            assert "tidegate-refused" in headers
            assert ("retry-after-ms" in headers) >= (status == "429")
    assert {error.code for error in ours} <= set(found["components"]["schemas"]["Code"]["enum"])
