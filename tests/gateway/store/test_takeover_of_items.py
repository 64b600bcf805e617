"""Gateway processes are killed, stopped or lose their store: no ticket and no acknowledged result is lost or double."""

from __future__ import annotations

import json
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from tests.bench.harness import Child
from tests.support.gateway.app import BODY, Far, repository, running, until
from tests.support.gateway.stored_device import StoredDevice
from tests.support.mqtt.brokers import MOSQUITTO, Mosquitto
from tests.support.stores import REDIS, RedisServer
from tidegate import clock
from tidegate.oip.grpc.codec import message_from_request
from tidegate.oip.http.codec import decode_request

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(REDIS is None, reason="redis-server is not installed"),
    pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed"),
]
REQUEST = decode_request(json.dumps(BODY).encode(), header_length=None, model_name="echo").request
ASKED = message_from_request(REQUEST).SerializeToString()
EVENT = b'{"mode":"online"}'


class Site:
    """Gateways as processes, each with a file of its own for what devices send."""

    def __init__(self, stack: AsyncExitStack, folder: Path, broker: str, store: str) -> None:
        self._stack = stack
        self._folder = folder
        self._words = {"mqtt": broker, "store": {"url": store}, "model_repository": str(folder / "models")}
        self.children: dict[str, Child] = {}

    async def start(self, name: str, *, pool: str | None = None) -> Child:
        ports = dict.fromkeys(("http_port", "grpc_port", "metrics_port", "admin_port"), 0)
        words: dict[str, Any] = {"name": name, "ingest": {"path": str(self._folder / f"{name}.db")}, **self._words}
        if pool is not None:
            words["targets"] = [{"name": "main", "address": pool}]
        config = self._folder / f"{name}.yaml"
        config.write_text(yaml.safe_dump({**ports, **words}))
        child = Child(name, "-m", "gateway", "--config", str(config), log=self._folder / f"{name}.log")
        await self._stack.enter_async_context(child)
        while child.ready["event"] != "ready":
            child.ready = await child.line()
        self.children[name] = child
        return child

    async def records(self, name: str, after: int = 0) -> dict[str, Any]:
        url = f"{self.children[name].ready['addresses']['admin']}/v1/ingested?after={after}&limit=1000"
        async with aiohttp.ClientSession() as http, http.get(url) as response:
            assert response.status == 200
            return await response.json()  # type: ignore[no-any-return]

    async def has(self, name: str, *ids: str, within_s: float = 60.0) -> dict[str, Any]:
        """Wait until a gateway has records of all of these; what it has then."""
        until_at = clock.now() + within_s
        while True:
            found = await self.records(name)
            if set(ids) <= {one["id"] for one in found["records"]} or clock.now() > until_at:
                assert set(ids) <= {one["id"] for one in found["records"]}, found["state"]
                return found
            await clock.sleep(0.2)

    async def lets_go(self, name: str, within_s: float = 60.0) -> None:
        """Wait until a gateway has no records: it asks the store about them some at a time."""
        until_at = clock.now() + within_s
        while left := (await self.records(name))["records"]:
            assert clock.now() < until_at, left
            await clock.sleep(0.2)

    async def deferred(self, name: str, count: int, within_s: float = 60.0) -> None:
        until_at = clock.now() + within_s
        while (state := (await self.records(name))["state"])["deferred"] != count:
            assert clock.now() < until_at, state
            await clock.sleep(0.2)


