"""What a link may cost: memory, file descriptors, connections and log lines; and orders that make no sense."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import socket

import pytest

from tests.support.loop import on_virtual_time
from tests.tidegate.netsim.proxy.ends import CLEAR, Client, echo, linked, newcomer, upstream
from tidegate import clock
from tidegate.netsim.links.profile import CapacityRecording
from tidegate.netsim.links.stream import StreamProfile
from tidegate.netsim.proxy.events import EventLog
from tidegate.netsim.proxy.link import LinkError, LinkProxy


@on_virtual_time
async def test_a_sink_that_does_not_read_holds_its_sender_back_and_the_proxy_stays_small() -> None:
    async def never_reads(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await clock.sleep(1e6)

    async with linked(never_reads, CLEAR, buffer_bytes=100_000) as link, Client(link) as client:
        client.writer.transport.set_write_buffer_limits(high=1)  # type: ignore[attr-defined]
        client.writer.write(bytes(20_000_000))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await client.writer.drain()
        assert link.totals()["to"]["held"] <= 100_000 + 65536


@pytest.mark.slow
@on_virtual_time
async def test_a_sink_that_reads_again_while_the_link_is_cut_does_not_spin() -> None:
    reads = asyncio.Event()

    async def reads_later(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await reads.wait()
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        while await reader.read(65536):
            pass

    async with linked(reads_later, CLEAR) as link, Client(link) as client:
        client.writer.write(bytes(20_000_000))
        await clock.sleep(1.0)
        link.partition("blackhole")
        reads.set()
        async with asyncio.timeout(5.0):  # virtual time stands still while anything spins
            await clock.sleep(1.0)
        link.heal()


@on_virtual_time
async def test_without_file_descriptors_newcomers_wait_until_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked(profile=CLEAR) as link:
        tries = []
        real = socket.socket.accept

        def accept(listener: socket.socket) -> object:
            if listener.getsockname()[1] == link.port:
                tries.append(clock.now())
                if len(tries) < 3:
                    raise OSError(errno.EMFILE, "Too many open files")
            return real(listener)

        monkeypatch.setattr(socket.socket, "accept", accept)
        async with Client(link) as client:
            await client.ask()
        assert tries[1] - tries[0] >= 0.2  # and not at once, for ever


@on_virtual_time
async def test_shutdown_leaves_no_socket_no_task_and_no_timer() -> None:
    gc.collect()
    before, tasks = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())
    async with upstream(echo) as address:
        async with LinkProxy(address) as link:
            link.apply(StreamProfile(delay_ms=1000.0))
            clients = [Client(link) for _ in range(5)]
            for client in clients:
                await client.__aenter__()
                client.writer.write(b"never comes")
            link.partition("silent")
            mute = Client(link)
            await mute.__aenter__()
            await clock.sleep(0.1)
        assert {await client.end() for client in [*clients, mute]} == {"reset"}
        for client in [*clients, mute]:
            await client.__aexit__()
    assert link.totals()["to"]["dropped"] == {"shutdown": 55}
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(asyncio.all_tasks()) == tasks


@on_virtual_time
async def test_over_its_limit_of_connections_a_link_resets_newcomers() -> None:
    async with linked(profile=CLEAR, max_connections=1) as link, Client(link) as first:
        await first.ask()
        assert await newcomer(link) == "reset"
        await first.ask()


@on_virtual_time
async def test_orders_that_make_no_sense_are_refused_in_words() -> None:
    async with linked(profile=CLEAR) as link:
        with pytest.raises(LinkError, match="no partition 'tsunami'"):
            link.partition("tsunami")  # type: ignore[arg-type]
        with pytest.raises(LinkError, match="direction must be"):
            link.partition("blackhole", "up")  # type: ignore[arg-type]
        with pytest.raises(LinkError, match="reset has no direction"):
            link.partition("reset", "to")
        with pytest.raises(LinkError, match="no toxic 'slow'"):
            link.remove("slow")
        with pytest.raises(LinkError, match="'base' is the link itself"):
            link.put("base", CLEAR, "to")
        with pytest.raises(LinkError, match="files were not read"):
            link.apply(StreamProfile(recording=CapacityRecording("a", "b")))
        assert link.broken is None


@on_virtual_time
async def test_the_log_keeps_the_newest_and_counts_the_others() -> None:
    seen = []
    async with linked(profile=CLEAR, log=EventLog(seen.append, kept=3)) as link:
        for _ in range(4):
            link.partition("blackhole")
            link.heal()
        assert len(seen) == link.log.total == 10
        assert link.log.text().splitlines()[0] == "… 7 earlier events"
        assert link.log.text(newest=1).splitlines()[1].endswith("heal  kind=blackhole")
        assert repr(link.log) == "<EventLog 10 events>"
