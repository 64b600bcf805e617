"""Lookups against a DNS server on loopback: what each kind of answer means."""

from __future__ import annotations

import pytest

from gateway.discovery.dns_lookup import MOST_HOSTS, DnsLookup, DnsTarget, NoAnswer
from tests.support.discovery.dns_server import DnsFault, DnsServer

SRV = "_grpc._tcp.pools.test"


def services(server: DnsServer, *hosts: str, port: int = 8101) -> None:
    server.records[f"{SRV}.", "SRV"] = [f"0 10 {port} {host}.pools.test." for host in hosts]


def lookup(server: DnsServer, name: str = SRV, *, port: int | None = None, timeout_s: float = 2.0) -> DnsLookup:
    return DnsLookup(name, port, server.address, timeout_s)


async def test_addresses_are_targets_with_the_address_for_a_name() -> None:
    async with DnsServer(ttl_s=7) as server:
        server.records["pools.test.", "A"] = ["10.0.0.2", "10.0.0.1"]
        server.records["pools.test.", "AAAA"] = ["fd00::5"]
        answer = await lookup(server, "pools.test", port=8101).look()
    assert answer.targets == (
        DnsTarget("10-0-0-1", "10.0.0.1:8101"),
        DnsTarget("10-0-0-2", "10.0.0.2:8101"),
        DnsTarget("fd00--5", "[fd00::5]:8101"),
    )
    assert (answer.ttl_s, answer.warning) == (7.0, "")


async def test_a_service_names_its_hosts_and_their_ports() -> None:
    async with DnsServer(ttl_s=5) as server:
        services(server, "pool-0", "pool-1")
        server.records["pool-0.pools.test.", "A"] = ["10.0.0.1"]
        server.records["pool-1.pools.test.", "AAAA"] = ["fd00::2"]
        answer = await lookup(server).look()
    assert answer.targets == (DnsTarget("pool-0", "10.0.0.1:8101"), DnsTarget("pool-1", "[fd00::2]:8101"))


async def test_hosts_of_a_lower_priority_are_in_reserve() -> None:
    async with DnsServer() as server:
        server.records[f"{SRV}.", "SRV"] = ["20 0 1 far.test.", "10 0 1 near.test."]
        server.records["far.test.", "A"], server.records["near.test.", "A"] = ["10.0.0.1"], ["10.0.0.2"]
        answer = await lookup(server).look()
    assert [(one.name, one.reserve) for one in answer.targets] == [("near", False), ("far", True)]


async def test_an_answer_that_is_truncated_is_asked_for_again_over_tcp() -> None:
    async with DnsServer() as server:
        server.records["pools.test.", "A"] = [f"10.0.0.{number}" for number in range(1, 101)]
        answer = await lookup(server, "pools.test", port=1).look()
        assert server.asked["pools.test.", "tcp"] > 0
    assert len(answer.targets) == 100


@pytest.mark.slow
async def test_an_answer_is_bounded() -> None:
    async with DnsServer() as server:
        server.records["pools.test.", "A"] = [
            f"10.0.{number // 250}.{number % 250}" for number in range(MOST_HOSTS + 1)
        ]
        answer = await lookup(server, "pools.test", port=1).look()
    assert len(answer.targets) == MOST_HOSTS
    assert "more than" in answer.warning


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("servfail", "SERVFAIL"),
        ("refused", "REFUSED"),
        ("silent", "no name server answered for pools.test within 0.3 s"),
        ("garbage", "pools.test"),
    ],
)
async def test_a_name_server_in_trouble_is_no_answer(fault: DnsFault, words: str) -> None:
    async with DnsServer() as server:
        server.records["pools.test.", "A"] = ["10.0.0.1"]
        server.fault = fault
        with pytest.raises(NoAnswer, match=words):
            await lookup(server, "pools.test", port=1, timeout_s=0.3).look()


async def test_a_name_that_is_not_there_or_has_no_records_is_no_answer() -> None:
    async with DnsServer() as server:
        with pytest.raises(NoAnswer, match="there is no name pools"):
            await lookup(server, "pools.test", port=1).look()
        server.records["pools.test.", "TXT"] = ['"hello"']
        with pytest.raises(NoAnswer, match="has no A records"):
            await lookup(server, "pools.test", port=1).look()
        server.records[f"{SRV}.", "SRV"] = ["0 0 0 ."]
        with pytest.raises(NoAnswer, match="not to be served"):
            await lookup(server).look()


async def test_a_host_whose_address_fails_keeps_the_last_one_and_a_host_that_is_gone_does_not() -> None:
    async with DnsServer() as server:
        services(server, "pool-0", "pool-1", "pool-2")
        for number in range(3):
            server.records[f"pool-{number}.pools.test.", "A"] = [f"10.0.0.{number}"]
        asks = lookup(server, timeout_s=0.3)
        assert len((await asks.look()).targets) == 3
        server.fault, server.faulty = "servfail", {"pool-0.pools.test."}
        del server.records["pool-1.pools.test.", "A"]
        answer = await asks.look()
    assert [one.name for one in answer.targets] == ["pool-0", "pool-2"]
    assert "pool-1.pools.test: there is no name" in answer.warning and "SERVFAIL" in answer.warning


async def test_a_host_with_two_addresses_stays_at_the_one_in_use() -> None:
    async with DnsServer() as server:
        services(server, "pool-0")
        server.records["pool-0.pools.test.", "A"] = ["10.0.0.5"]
        asks = lookup(server)
        await asks.look()
        server.records["pool-0.pools.test.", "A"] = ["10.0.0.1", "10.0.0.5"]
        assert (await asks.look()).targets == (DnsTarget("pool-0", "10.0.0.5:8101"),)
        server.records["pool-0.pools.test.", "A"] = ["10.0.0.1"]
        assert (await asks.look()).targets == (DnsTarget("pool-0", "10.0.0.1:8101"),)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "used"), [("refused", True), ("servfail", False), ("silent", False)])
async def test_one_family_that_is_refused_leaves_the_other_and_one_that_fails_does_not(
    fault: DnsFault, used: bool
) -> None:
    async with DnsServer() as server:
        server.records = {("pools.test.", "A"): ["10.0.0.1"]}
        server.fault, server.faulty = fault, {"pools.test. AAAA"}
        lookup = DnsLookup("pools.test", 8101, server.address, 0.3)
        if used:
            assert [one.address for one in (await lookup.look()).targets] == ["10.0.0.1:8101"]
        else:
            with pytest.raises(NoAnswer):
                await lookup.look()
