"""What the shipped OpenAPI document promises is what a gateway answers, by schemathesis: a short run, always the same.

The long, random one is a target of `make fuzz`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from gateway.http import openapi
from tests.fuzz.openapi import TOOL, answering, asked, conformance

# Each waits for a process that computes for half a minute; a busy machine gives it a fifth of a core.
WITHIN_S = 500.0
pytestmark = [
    pytest.mark.slow,
    pytest.mark.clients,
    pytest.mark.timeout(WITHIN_S + 100.0),
    pytest.mark.skipif(not TOOL.exists(), reason="`make checks` could not set up schemathesis here"),
]


async def test_the_gateway_answers_as_its_openapi_document_says(tmp_path: Path) -> None:
    async with answering(tmp_path) as (gateway, far):
        url = gateway.addresses["http"]

        status, told = await asyncio.wait_for(conformance(tmp_path, url, most_examples=20, seed=7), WITHIN_S)

    assert status == 0, told[-20_000:]
    assert asked(told) > 1000
    assert far.host.calls, "nothing got as far as a model"


async def test_an_answer_that_the_document_does_not_name_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = openapi.document()
    del found["paths"]["/v2/models/{model}"]["get"]["responses"]["404"]
    found["components"]["schemas"]["ServerMetadata"]["required"].append("colour")
    found["components"]["schemas"]["RepositoryIndex"]["items"]["required"].append("colour")
    monkeypatch.setattr(openapi, "_encoded", lambda: msgspec.json.encode(found))
    async with answering(tmp_path) as (gateway, _):
        url = gateway.addresses["http"]

        changed = ("/v2", "/v2/models/{model}", "/v2/repository/index")
        found_out = conformance(tmp_path, url, most_examples=2, seed=7, paths=changed)
        status, told = await asyncio.wait_for(found_out, WITHIN_S)

    assert status == 1, told[-20_000:]
    assert "Undocumented status code" in told
    assert "Response violates schema" in told
