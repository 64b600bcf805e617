"""A gateway whose targets are gateways: sites in this process, over targets on real loopback connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from pydantic import ValidationError

from gateway.app import Gateway
from gateway.config.gateway import GatewayConfig
from gateway.config.targets import TargetConfig
from tests.support.gateway.app import Far, ask, config_over, gateway_for, repository, running, target, until
from tidegate import clock

pytestmark = pytest.mark.slow

LONG = {"tidegate-budget-ms": "20000"}


def as_site(gateway: Gateway, name: str = "") -> TargetConfig:
    return TargetConfig(name=name or gateway.config.name, tier="site", address=gateway.addresses["site"])


@asynccontextmanager
async def site(models: Path, name: str, *fars: Far, **more: object) -> AsyncIterator[Gateway]:
    config = config_over(models, *map(target, fars), name=name, site_port=0, **more)
    async with gateway_for(config) as (gateway, _):
        yield gateway


@asynccontextmanager
async def region(
    models: Path, *targets: TargetConfig, **more: object
) -> AsyncIterator[tuple[Gateway, aiohttp.ClientSession]]:
    async with gateway_for(config_over(models, *targets, name="region", **more)) as (gateway, session):
        await until(lambda: gateway.host.model_ready("echo"))
        yield gateway, session


async def test_a_site_answers_and_both_routes_are_declared(tmp_path: Path) -> None:
    models, edge = repository(tmp_path), Far("edge/attic", variant="int8")
    async with running(edge), site(models, "north", edge) as north, region(models, as_site(north)) as (gateway, http):
        status, body, headers = await ask(gateway, http, **LONG)

        assert status == 200
        assert body["outputs"][0]["data"] == [1, 2, 3]
        assert headers["tidegate-served-by"] == "site/north"
        assert headers["tidegate-route"].startswith("only; variant=")
        assert headers["tidegate-site-route"].startswith("edge/attic; only; variant=")
        assert 0.0 < float(headers["tidegate-budget-left-ms"]) < 20000


async def test_what_the_caller_requires_reaches_the_place_that_answers(tmp_path: Path) -> None:
    models = repository(tmp_path)
    edge, pool = Far("edge/attic", variant="int8"), Far("pool/main", variant="fp32")
    async with (
        running(edge, pool),
        site(models, "north", edge, pool) as north,
        region(models, as_site(north)) as (gateway, http),
    ):
        demands = {"tidegate-tenant": "acme", "tidegate-variant": "fp32"}
        _, _, headers = await ask(gateway, http, **LONG, **demands)
        assert headers["tidegate-site-route"].startswith("pool/main; demanded; variant=fp32")
        [record] = north.dispatcher.recorder
        assert (record.tenant, record.protocol) == ("acme", "link")
        [budget_s] = pool.host.budgets_s
        assert budget_s is not None
        assert 0.0 < budget_s < 20.0

        _, _, headers = await ask(gateway, http, **LONG, **{"tidegate-pin": "edge"})
        assert headers["tidegate-site-route"].startswith("edge/attic; pinned")


async def test_a_pinned_request_goes_only_to_a_site_that_has_a_place_inside(tmp_path: Path) -> None:
    models, pool = repository(tmp_path), Far("pool/main")
    async with running(pool), site(models, "north", pool) as north, region(models, as_site(north)) as (gateway, http):
        status, body, _ = await ask(gateway, http, **LONG, **{"tidegate-pin": "edge"})

        assert status == 503
        assert "pinned to edge" in body["error"]
        assert pool.host.calls == []


async def test_a_cancelled_request_is_cancelled_where_it_is_computed(tmp_path: Path) -> None:
    models, edge = repository(tmp_path), Far("edge/attic")
    edge.host.gate.clear()
    async with running(edge), site(models, "north", edge) as north, region(models, as_site(north)) as (gateway, http):
        asking = asyncio.create_task(ask(gateway, http, **LONG))
        await edge.host.begun.acquire()
        asking.cancel()

        await until(lambda: edge.host.cancelled == 1)
        await until(lambda: north.admission.in_flight == 0)


async def test_a_gateway_refuses_by_name_what_has_come_through_it(tmp_path: Path) -> None:
    # A gateway that has itself as a site: the shortest loop.
    models, edge = repository(tmp_path), Far("edge/attic")
    async with running(edge), site(models, "region", edge) as twin, region(models, as_site(twin)) as (gateway, http):
        status, body, _ = await ask(gateway, http, **LONG)

        assert status == 503
        assert "gateway region is on this request's way already (region -> region)" in body["error"]
        assert edge.host.calls == []


async def test_a_gateway_offers_to_others_only_what_its_own_places_have(tmp_path: Path) -> None:
    models, edge, far = repository(tmp_path), Far("edge/attic"), Far("edge/cellar")
    async with running(edge, far), AsyncExitStack() as stack:
        north = await stack.enter_async_context(site(models, "north", edge))
        south = await stack.enter_async_context(site(models, "south", far))
        config = config_over(models, as_site(south), name="middle", site_port=0)
        middle, http = await stack.enter_async_context(gateway_for(config))
        await until(lambda: middle.host.model_ready("echo"))

        # What a gateway has from a site it does not offer as its own.
        upstream = config_over(models, as_site(middle), as_site(north), name="top")
        top, top_http = await stack.enter_async_context(gateway_for(upstream))
        await until(lambda: top.host.model_ready("echo"))
        await clock.sleep(1.5)
        assert top.fleet.targets["site/middle"].offers == ()

        status, _, headers = await ask(middle, http, **LONG)
        assert (status, headers["tidegate-served-by"]) == (200, "site/south")
        _, _, headers = await ask(top, top_http, **LONG)
        assert headers["tidegate-served-by"] == "site/north"


async def test_a_request_goes_on_at_another_site_when_the_place_in_one_is_gone(tmp_path: Path) -> None:
    models, attic, cellar = repository(tmp_path), Far("edge/attic"), Far("edge/cellar")
    async with running(attic, cellar), AsyncExitStack() as stack:
        north = await stack.enter_async_context(site(models, "north", attic))
        south = await stack.enter_async_context(site(models, "south", cellar))
        gateway, http = await stack.enter_async_context(region(models, as_site(north), as_site(south)))
        await until(lambda: all(one.offers for one in gateway.fleet.targets.values()))
        for far in (attic, cellar):
            far.host.gate.clear()
        asking = asyncio.create_task(ask(gateway, http, **LONG))
        await until(lambda: bool(attic.host.calls or cellar.host.calls))
        first, other, name = (attic, cellar, "south") if attic.host.calls else (cellar, attic, "north")

        other.host.gate.set()
        await first.kill()
        status, _, headers = await asking

        assert (status, headers["tidegate-served-by"]) == (200, f"site/{name}")


async def test_a_site_tells_one_summary_a_second_however_many_places_it_has(tmp_path: Path) -> None:
    models = repository(tmp_path)
    edges = [Far(f"edge/e{number}") for number in range(8)]
    async with running(*edges), site(models, "north", *edges) as north, region(models, as_site(north)) as (gateway, _):
        link, seen = gateway.directory.targets["site/north"], []
        loaded = link.loaded
        link.loaded = lambda load, offers: (seen.append(offers), loaded(load, offers))
        [offer] = gateway.fleet.targets["site/north"].offers
        await clock.sleep(3.0)

        assert 2 <= len(seen) <= 4
        assert offer.variants[0].places >= 8.0  # and what is on its way to them
        assert offer.variants[0].zone == "edge"


async def test_a_site_that_shuts_down_says_so_and_answers_what_it_has(tmp_path: Path) -> None:
    models, attic, cellar = repository(tmp_path), Far("edge/attic"), Far("edge/cellar")
    attic.host.gate.clear()
    async with running(attic, cellar), AsyncExitStack() as stack:
        north = await stack.enter_async_context(AsyncExitStack())
        first = await north.enter_async_context(site(models, "north", attic))
        gateway, http = await stack.enter_async_context(region(models, as_site(first)))
        asking = asyncio.create_task(ask(gateway, http, **LONG))
        await attic.host.begun.acquire()

        closing = asyncio.create_task(north.aclose())
        await until(lambda: not gateway.fleet.targets["site/north"].up)
        attic.host.gate.set()

        status, _, headers = await asking
        assert (status, headers["tidegate-served-by"]) == (200, "site/north")
        await closing


def test_a_site_port_with_keys_needs_certificates() -> None:
    with pytest.raises(ValidationError, match="site_port with auth needs the section `tls`"):
        GatewayConfig(site_port=0, auth={"keys_file": "keys.json"})  # type: ignore[arg-type]


def test_a_site_is_called_by_the_link_stream_only() -> None:
    with pytest.raises(ValidationError, match="tier: site is a Tidegate gateway"):
        TargetConfig(name="north", tier="site", address="127.0.0.1:1", transport="unary")


async def test_a_pool_that_is_listed_as_a_site_is_not_used_since_it_would_keep_no_pin(tmp_path: Path) -> None:
    models, pool = repository(tmp_path), Far("pool/main")
    async with running(pool), AsyncExitStack() as stack:
        wrong = TargetConfig(name="main", tier="site", address=pool.address)
        gateway, _ = await stack.enter_async_context(gateway_for(config_over(models, wrong, name="region")))

        assert not gateway.fleet.targets["site/main"].up
        assert "'pool/main' answers there, which is no site" in gateway.fleet.targets["site/main"].reason
