"""A fallback model through a whole gateway: it answers where its own model finds no target, and says so."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from gateway.app import Gateway
from gateway.config.cache import CacheConfig
from tests.support.gateway.app import BODY, TWO_VARIANTS, Far, config_over, gateway_for, running, target, until
from tests.support.serving.hosts import EchoHost
from tidegate.fleet.offers import ModelOffer, VariantOffer
from tidegate.models.manifest import Manifest
from tidegate.models.repository import save_manifest
from tidegate.outcome import InvalidRequest, Overloaded
from tidegate.types import Call, Reply

pytestmark = pytest.mark.slow


class NamedHost(EchoHost):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.answered_by = name

    def manifest(self, name: str, version: str = "") -> Manifest:
        return msgspec.structs.replace(TWO_VARIANTS, name=self.answered_by)

    def _reply(self, call: Call) -> Reply:
        return msgspec.structs.replace(super()._reply(call), variant="")


class NamedFar(Far):
    """Serves one model in one variant."""

    def __init__(self, name: str, model: str, variant: str = "fp32", says_s: float = 0.002) -> None:
        super().__init__(name, variant=variant)
        offered = VariantOffer(variant, variant, ((1.0, says_s), (100.0, 2 * says_s)))
        self.offers = (ModelOffer(model, "3", (offered,)),)
        self.host = NamedHost(model)


@asynccontextmanager
async def gateway_over(
    folder: Path, *fars: NamedFar, fallback: str = "small", **more: Any
) -> AsyncIterator[tuple[Gateway, aiohttp.ClientSession]]:
    for name, other in (("large", fallback), ("small", "")):
        manifest = msgspec.structs.replace(TWO_VARIANTS, name=name, fallback_model=other)
        save_manifest(folder / "models" / name / "3", manifest)
    async with running(*fars):
        config = config_over(folder / "models", *[target(far) for far in fars], **more)
        async with gateway_for(config) as (gateway, session):
            yield gateway, session


async def ask(
    gateway: Gateway, session: aiohttp.ClientSession, *, version: str = "", **headers: str
) -> tuple[int, dict[str, Any], dict[str, str]]:
    of_version = f"/versions/{version}" if version else ""
    url = f"{gateway.addresses['http']}/v2/models/large{of_version}/infer"
    async with session.post(url, json=BODY, headers=headers) as response:
        return response.status, await response.json(), {name.lower(): said for name, said in response.headers.items()}


async def test_it_answers_where_no_target_has_the_model_and_the_answer_says_so(tmp_path: Path) -> None:
    large, small = NamedFar("pool/large", "large"), NamedFar("edge/small", "small")
    section = CacheConfig.model_validate({"models": {"large": {}, "small": {}}})
    async with gateway_over(tmp_path, large, small, cache=section) as (gateway, session):
        _, body, headers = await ask(gateway, session)
        assert (body["model_name"], "tidegate-fallback-model" in headers) == ("large", False)
        await large.kill()
        await until(lambda: not gateway.fleet.targets["pool/large"].up)
        for _ in range(2):  # no known answer either: the large one's version is not served, the small one's is degraded
            code, body, headers = await ask(gateway, session)
            assert (code, body["model_name"], headers["tidegate-served-by"]) == (200, "small", "edge/small")
            assert headers["tidegate-fallback-model"] == "small"
            assert (
                headers["tidegate-route"].startswith("fallback-model; ") and "degraded=1" in headers["tidegate-route"]
            )
            assert body["parameters"]["tidegate-fallback-model"] == "small"


async def test_it_answers_where_every_target_refuses_or_is_known_to_be_late(tmp_path: Path) -> None:
    large, small = NamedFar("pool/large", "large", says_s=5.0), NamedFar("edge/small", "small")
    async with gateway_over(tmp_path, large, small) as (gateway, session):
        large.host.error = Overloaded("full", retry_after_s=0.1)
        for budget_ms in ("20000", "500"):  # asked and refused; not asked, as it takes five seconds
            code, body, headers = await ask(gateway, session, **{"tidegate-budget-ms": budget_ms})
            assert (code, body.get("model_name")) == (200, "small"), (body, headers)
            assert headers["tidegate-fallback-model"] == "small"


@pytest.mark.parametrize(
    ("version", "headers"),
    [
        ("3", {}),
        ("", {"tidegate-version": "3"}),
        ("", {"tidegate-min-quality": "0.1"}),
        ("", {"tidegate-variant": "fp32"}),  # which the small one's manifest has, and no target
    ],
)
async def test_it_never_answers_a_caller_that_demands_what_it_lacks(
    tmp_path: Path, version: str, headers: dict[str, str]
) -> None:
    small = NamedFar("edge/attic", "small", variant="int8")
    async with gateway_over(tmp_path, small) as (gateway, session):
        assert (await ask(gateway, session))[0] == 200
        code, body, _ = await ask(gateway, session, version=version, **headers)
        assert code == 503
        assert "large" in body["error"] and "small" not in body["error"]


async def test_a_callers_own_mistake_and_a_failing_fallback_are_told_of_the_model_that_was_asked_for(
    tmp_path: Path,
) -> None:
    large, small = NamedFar("pool/large", "large"), NamedFar("edge/small", "small")
    async with gateway_over(tmp_path, large, small) as (gateway, session):
        large.host.error = InvalidRequest("no such thing")
        assert (await ask(gateway, session))[0] == 400
        assert small.host.calls == []
        large.host.error = Overloaded("large is full", retry_after_s=0.1)
        small.host.error = Overloaded("small is full", retry_after_s=0.1)
        code, body, _ = await ask(gateway, session)
        assert (code, "large is full" in body["error"]) == (429, True)
        assert len(small.host.calls) >= 1


async def test_without_the_key_nothing_stands_in(tmp_path: Path) -> None:
    small = NamedFar("edge/small", "small")
    async with gateway_over(tmp_path, small, fallback="") as (gateway, session):
        assert (await ask(gateway, session))[0] == 503
        assert small.host.calls == []
