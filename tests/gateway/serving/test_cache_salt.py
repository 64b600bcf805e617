"""What targets keep of a tenant's prompts is shown to no other tenant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.serving.cache_salt import under_tenant
from tests.support.gateway.edge_pair import edge_pair
from tests.support.models.talking import talker_repository
from tidegate.generate.request import CACHE_SALT_KEY, GenerateRequest, infer_request
from tidegate.oip.tenant import TENANT_KEY


def salt(tenant: str, own: str = "") -> object:
    request = infer_request("talker", GenerateRequest((1, 2), 4, cache_salt=own))
    return under_tenant(request, tenant).parameters.get(CACHE_SALT_KEY)


def test_each_tenant_has_a_salt_of_its_own_and_so_has_what_its_caller_keeps_apart() -> None:
    salts = [salt("a"), salt("b"), salt("", "a"), salt("a", "a"), salt("a", "b"), salt("b", "a")]
    assert len({*salts, "a", "b"}) == len(salts) + 2
    assert salt("a") == salt("a")
    assert salt("\udcff") not in salts


def test_a_request_without_a_tenant_is_left_as_it_is() -> None:
    request = infer_request("talker", GenerateRequest((1, 2), 4))
    assert under_tenant(request, "") is request


@pytest.mark.slow
async def test_a_tenant_is_not_told_that_another_one_has_sent_the_same_prompt(tmp_path: Path) -> None:
    models = talker_repository(tmp_path / "models", cache_tokens=4096)
    async with edge_pair(tmp_path, models) as one, aiohttp.ClientSession() as session:
        await one.shut_down("edge/b")

        async def cached(tenant: str, **more: Any) -> int:
            asked = {"input_ids": list(range(100)), "max_tokens": 2, **more}
            address = f"{one.gateway.addresses['http']}/v2/models/talker/generate"
            async with session.post(address, json=asked, headers={TENANT_KEY: tenant} if tenant else {}) as answer:
                said = await answer.json()
                assert answer.status == 200, said
                return int(said["cached_tokens"])

        assert await cached("clinic") == 0
        assert await cached("clinic") == 96
        assert await cached("rival") == await cached("") == 0
        assert await cached("rival", cache_salt="clinic") == 0
        assert await cached("rival") == 96
