"""A link that fails: silent, deaf, refused, cut at a byte, forgotten by a NAT; each as a client sees it."""

from __future__ import annotations

import asyncio
from statistics import median

import pytest

from tests.support.loop import on_virtual_time
from tests.tidegate.netsim.proxy.ends import CLEAR, Client, Recorder, echo, linked, newcomer, pattern, upstream
from tidegate import clock
from tidegate.netsim.links.profile import Alternation
from tidegate.netsim.links.stream import LimitSpec, StreamProfile
from tidegate.netsim.proxy.link import LinkProxy


@on_virtual_time
async def test_a_blackhole_is_silent_and_delivers_everything_when_healed() -> None:
    async with linked(profile=StreamProfile(delay_ms=10.0)) as link, Client(link) as client:
        await client.ask()
        link.partition("blackhole")
        client.writer.write(b"are you there")
        async with Client(link) as newcomer:
            newcomer.writer.write(b"anybody?")
            assert await client.hears_nothing_for(3600.0)
            assert await newcomer.hears_nothing_for(1.0)

            healed_at = clock.now()
            link.heal()

            assert await client.reader.readexactly(13) == b"are you there"
            assert await newcomer.reader.readexactly(8) == b"anybody?"
            assert clock.now() - healed_at < 0.1


@on_virtual_time
async def test_a_blackhole_holds_what_was_on_its_way() -> None:
    async with linked(profile=StreamProfile(delay_ms=100.0)) as link, Client(link) as client:
        client.writer.write(b"x")
        await clock.sleep(0.05)
        link.partition("blackhole")
        assert await client.hears_nothing_for(10.0)


@on_virtual_time
async def test_on_a_half_open_link_requests_arrive_and_answers_vanish() -> None:
    recorder = Recorder()
    async with linked(recorder, CLEAR) as link, Client(link) as client:
        link.partition("blackhole", "from")
        client.writer.write(b"request")
        await recorder.until(lambda: recorder.got == [b"request"])
        assert await client.hears_nothing_for(60.0)


@on_virtual_time
async def test_a_closed_end_is_not_heard_of_through_a_blackhole() -> None:
    recorder = Recorder()
    async with linked(recorder, CLEAR) as link:
        async with Client(link) as client:
            client.writer.write(b"last words")
            await recorder.until(lambda: recorder.got == [b"last words"])
            link.partition("blackhole")
        await clock.sleep(600.0)
        assert recorder.ends == []
        link.heal()
        await recorder.until(lambda: recorder.ends == ["eof"])


@pytest.mark.parametrize(
    ("kind", "old", "new"), [("reset", "reset", "reset"), ("close", "eof", "eof"), ("refuse", "reset", "refused")]
)
@on_virtual_time
async def test_a_client_can_tell_resets_closes_and_refusals_apart(kind: str, old: str, new: str) -> None:
    async with linked(profile=StreamProfile(delay_ms=5.0)) as link, Client(link) as client:
        await client.ask()

        link.partition(kind)  # type: ignore[arg-type]

        assert await client.end() == old
        assert await newcomer(link) == new
        link.heal()
        async with Client(link) as after:
            await after.ask()


@on_virtual_time
async def test_a_silent_server_accepts_and_never_answers_while_old_connections_live() -> None:
    # nice-grpc #904: the connection is there, HTTP/2's SETTINGS never come, and a client without a limit waits for ever
    async with linked(profile=CLEAR) as link, Client(link) as old:
        await old.ask()
        link.partition("silent")
        async with Client(link) as new:
            new.writer.write(b"PRI * HTTP/2.0")
            assert await new.hears_nothing_for(600.0)
            await old.ask()
            link.heal()
            assert await new.hears_nothing_for(600.0)
        async with Client(link) as healed:
            await healed.ask()


@pytest.mark.slow
async def test_connecting_to_a_deaf_port_times_out_and_works_again_after_healing() -> None:
    async with linked(profile=CLEAR) as link, Client(link) as old:
        await old.ask()
        link.partition("deaf")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2), Client(link):
                pass
        await old.ask()
        link.heal()
        async with Client(link) as new:
            await new.ask()
        assert link.accepted == 2


@on_virtual_time
async def test_an_upstream_that_refuses_resets_the_client() -> None:
    async with upstream(echo) as address:
        pass
    async with LinkProxy(address) as link:
        assert await newcomer(link) == "reset"
        assert [event.what for event in link.log.events()][-2:] == ["refused", "close"]


@pytest.mark.parametrize(("then", "end"), [("close", "eof"), ("reset", "reset")])
@pytest.mark.parametrize("size", [0, 1, 1499, 100_001])
@on_virtual_time
async def test_a_connection_breaks_at_the_exact_byte(size: int, then: str, end: str) -> None:
    recorder = Recorder()
    async with linked(recorder) as link:
        link.put("cut", StreamProfile(delay_ms=1.0, limit=LimitSpec(size, then)), "to")  # type: ignore[arg-type]
        async with Client(link) as client:
            client.writer.write(pattern(300_000))
            assert await client.end() == end
        await recorder.until(lambda: bool(recorder.ends))
    assert recorder.got == [pattern(300_000)[:size]]
    assert recorder.ends == [end]


@on_virtual_time
async def test_a_connection_that_stalls_at_a_byte_is_silent_afterwards_in_that_direction_only() -> None:
    async with linked(profile=CLEAR) as link:
        link.put("cut", StreamProfile(delay_ms=0.0, limit=LimitSpec(1000, "stall")), "to")
        async with Client(link) as client:
            client.writer.write(pattern(5000))
            assert await client.reader.readexactly(1000) == pattern(1000)
            assert await client.hears_nothing_for(3600.0)
        assert link.totals()["to"]["dropped"] == {"limit": 4000}


@on_virtual_time
async def test_a_nat_forgets_a_silent_connection_and_tells_nobody() -> None:
    recorder = Recorder()
    async with linked(recorder, StreamProfile(delay_ms=5.0, nat_idle_s=60.0)) as link, Client(link) as client:
        for _ in range(3):  # whoever pings within the minute is remembered
            client.writer.write(b"ping")
            await clock.sleep(59.0)
        await clock.sleep(2.0)

        client.writer.write(b"lost")
        await clock.sleep(600.0)

        assert recorder.got == [b"pingpingping"]
        assert recorder.ends == []
        assert [event.what for event in link.log.events("forgot")] == ["forgot"]
        assert link.totals()["to"]["dropped"] == {"nat": 4}


@on_virtual_time
async def test_a_flapping_link_holds_bytes_while_it_is_gone_and_loses_none() -> None:
    profile = StreamProfile(delay_ms=1.0, outages=Alternation(every_s=1.0, for_s=0.4, periodic=True))
    async with linked(profile=profile) as link, Client(link) as client:
        waits = []
        for _ in range(200):
            waits.append(await client.ask())
            await clock.sleep(0.03)
    assert min(waits) < 0.01
    assert max(waits) > 0.2
    assert median(waits) < 0.1
