"""The forwarder and a gateway's ingest survive each other's faults: a fake uplink, a fake way back, real files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from edge_agent.offline.forwarder import Forwarder
from edge_agent.offline.queue_db import SCHEMA, StoredItem
from edge_agent.offline.store import OfflineStore
from gateway.ingest.receiver import MAX_OF_ONE, Ingest
from tidegate import clock
from tidegate.fleet.messages import GatewayState
from tidegate.fleet.stored import DeferredAnswer, Forwarded, Inquiry, ItemRefusal, Receipt, decode_stored, encode_stored
from tidegate.fleet.topics import StoredTopic
from tidegate.storage.database import connect

pytestmark = pytest.mark.slow


def id_of(number: int) -> str:
    return f"{number:032x}"


def item(number: int, **fields: Any) -> StoredItem:
    return StoredItem(id_of(number), "request", b"x" * 50, promised=True, **fields)


async def eventually(what: Callable[[], Any]) -> Any:
    async with asyncio.timeout(30.0):
        while not (found := what()):
            await clock.sleep(0.01)
    return found


class Uplink:
    """Notes what is sent; `up` says whether there is a session."""

    def __init__(self) -> None:
        self.up = True
        self.sent: list[tuple[StoredTopic, str, Forwarded | Inquiry]] = []

    def send_stored(self, kind: StoredTopic, gateway: str, payload: bytes) -> bool:
        if self.up:
            self.sent.append((kind, gateway, decode_stored(payload)))
        return self.up

    def ids(self) -> list[str]:
        return [message.id for _, _, message in self.sent if isinstance(message, Forwarded)]


@asynccontextmanager
async def device(folder: Path) -> AsyncIterator[tuple[OfflineStore, Forwarder, Uplink]]:
    uplink = Uplink()
    store = OfflineStore(folder, max_bytes=10**6, max_rows=1000)
    async with store, Forwarder(store, "kiosk", live=lambda: False, uplink=lambda: uplink) as forwarder:
        yield store, forwarder, uplink


def there(forwarder: Forwarder, *gateways: str) -> None:
    forwarder.session(up=True)
    for gateway in gateways:
        forwarder.heard(GatewayState(gateway, True, 1, ingest=True))


async def test_nothing_goes_to_a_gateway_that_takes_nothing(tmp_path: Path) -> None:
    async with device(tmp_path) as (store, forwarder, uplink):
        await store.put(item(1))
        forwarder.session(up=True)
        forwarder.heard(GatewayState("old", True, 1))
        forwarder.heard(GatewayState("gone", False, 1, ingest=True))
        forwarder.heard(GatewayState("new", True, 1, ingest=True))

        await eventually(uplink.ids)

        assert [gateway for _, gateway, _ in uplink.sent] == ["new"]


async def test_it_stays_with_one_gateway_while_that_is_there_and_begins_anew_with_a_session(tmp_path: Path) -> None:
    async with device(tmp_path) as (store, forwarder, uplink):
        await store.put(item(1))
        there(forwarder, "b")
        await eventually(lambda: uplink.ids() == [id_of(1)])
        forwarder.heard(GatewayState("a", True, 1, ingest=True))  # the first by name, and later
        assert forwarder.gateway == "b"

        forwarder.session(up=False)
        there(forwarder, "a", "b")  # no receipt came: it is sent again at once, to the same one

        await eventually(lambda: uplink.ids() == [id_of(1), id_of(1)])
        assert {gateway for _, gateway, _ in uplink.sent} == {"b"}


async def test_a_session_without_room_is_tried_again_soon(tmp_path: Path) -> None:
    async with device(tmp_path) as (store, forwarder, uplink):
        uplink.up = False
        await store.put(item(1))
        there(forwarder, "main")
        await eventually(lambda: forwarder.drain.next_wake(clock.now()) is not None)
        uplink.up = True

        async with asyncio.timeout(15):  # and not after the next sweep
            while uplink.ids() != [id_of(1)]:
                await clock.sleep(0.01)


async def test_a_final_refusal_is_a_dead_letter_and_the_rest_goes_on(tmp_path: Path) -> None:
    async with device(tmp_path) as (store, forwarder, uplink):
        for number in (1, 2):
            await store.put(item(number, key="k"))
        there(forwarder, "main")
        await eventually(lambda: len(uplink.ids()) == 2)

        forwarder.receipt(Receipt("main", (id_of(2),), (ItemRefusal(id_of(1), "too old", final=True),)))

        async with asyncio.timeout(30):
            while (found := await store.ticket(id_of(1))) is None or found.state != "failed":
                await clock.sleep(0.01)
        assert found.why == "no gateway takes it: too old"
        assert await store.waiting(10) == []


async def test_what_was_taken_is_asked_for_and_its_answer_ends_the_ticket(tmp_path: Path) -> None:
    async with device(tmp_path) as (store, forwarder, uplink):
        await store.put(item(1))
        await store.settle(Receipt("main", (id_of(1),)))  # in a former life
        there(forwarder, "main")

        asked = await eventually(lambda: [one for _, _, one in uplink.sent if isinstance(one, Inquiry)])
        assert asked[0].ids == (id_of(1),)
        forwarder.receipt(Receipt("main", answers=(DeferredAnswer(id_of(1), b"yes"),)))

        async with asyncio.timeout(30):
            while (found := await store.ticket(id_of(1))) is None or found.state != "done":
                await clock.sleep(0.01)
        assert found.answer == b"yes"


# --- the gateway's side ----------------------------------------------------------------------------------------------


@asynccontextmanager
async def ingest(path: Path) -> AsyncIterator[tuple[Ingest, list[tuple[str, Receipt]]]]:
    said: list[tuple[str, Receipt]] = []
    async with Ingest(path, "main", max_bytes=2**20, max_seen=1000) as one:
        one.send = lambda device, receipt: said.append((device, receipt)) or True  # type: ignore[func-returns-value]
        yield one, said


def message(number: int, device: str = "kiosk") -> bytes:
    return encode_stored(Forwarded(device, id_of(number), "result", 5, b"body"))


async def test_a_receipt_names_what_is_on_the_disk_again_for_what_comes_again(tmp_path: Path) -> None:
    async with ingest(tmp_path / "ingest.db") as (one, said):
        for _ in range(2):
            one.message("kiosk", message(1))
            one.message("other", message(1, "other"))
            await eventually(lambda: said)
            await eventually(lambda: {device for device, _ in said} == {"kiosk", "other"})
            said.clear()
        assert len(await one.records(0, 10)) == 2


async def test_nobody_speaks_for_another_and_noise_is_counted(tmp_path: Path) -> None:
    async with ingest(tmp_path / "ingest.db") as (one, said):
        one.message("kiosk", message(1, "other"))
        one.message("kiosk", b"\xff\x00")
        one.message("kiosk", message(2))
        await eventually(lambda: said)

        assert one.dropped == {"bad": 2}
        assert [row["id"] for row in await one.records(0, 10)] == [id_of(2)]


async def test_a_flood_of_one_device_takes_its_own_places_only(tmp_path: Path) -> None:
    async with ingest(tmp_path / "ingest.db") as (one, said):
        for number in range(3 * MAX_OF_ONE):
            one.message("flood", message(number, "flood"))
        one.message("kiosk", message(1))
        await eventually(lambda: "kiosk" in {device for device, _ in said})

        assert one.dropped["flood"] == 2 * MAX_OF_ONE


async def test_a_gateway_whose_disk_fails_tells_devices_to_wait_and_takes_nothing(tmp_path: Path) -> None:
    (tmp_path / "ingest.db").mkdir()
    async with ingest(tmp_path / "ingest.db") as (one, said):
        one.message("kiosk", message(1))
        await eventually(lambda: said)

        assert said[0][1].busy_s > 0
        assert said[0][1].taken == ()
        one.message("kiosk", message(2))  # still on its way: not to be taken before the first
        assert one.dropped["unavailable"] == 2


async def test_thousands_of_things_that_are_over_hide_what_is_behind_them_for_seconds_only(tmp_path: Path) -> None:
    with closing(connect(tmp_path / "store.db", SCHEMA)) as db:  # as a device finds them that was off for weeks
        columns = "id, kind, key, priority, promised, born_s, ttl_s, bytes, model, version, variant, body"
        row = f"INSERT INTO entries ({columns}) VALUES (?, 'result', 'results', 0, 0, -9, 1, 257, '', '', '', x'00')"
        db.execute("BEGIN")
        db.executemany(row, [(id_of(number),) for number in range(700)])
        db.execute("COMMIT")
    async with device(tmp_path) as (store, forwarder, uplink):
        await store.put(StoredItem(id_of(9999), "result", b"x", key="results"))
        there(forwarder, "main")
        await eventually(lambda: id_of(9999) in uplink.ids())
        assert (await store.usage()).waiting == 1
