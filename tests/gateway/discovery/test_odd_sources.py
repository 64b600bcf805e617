"""Sources that misbehave: they flap, move targets under load, trade ids, and say what cannot be a target."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.app import Gateway
from gateway.config.discovery import SourceConfig
from gateway.core.access.networks import AllowedNetworks
from gateway.core.fleet.found_targets import MOST_TARGETS, Found, FoundTargets
from gateway.core.fleet.target import TargetSpec
from gateway.discovery.discovery import Discovery
from gateway.discovery.reports import SourceAway, SourceSaid
from tests.gateway.discovery.test_file_source import listed, write
from tests.support.discovery.dns_server import DnsServer
from tests.support.gateway.app import Far, ask, configured, gateway_for, running, until
from tidegate import clock

pytestmark = pytest.mark.slow


@asynccontextmanager
async def load(gateway: Gateway, session: aiohttp.ClientSession) -> AsyncIterator[Counter[Any]]:
    """Requests one after another, four at a time, until the end; counts statuses and who has served."""
    seen: Counter[Any] = Counter()

    async def call() -> None:
        while True:
            status, _, headers = await ask(gateway, session)
            seen[status] += 1
            seen[headers.get("tidegate-served-by", "")] += 1
            await clock.sleep(0.002)

    async with asyncio.TaskGroup() as tasks:
        callers = [tasks.create_task(call()) for _ in range(4)]
        yield seen
        for caller in callers:
            caller.cancel()


async def test_a_source_that_flaps_under_load_costs_no_request(tmp_path: Path) -> None:
    stays, flaps, path = Far("pool/stays"), Far("pool/flaps"), tmp_path / "targets.yaml"
    async with running(stays, flaps):
        write(path, listed(stays, flaps))
        config = configured(tmp_path, discovery=(SourceConfig(source="file", path=path),))
        async with gateway_for(config) as (gateway, session), load(gateway, session) as seen:
            view = gateway.fleet.targets["pool/flaps"]
            for turn in range(8):
                write(path, listed(stays, flaps) if turn % 2 else listed(stays))
                wanted = "" if turn % 2 else "does not list it"
                await until(lambda wanted=wanted: wanted in view.leaving and bool(wanted) == bool(view.leaving))
            await clock.sleep(0.3)
            assert gateway.fleet.targets["pool/flaps"] is view and view.up
        assert set(seen) <= {200, "pool/stays", "pool/flaps"} and seen[200] > 50


async def test_a_target_that_keeps_moving_under_load_costs_no_request(tmp_path: Path) -> None:
    stays, here, there = Far("pool/stays"), Far("pool/moves"), Far("pool/moves")
    path = tmp_path / "targets.yaml"
    async with running(stays, here, there):
        write(path, listed(stays, here))
        config = configured(tmp_path, discovery=(SourceConfig(source="file", path=path),))
        async with gateway_for(config) as (gateway, session), load(gateway, session) as seen:
            view = gateway.fleet.targets["pool/moves"]
            for turn in range(6):
                to = here if turn % 2 else there
                write(path, listed(stays, to))
                await until(lambda to=to: view.spec.address == to.address and view.up)
            assert gateway.fleet.targets["pool/moves"] is view
        assert set(seen) <= {200, "pool/stays", "pool/moves"} and seen[200] > 50


async def test_an_id_that_goes_from_one_source_to_another_is_one_target_all_along(tmp_path: Path) -> None:
    far, other = Far("pool/one"), Far("pool/one")
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    async with running(far, other):
        write(first, listed(far))
        write(second, listed(other))
        sources = tuple(SourceConfig(source="file", path=path) for path in (first, second))
        async with gateway_for(configured(tmp_path, discovery=sources)) as (gateway, session):
            view = gateway.fleet.targets["pool/one"]
            assert view.spec.address == far.address and len(list(gateway.found.refusals())) == 1
            async with load(gateway, session) as seen:
                write(first, [])
                await until(lambda: view.spec.address == other.address and view.up)
            assert gateway.fleet.targets["pool/one"] is view and not list(gateway.found.refusals())
            assert seen[200] > 0 and set(seen) <= {200, 503, "pool/one", ""}
            write(first, listed(far))  # the owner now is the other one
            await until(lambda: len(list(gateway.found.refusals())) == 1)
            assert view.spec.address == other.address


async def test_a_hostile_zone_costs_only_what_is_odd_in_it(tmp_path: Path) -> None:
    far, name = Far("pool/good"), "_grpc._tcp.pools.test"
    async with running(far), DnsServer() as server:
        good = far.address.rpartition(":")[2]
        hosts = {
            "good.test.": good,
            "no-port.test.": "0",
            "*.test.": good,
            "-x.test.": good,
            "a\\010b.test.": good,
            f"{'y' * 63}.test.": good,
        }
        server.records = {(host, "A"): ["127.0.0.1"] for host in hosts}
        server.records[f"{name}.", "SRV"] = [f"0 0 {port} {host}" for host, port in hosts.items()]
        section = SourceConfig(source="dns", name=name, server=server.address, every_s=0.1, timeout_s=0.5)
        async with gateway_for(configured(tmp_path, discovery=(section,))) as (gateway, session):
            await until(lambda: gateway.host.model_ready("echo"))
            assert (await ask(gateway, session))[0] == 200
            assert sorted(gateway.found.targets) == ["pool/good", f"pool/{'y' * 63}"]
            warning = gateway.found.sources[section.label].warning
            assert "no-port" in warning and len(warning) < 2000 and "\n" not in warning


def discovery(found: FoundTargets, *, has_tls: bool = False) -> Discovery:
    section = SourceConfig(source="announce")
    return Discovery((section,), found, lambda: None, lambda: 0.5, has_tls=has_tls, networks=AllowedNetworks(()))


@pytest.mark.parametrize(
    ("spec", "has_tls", "words"),
    [
        (TargetSpec("pool/a", "pool", "h:1"), True, ""),
        (TargetSpec("pool/a\r\nx: y", "pool", "h:1"), False, "its name must be"),
        (TargetSpec("pool/a/b", "pool", "h:1"), False, "its name must be"),
        (TargetSpec("pool/a", "pool", "h:0"), False, "no HOST:PORT"),
        (TargetSpec("pool/a", "pool", "unix:/x"), False, "no HOST:PORT"),
        (TargetSpec(f"pool/{'a' * 50}", "pool", "h:1"), False, ""),
        (TargetSpec(f"pool/{'a' * 50}", "pool", "h:1"), True, "no certificate can be its own"),
        (TargetSpec(f"pool/{'a' * 50}", "pool", "h:1", encrypted=False), True, ""),
        (TargetSpec("pool/A", "pool", "h:1"), True, "no certificate can be its own"),
    ],
)
def test_what_cannot_be_a_target_is_left_out_and_named(spec: TargetSpec, has_tls: bool, words: str) -> None:
    found = FoundTargets((), ["announce"])
    good = Found(TargetSpec("pool/good", "pool", "10.0.0.1:1"))
    discovery(found, has_tls=has_tls).fold(SourceSaid("announce", (Found(spec), good)))
    assert ("pool/good" in found.targets) and ((spec.id in found.targets) == (words == ""))
    assert words in found.sources["announce"].warning


def test_a_set_is_bounded_and_says_so() -> None:
    found = FoundTargets((), ["announce"])
    many = tuple(Found(TargetSpec(f"pool/p{number}", "pool", "h:1")) for number in range(MOST_TARGETS + 1))
    folding = discovery(found)
    folding.fold(SourceSaid("announce", many))
    assert len(found.targets) == MOST_TARGETS
    assert "more than 4096" in found.sources["announce"].warning
    folding.fold(SourceAway("announce", "gone"))
    assert len(found.targets) == MOST_TARGETS
