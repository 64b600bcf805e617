"""A gateway whose targets are behind a DNS name: real lookups, real links, real requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config.discovery import SourceConfig
from tests.support.discovery.dns_server import DnsServer
from tests.support.gateway.app import Far, ask, configured, gateway_for, running, until

pytestmark = pytest.mark.slow
NAME = "_grpc._tcp.pools.test"


def listed(server: DnsServer, *fars: Far) -> None:
    server.records = {(f"{NAME}.", "SRV"): []}
    for far in fars:
        host = f"{far.name.split('/')[1]}.pools.test."
        server.records[f"{NAME}.", "SRV"].append(f"0 0 {far.address.rpartition(':')[2]} {host}")
        server.records[host, "A"] = ["127.0.0.1"]


def source(server: DnsServer) -> SourceConfig:
    return SourceConfig(source="dns", name=NAME, server=server.address, every_s=0.1, timeout_s=0.5)


async def test_pools_behind_a_service_come_and_go(tmp_path: Path) -> None:
    one, two = Far("pool/one"), Far("pool/two")
    async with running(one, two), DnsServer() as server:
        listed(server, one)
        async with gateway_for(configured(tmp_path, discovery=(source(server),))) as (gateway, session):
            assert (await ask(gateway, session))[2]["tidegate-served-by"] == "pool/one"
            listed(server, one, two)
            await until(lambda: len(gateway.fleet.offered("echo", "3")) == 2)
            listed(server, two)
            await until(lambda: gateway.fleet.targets["pool/one"].leaving != "")
            for _ in range(5):
                assert (await ask(gateway, session))[2]["tidegate-served-by"] == "pool/two"


async def test_a_name_server_that_is_away_loses_no_target(tmp_path: Path) -> None:
    one, two = Far("pool/one"), Far("pool/two")
    async with running(one, two), DnsServer() as server:
        listed(server, one, two)
        async with gateway_for(configured(tmp_path, discovery=(source(server),))) as (gateway, session):
            state = gateway.found.sources[f"dns:{NAME}"]
            for fault, word in (
                ("servfail", "SERVFAIL"),
                ("silent", "no name server answered"),
                ("refused", "REFUSED"),
            ):
                server.fault = fault  # type: ignore[assignment]  # one of the literals
                await until(lambda word=word: word in state.why)
                assert len(gateway.fleet.offered("echo", "3")) == 2
                assert (await ask(gateway, session))[0] == 200
            server.fault, server.records = "", {}
            await until(lambda: "there is no name" in state.why)
            assert len(gateway.fleet.offered("echo", "3")) == 2
            listed(server, one, two)
            await until(lambda: state.why == "")


async def test_the_links_decide_which_targets_of_an_absent_source_are_dead(tmp_path: Path) -> None:
    one, two = Far("pool/one"), Far("pool/two")
    async with running(one, two), DnsServer() as server:
        listed(server, one, two)
        async with gateway_for(configured(tmp_path, discovery=(source(server),))) as (gateway, session):
            server.fault = "servfail"
            await until(lambda: gateway.found.sources[f"dns:{NAME}"].why != "")
            await one.kill()
            await until(lambda: not gateway.fleet.targets["pool/one"].up)
            assert (await ask(gateway, session))[2]["tidegate-served-by"] == "pool/two"


async def test_a_pool_that_restarts_elsewhere_keeps_its_id(tmp_path: Path) -> None:
    before, after = Far("pool/one"), Far("pool/one")
    async with running(before, after), DnsServer() as server:
        listed(server, before)
        async with gateway_for(configured(tmp_path, discovery=(source(server),))) as (gateway, session):
            view = gateway.fleet.targets["pool/one"]
            listed(server, after)
            await until(lambda: view.spec.address == after.address and view.up)
            assert list(gateway.fleet.targets) == ["pool/one"]
            assert (await ask(gateway, session))[0] == 200


async def test_an_answer_of_which_nothing_can_be_used_loses_no_target(tmp_path: Path) -> None:
    far = Far("pool/one")
    async with running(far), DnsServer() as server:
        listed(server, far)
        async with gateway_for(configured(tmp_path, discovery=(source(server),))) as (gateway, session):
            state = gateway.found.sources[f"dns:{NAME}"]
            server.records[f"{NAME}.", "SRV"] = ["0 0 8101 _portal.pools.test."]
            server.records["_portal.pools.test.", "A"] = ["127.0.0.1"]
            await until(lambda: "nothing of the answer can be used: _portal: its host's" in state.why)
            assert not gateway.fleet.targets["pool/one"].leaving
            assert (await ask(gateway, session))[0] == 200
            listed(server, far)
            await until(lambda: not state.why)


async def test_a_gateway_starts_without_its_name_server(tmp_path: Path) -> None:
    far = Far("pool/one")
    async with running(far), DnsServer() as server:
        server.fault = "servfail"
        async with gateway_for(configured(tmp_path, discovery=(source(server),))) as (gateway, session):
            assert (await ask(gateway, session))[0] == 503
            server.fault = ""
            listed(server, far)
            await until(lambda: gateway.host.model_ready("echo"))
            assert (await ask(gateway, session))[0] == 200
