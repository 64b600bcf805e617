"""The console over HTTP: what is open, what requires a key, and a screen whose size is bounded."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.app import Gateway
from gateway.core.estimate.sliding_stats import SlidingStats
from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkUp
from gateway.core.fleet.target import TargetSpec
from gateway.core.health.degradation import Condition
from gateway.operate import console
from gateway.operate.console import moments
from gateway.operate.console.history import POINTS, ConsoleHistory
from gateway.operate.console.page import page_files
from gateway.operate.console.snapshot import FOUND, ROWS, ConsoleView
from tests.support.gateway.app import Far, ask, configured, gateway_for, running, target, until
from tests.support.gateway.doors import admission_of
from tests.support.gateway.fleets import NOW, offer, spec
from tests.support.gateway.guarded import guarded
from tests.support.gateway.targets import GROWING_S
from tidegate.fleet.conditions import DeviceConditions
from tidegate.outcome import DeadlineExceeded, InvalidRequest, NothingAlive
from tidegate.types import Call, InferRequest, InferResponse, Reply, Route

Event = tuple[str, Any]
STATIC = Path(console.__file__).parent / "static"
MARKUP = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(")


class Models:
    def __init__(self) -> None:
        self.manifests: tuple[Any, ...] = ()


def sight_of(fleet: Fleet) -> ConsoleView:
    return ConsoleView("main", ConsoleHistory(fleet, lambda: 0), fleet, admission_of(), Models(), {})  # type: ignore[arg-type]


def fleet_of_many(edges: int) -> Fleet:
    fleet = Fleet(lambda model, version: "tokens")
    for name in ("pool/main", *(f"edge/kiosk-{number:05}" for number in range(edges))):
        fleet.add(spec(name), NOW)
        fleet.fold(LinkUp(name, name, 1, (offer(),)), NOW)
    return fleet


def call(model: str = "minilm") -> Call:
    return Call(InferRequest(model, ()), "oip-http", NOW)


def reply(served_by: str = "edge/a", left_s: float = 1.0) -> Reply:
    return Reply(InferResponse("minilm", "1", ()), route=Route(served_by, "cheapest", "int8"), budget_left_s=left_s)


async def seen(console_view: ConsoleView) -> dict[str, Any]:
    return console_view.snapshot(NOW + 1.0, NOW, await console_view.states(lambda: asyncio.sleep(0.0)))  # noqa: TID251


@pytest.mark.slow
async def test_a_screen_of_a_thousand_edges_is_not_larger_than_one_of_fifty() -> None:
    few, many = (sight_of(fleet_of_many(count)) for count in (50, 1000))
    for one in (few, many):
        for _ in range(POINTS + 50):
            one.watch.tick(NOW, NOW)
        for name in one.fleet.targets:
            one.watch.answered(call(), reply(name), NOW + 0.010)

    shown = [await seen(one) for one in (few, many)]

    assert [len(one["targets"]) for one in shown] == [ROWS, ROWS]
    assert shown[1]["health"]["edge"]["well"] == 1000
    assert shown[1]["more_targets"] == 1001 - ROWS
    sizes = [len(json.dumps(one)) for one in shown]
    assert sizes[1] < sizes[0] + 500
    assert len(many.history()["points"]) == POINTS
    assert len(many.find("kiosk", NOW)) == FOUND
    assert [one["id"] for one in many.find("KIOSK-00777", NOW)] == ["edge/kiosk-00777"]


async def test_unhealthy_targets_come_before_busy_ones() -> None:
    console_view = sight_of(fleet_of_many(100))
    for _ in range(50):
        console_view.watch.answered(call(), reply("edge/kiosk-00001"), NOW + 0.010)
    console_view.fleet.heard("edge/kiosk-00099", load=None, doubt="stale", now=NOW)

    shown = [one["id"] for one in (await seen(console_view))["targets"]]

    assert shown[:3] == ["pool/main", "edge/kiosk-00099", "edge/kiosk-00001"]


async def test_a_site_is_counted_beside_edges_and_pools() -> None:
    console_view = sight_of(fleet_of_many(2))
    assert set((await seen(console_view))["health"]) == {"edge", "pool"}
    console_view.fleet.add(TargetSpec("site/harbour", "site", "127.0.0.1:1"), NOW)
    console_view.fleet.fold(LinkUp("site/harbour", "site/harbour", 1, (offer(),)), NOW)

    shown = await seen(console_view)

    assert shown["health"]["site"]["well"] == 1
    assert "site/harbour" in [one["id"] for one in shown["targets"]]
    detail = console_view.detail("site/harbour", NOW)
    assert detail is not None
    assert detail["places"] == 1.0
    edge = console_view.detail("edge/kiosk-00001", NOW)
    assert edge is not None
    assert edge["places"] is None


def test_callers_own_mistakes_and_cancelled_requests_are_not_counted() -> None:
    watch = sight_of(fleet_of_many(1)).watch
    for error in (InvalidRequest("no"), asyncio.CancelledError(), NothingAlive("nobody")):
        watch.ended(call(), error, NOW + 0.010)
    watch.answered(call(), reply(left_s=-0.1), NOW + 0.010)

    assert {way: (one.failed, one.late) for way, one in watch.ways.items(NOW + 1.0)} == {
        ("refused", "nothing_alive"): (1, 0),
        ("edge", "cheapest"): (0, 1),
    }
    assert [name for name, _ in watch.targets.items(NOW + 1.0)] == ["edge/a"]


async def test_what_ran_and_was_not_answered_in_time_is_not_counted_as_refused() -> None:
    console_view = sight_of(fleet_of_many(1))
    unsent, ran = DeadlineExceeded("no target could be in time"), DeadlineExceeded("no answer before the deadline")
    ran.attempted = True
    for error in (unsent, ran):
        console_view.watch.ended(call(), error, NOW + 0.010)
    console_view.watch.answered(call(), reply(), NOW + 0.010)

    ways = {(one["to"], one["why"]): one["answered"] for one in (await seen(console_view))["ways"]}

    assert ways == {
        ("refused", "deadline_exceeded"): False,
        ("no answer in time", "deadline_exceeded"): False,
        ("edge", "cheapest"): True,
    }
    assert [name for name, _ in console_view.watch.targets.items(NOW + 1.0)] == ["edge/a"]


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 2.0), st.sampled_from([-1.0, 1.0]))), st.booleans())
def test_ends_that_are_counted_together_read_as_if_each_had_been_counted(
    ends: list[tuple[float, float, float]], looked: bool
) -> None:
    watch, each = sight_of(fleet_of_many(1)).watch, SlidingStats[str]()
    now = NOW
    for after_s, took_s, left_s in ends:
        now += after_s
        watch.answered(Call(InferRequest("minilm", ()), "oip-http", now - took_s), reply(left_s=left_s), now)
        each.record("edge/a", "late" if left_s < 0 else "in_time", now - (now - took_s), now)
        if looked:
            assert watch.targets.read("edge/a", now) == each.read("edge/a", now)

    assert watch.targets.read("edge/a", now + 1.0) == each.read("edge/a", now + 1.0)
    assert watch.classes.total(now + 1.0).asked == each.total(now + 1.0).asked


def test_timelines_of_targets_that_are_gone_go() -> None:
    console_view = sight_of(fleet_of_many(3))
    console_view.watch.tick(NOW, NOW)
    assert len(console_view.watch.timelines) == 4
    console_view.fleet.remove("edge/kiosk-00001")
    console_view.watch.tick(NOW + 5.0, NOW)
    assert len(console_view.watch.timelines) == 3
    assert console_view.detail("edge/kiosk-00001", NOW) is None


async def test_what_a_device_keeps_for_a_gateway_stands_in_its_row_and_its_detail() -> None:
    console_view = sight_of(fleet_of_many(2))
    console_view.fleet.targets["edge/kiosk-00001"].conditions = DeviceConditions(kept=17)

    rows = {one["id"]: one["conditions"] for one in (await seen(console_view))["targets"]}
    details = [console_view.detail(name, NOW) or {} for name in ("edge/kiosk-00000", "edge/kiosk-00001")]

    assert rows["edge/kiosk-00001"] == "17 things kept for a gateway"
    assert rows["edge/kiosk-00000"] == ""
    assert [one["kept"] for one in details] == [0, 17]


async def test_the_conditions_of_a_target_are_shown_and_found() -> None:
    console_view = sight_of(fleet_of_many(3))
    ailing = console_view.fleet.targets["edge/kiosk-00001"].degradation.active
    ailing["slow_drift"] = Condition("slow_drift", NOW, "answers take 1.6 times what they took")

    shown = await seen(console_view)

    assert shown["verdict"]["state"] == "attention"
    assert shown["verdict"]["sentence"] == "edge/kiosk-00001 has slow_drift: answers take 1.6 times what they took"
    assert [(one["target"], one["condition"]) for one in shown["conditions"]] == [("edge/kiosk-00001", "slow_drift")]


async def test_a_model_without_an_offer_is_trouble_once_it_is_requested() -> None:
    console_view = sight_of(fleet_of_many(1))
    console_view.catalog.manifests = (
        SimpleNamespace(name="minilm", version="1", generative=None),
        SimpleNamespace(name="spare", version="1", generative=None),
    )
    console_view.watch.answered(call(), reply(), NOW)
    assert (await seen(console_view))["verdict"]["state"] == "well"
    for name in list(console_view.fleet.targets):
        console_view.fleet.fold(LinkUp(name, name, 1, ()), NOW)
    assert (await seen(console_view))["verdict"]["sentence"] == "Nobody offers minilm just now"


@pytest.mark.slow
async def test_requests_get_a_turn_while_a_large_fleet_is_looked_at() -> None:
    breaths = 0

    async def pause() -> None:
        nonlocal breaths
        breaths += 1

    console_view = sight_of(fleet_of_many(5000))
    assert len(await console_view.states(pause)) == 5001
    assert breaths == 25


@pytest.mark.slow
async def test_a_target_that_leaves_while_a_large_fleet_is_looked_at_is_not_shown() -> None:
    console_view = sight_of(fleet_of_many(300))
    states = await console_view.states(lambda: asyncio.sleep(0.0))  # noqa: TID251
    console_view.fleet.remove("edge/kiosk-00000")
    shown = console_view.snapshot(NOW + 1.0, NOW, states)
    assert "edge/kiosk-00000" not in [one["id"] for one in shown["targets"]]
    assert shown["health"]["edge"]["well"] == 299


# over HTTP


async def events(session: aiohttp.ClientSession, url: str, count: int, **headers: str) -> list[Event]:
    """The first of the stream."""
    found: list[Event] = []
    async with session.get(url, headers=headers) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        async for line in response.content:
            if line.startswith(b"event: "):
                name = line[7:].decode().strip()
            elif line.startswith(b"data: "):
                found.append((name, json.loads(line[6:])))
                if len(found) == count:
                    break
    return found


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Gateway, aiohttp.ClientSession]]:
    edge = Far("edge/attic", variant="int8")
    async with running(edge), gateway_for(configured(tmp_path, target(edge))) as found:
        yield found


@pytest.mark.slow
async def test_every_file_of_the_page_is_served_and_nothing_from_elsewhere_may_run_in_it(
    served: tuple[Gateway, aiohttp.ClientSession],
) -> None:
    gateway, session = served
    assert len(page_files()) > 10
    for path in page_files():
        async with session.get(gateway.addresses["admin"] + path) as response:
            assert response.status == 200, path
            text = await response.text()
            policy = response.headers["Content-Security-Policy"]
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", ""), path
        assert "https://" not in text, path
        assert not {word for word in MARKUP if word in text}, path


@pytest.mark.slow
async def test_the_stream_sends_the_history_once_and_then_snapshots(
    served: tuple[Gateway, aiohttp.ClientSession],
) -> None:
    gateway, session = served
    assert (await ask(gateway, session))[0] == 200
    url = gateway.addresses["admin"] + "/console/live?target=edge/attic"

    told = await events(session, url, 3)

    assert [name for name, _ in told] == ["history", "snapshot", "target"]
    snapshot, detail = told[1][1], told[2][1]
    assert snapshot["verdict"]["state"] == "well"
    assert [(one["id"], one["health"], one["asked"]) for one in snapshot["targets"]] == [("edge/attic", "well", 1)]
    assert [(one["to"], one["asked"]) for one in snapshot["ways"]] == [("edge", 1)]
    assert detail["detail"]["admin"]["address"] == gateway.fleet.targets["edge/attic"].spec.address


@pytest.mark.slow
async def test_past_snapshots_are_kept_without_a_reader_and_given_by_their_instant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moments, "EVERY_S", 0.05)
    async with gateway_for(configured(tmp_path)) as (gateway, session):
        url = gateway.addresses["admin"]
        kept: list[float] = []
        while len(kept) < 2:
            kept = (await events(session, url + "/console/live", 1))[0][1]["moments"]
        for at, status in ((kept[0], 200), (kept[0] - 3600, 404), ("nan", 400), ("soon", 400), ("", 400)):
            async with session.get(f"{url}/console/moment?at={at}") as response:
                assert response.status == status, at
                if status == 200:
                    snapshot = await response.json()
        assert snapshot["at"] == pytest.approx(kept[0], abs=1.0)
        assert snapshot["verdict"]["state"] in ("well", "attention", "trouble")
        told = await events(session, url + "/console/live", 3)
        assert told[2][1]["moment"] >= kept[-1]


@pytest.mark.slow
async def test_requests_that_had_ended_at_an_instant_are_told(
    served: tuple[Gateway, aiohttp.ClientSession],
) -> None:
    gateway, session = served
    assert (await ask(gateway, session))[0] == 200
    between = (await events(session, gateway.addresses["admin"] + "/console/live", 2))[1][1]["now"]
    assert (await ask(gateway, session))[0] == 200
    for query, count in (("", 2), (f"?before={between}", 1), ("?before=0", 0)):
        async with session.get(gateway.addresses["admin"] + "/debug/decisions" + query) as response:
            assert len((await response.json())["decisions"]) == count
    async with session.get(gateway.addresses["admin"] + "/debug/decisions?before=noon") as response:
        assert response.status == 400


@pytest.mark.slow
async def test_a_request_that_a_target_did_not_answer_in_time_has_its_own_word_in_the_ways(tmp_path: Path) -> None:
    edge = Far("edge/attic")
    edge.host.gate.clear()
    async with running(edge), gateway_for(configured(tmp_path, target(edge))) as (gateway, session):
        for budget_s in GROWING_S:
            assert (await ask(gateway, session, **{"tidegate-budget-ms": f"{1e3 * budget_s:g}"}))[0] == 504
            if edge.host.calls:
                break
        edge.host.gate.set()

        told = await events(session, gateway.addresses["admin"] + "/console/live", 2)

    assert ("no answer in time", "deadline_exceeded") in [(one["to"], one["why"]) for one in told[1][1]["ways"]]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_page_names_where_a_request_without_an_answer_went_and_how_it_ended(tmp_path: Path) -> None:
    shutil.copy(STATIC / "words.js", tmp_path / "words.mjs")
    (tmp_path / "told.mjs").write_text(
        "import { because, wentTo } from './words.mjs';"
        "const told = (one) => [wentTo(one), because(one)];"
        "const error = { error: 'deadline_exceeded: no answer' };"
        "console.log(JSON.stringify(["
        "  told({ end: error, ended: 'no answer in time', tried: ['edge/a', 'edge/b', 'edge/a'] }),"
        "  told({ end: { error: 'overloaded: full' }, ended: 'refused', tried: [] }),"
        "  told({ end: { served_by: 'edge/a', reason: 'only', hedged: true }, ended: 'answered', tried: ['edge/a'] }),"
        "]));"
    )
    told = subprocess.run(["node", tmp_path / "told.mjs"], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(told.stdout) == [
        ["edge/a, edge/b", "no answer in time"],
        ["nowhere", "refused"],
        ["edge/a", "only, hedged"],
    ]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_page_says_what_a_generation_took(tmp_path: Path) -> None:
    shutil.copy(STATIC / "words.js", tmp_path / "words.mjs")
    took = {
        "prompt": 31,
        "cached": 24,
        "completion": 65,
        "finish_reason": "length",
        "prefill_ms": 120,
        "decode_ms": 1600,
    }
    one = {"prompt": 5, "cached": 0, "completion": 1, "finish_reason": "stop", "prefill_ms": 20.0, "decode_ms": 0}
    (tmp_path / "told.mjs").write_text(
        "import { tokensOf } from './words.mjs';"
        f"console.log(JSON.stringify([undefined, {json.dumps(took)}, {json.dumps(one)}].map(tokensOf)));"
    )
    told = subprocess.run(["node", tmp_path / "told.mjs"], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(told.stdout) == [
        "",
        "31 tokens in (24 from a cache), 65 out; computed: the first after 120 ms, then 40.0/s; it reached its limit.",
        "5 tokens in, 1 out; computed: the first after 20.0 ms; the model ended it.",
    ]


@pytest.mark.slow
async def test_a_target_that_stops_is_named_on_top(tmp_path: Path) -> None:
    edge, pool = Far("edge/attic"), Far("pool/main")
    async with running(edge, pool), gateway_for(configured(tmp_path, target(edge), target(pool))) as (gateway, session):
        await edge.kill()
        await until(lambda: not gateway.fleet.targets["edge/attic"].up, 30.0)

        told = await events(session, gateway.addresses["admin"] + "/console/live", 2)

        assert told[1][1]["verdict"]["sentence"].startswith("edge/attic is down: ")


@pytest.mark.slow
async def test_without_a_console_the_admin_port_serves_no_page(tmp_path: Path) -> None:
    async with Gateway(configured(tmp_path, console=False)) as gateway, aiohttp.ClientSession() as session:
        for path, status in (("/", 404), ("/console/live", 404), ("/v1/state", 200)):
            async with session.get(gateway.addresses["admin"] + path) as response:
                assert response.status == status


@pytest.mark.slow
async def test_elsewhere_than_on_loopback_the_page_is_open_and_what_it_shows_is_not(tmp_path: Path) -> None:
    async with guarded(tmp_path, admin_host="0.0.0.0") as (gateway, session, keys, _):
        url = gateway.addresses["admin"].replace("0.0.0.0", "127.0.0.1")
        for path in page_files():
            async with session.get(url + path) as response:
                assert response.status == 200
        for path in ("/console/live", "/console/moment?at=0", "/console/find?q=", "/v1/state"):
            async with session.get(url + path) as response:
                assert response.status == 401
            async with session.get(url + path, headers=keys.headers("good")) as response:
                assert response.status == 403
        told = await events(session, url + "/console/live", 2, **keys.headers("operator"))
        assert told[1][0] == "snapshot"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:8003"}, 200),
        ({"Host": "[::1]:8003"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example:8003"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
async def test_other_sites_get_nothing_through_an_operators_browser(
    served: tuple[Gateway, aiohttp.ClientSession], headers: dict[str, str], status: int
) -> None:
    gateway, session = served
    async with session.get(gateway.addresses["admin"] + "/v1/state", headers=headers) as response:
        assert response.status == status