async def test_a_killed_gateway_loses_no_ticket_and_no_acknowledged_result(tmp_path: Path) -> None:
    repository(tmp_path)
    pool = Far("pool/main")
    with Mosquitto(tmp_path) as broker, RedisServer(tmp_path) as store:
        async with AsyncExitStack() as stack, running(pool), StoredDevice("cam", broker.port) as device:
            site = Site(stack, tmp_path, broker.url, store.url)
            first = await site.start("a")  # without a target: it can answer nothing
            await site.start("b", pool=pool.address)
            tickets = [device.store(number, "request", ASKED) for number in range(5)]
            results = [device.store(100 + number, "event", EVENT) for number in range(40)]
            for one in (*tickets, *results):
                device.send("a", one)
            await until(lambda: len(device.taken) == 45)
            device.ask("b", *(one.id for one in tickets))  # it knows that they are under way elsewhere
            await clock.sleep(0.5)
            assert device.unknown == {} and device.answers == {}

            first.signal(signal.SIGKILL)
            killed_at = clock.now()
            found = await site.has("b", *(one.id for one in (*tickets, *results)))
            print(f"taken over and answered {clock.now() - killed_at:.1f} s after the kill")
            await until(lambda: len(device.answers) == 5)
            assert all(not one.code and one.body for one in device.answers.values())
            device.send("b", tickets[0])  # whose receipt the device has not seen: it is sent again, and taken once
            await until(lambda: ("b", tickets[0].id) in device.receipts)

            await site.start("a", pool=pool.address)  # with the disk that it had
            await site.deferred("a", 0)
            await site.lets_go("a")  # what another one has taken over is not its own any more
            again = await site.records("b")
            ids = [one["id"] for one in again["records"]]
            assert sorted(ids) == sorted(set(ids)) and len(ids) == 45 and found["state"]["taken_over"] == 45


async def test_a_gateway_that_was_stopped_answers_nothing_that_was_taken_over(tmp_path: Path) -> None:
    repository(tmp_path)
    pool = Far("pool/main")
    with Mosquitto(tmp_path) as broker, RedisServer(tmp_path) as store:
        async with AsyncExitStack() as stack, running(pool), StoredDevice("cam", broker.port) as device:
            site = Site(stack, tmp_path, broker.url, store.url)
            first = await site.start("a")
            await site.start("b")
            ticket, result = device.store(1, "request", ASKED), device.store(2, "event", EVENT)
            device.send("a", ticket)
            device.send("a", result)
            await until(lambda: len(device.taken) == 2)
            first.signal(signal.SIGSTOP)
            await site.has("b", result.id)
            await site.deferred("b", 1)
            first.signal(signal.SIGCONT)
            await site.deferred("a", 0)
            assert (await site.records("a"))["records"] == []
            assert [one["id"] for one in (await site.records("b"))["records"]] == [result.id]


async def test_a_store_that_was_killed_gets_everything_again_and_then_a_gateway_may_die(tmp_path: Path) -> None:
    repository(tmp_path)
    with Mosquitto(tmp_path) as broker, RedisServer(tmp_path) as store:
        async with AsyncExitStack() as stack, StoredDevice("cam", broker.port) as device:
            site = Site(stack, tmp_path, broker.url, store.url)
            first = await site.start("a")
            await site.start("b")
            before = [device.store(number, "event", EVENT) for number in range(3)]
            during = [device.store(10 + number, "request", ASKED) for number in range(3)]
            read = device.store(20, "event", EVENT)
            device.send("a", read)
            await until(lambda: read.id in device.taken)
            assert (await site.records("a"))["last"] == 1
            await site.records("a", after=1)  # a program has worked it off
            for one in before:
                device.send("a", one)
            await until(lambda: len(device.taken) == 4)
            store.kill()  # nothing of it is on a disk
            for one in during:
                device.send("a", one)
            await until(lambda: len(device.taken) == 7)  # without a store as without one
            store.start()
            items = "tidegate:{site}:ingest:items:a"
            until_at = clock.now() + 60.0
            while store.say("HLEN", items) != "6":
                assert clock.now() < until_at, store.say("HKEYS", items)
                await clock.sleep(0.2)
            first.signal(signal.SIGKILL)
            found = await site.has("b", *(one.id for one in before))
            assert read.id not in {one["id"] for one in found["records"]}, "what was read is not read twice"
            await site.deferred("b", 3)
            assert int(store.say("PTTL", "tidegate:{site}:ingest:items:b")) > 0
