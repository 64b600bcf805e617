"""A link's control over HTTP and from the shell, as clients in any language use them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestClient, TestServer
from click.testing import CliRunner

from tests.tidegate.netsim.proxy.ends import Client, echo, upstream
from tidegate.netsim.proxy.cli import link as command
from tidegate.netsim.proxy.control import control_app
from tidegate.netsim.proxy.link import LinkProxy
from tidegate.netsim.proxy.status import words
from tidegate.netsim.proxy.timeline import LinkTimeline

ROOT = Path(__file__).parents[4]


class Controlled:
    def __init__(self, link: LinkProxy, http: TestClient[Any, Any]) -> None:
        self.link = link
        self._http = http

    async def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, Any]]:
        async with self._http.request(method, path, json=body, headers=headers) as answer:
            return answer.status, await answer.json()


@pytest.fixture
async def controlled() -> AsyncIterator[Controlled]:
    async with (
        upstream(echo) as address,
        LinkProxy(address) as link,
        LinkTimeline(link) as timeline,
        TestClient(TestServer(control_app(timeline))) as http,
    ):
        yield Controlled(link, http)


async def test_a_partition_is_there_when_the_answer_is_and_heals_by_order(controlled: Controlled) -> None:
    async with Client(controlled.link) as client:
        await client.ask()
        status, state = await controlled("PUT", "/partition", {"kind": "blackhole", "direction": "from"})
        assert (status, state["partition"], state["cut"]) == (200, "blackhole", ["from"])
        assert await client.hears_nothing_for(0.0)
        assert (await controlled("DELETE", "/partition"))[1]["partition"] is None
        await client.ask()
        await controlled("POST", "/partition", {"for_s": 60})
        assert controlled.link.broken == "blackhole"
        assert (await controlled("POST", "/heal"))[1]["partition"] is None


async def test_profiles_toxics_and_scenarios_are_put_and_taken_away(controlled: Controlled) -> None:
    assert (await controlled("PUT", "/link", {"delay_ms": 1.5}))[0] == 200
    await controlled("PUT", "/toxics/slow", {"direction": "to", "loss": 0.01})
    state = (await controlled("GET", "/state"))[1]
    assert state["layers"]["base"] == {"direction": "both", "profile": {"delay_ms": 1.5}}
    assert state["layers"]["slow"]["direction"] == "to"
    assert "slow" not in (await controlled("DELETE", "/toxics/slow"))[1]["layers"]
    assert (await controlled("PUT", "/scenario", {"name": "flap_fast"}))[1]["scenario"] == "flap_fast"
    mine = {"summary": "mine", "link": {"delay_ms": 2}, "timeline": [{"at_s": 0, "partition": "silent"}]}
    assert (await controlled("PUT", "/scenario", mine))[1]["scenario"] == "scenario"
    assert (await controlled("DELETE", "/scenario"))[1]["layers"] == {}
    assert "lte_driving" in (await controlled("GET", "/scenarios"))[1]


async def test_events_are_read_on_from_where_one_stopped(controlled: Controlled) -> None:
    first = (await controlled("GET", "/events"))[1]
    assert [event["event"] for event in first["events"]] == ["open_link"]
    await controlled("PUT", "/partition", {"kind": "reset"})
    second = (await controlled("GET", f"/events?after={first['next']}"))[1]
    assert [event["event"] for event in second["events"]] == ["partition"]
    assert (await controlled("GET", f"/events?after={second['next']}"))[1]["events"] == []


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("PUT", "/partition", {"kind": "flood"}, 400, "Invalid enum value 'flood'"),
        ("PUT", "/partition", {"for_s": -1}, 400, "for_s"),
        ("PUT", "/partition", {"kind": "reset", "direction": "to"}, 400, "reset has no direction"),
        ("PUT", "/partition", [1], 400, "must be an object"),
        ("PUT", "/toxics/slow", {"delay_ms": 3}, 400, "'direction' is missing"),
        ("PUT", "/toxics/base", {"direction": "to"}, 400, "is the link itself"),
        ("DELETE", "/toxics/slow", None, 400, "no toxic 'slow'"),
        ("PUT", "/link", {"delay": 3}, 400, "no such key"),
        ("PUT", "/scenario", {"name": "../../etc/passwd"}, 400, "no scenario"),
        ("PUT", "/scenario", {"name": ["a"]}, 400, "no scenario"),
        ("PUT", "/scenario", {"name": "lte_drivin"}, 400, "Did you mean 'lte_driving'"),
        ("PUT", "/link", {"recording": {"to_target": "/etc/passwd", "from_target": "x"}}, 400, "no file is read"),
        ("PUT", "/link", {"jitter": {"dist": "empirical", "file": "/etc/passwd"}}, 400, "no file is read"),
        ("GET", "/events?after=x", None, 400, "after must be a number"),
        ("GET", "/nowhere", None, 404, "Not Found"),
        ("PUT", "/partition", {"x": "y" * 300_000}, 413, "Too Large"),
    ],
)
async def test_what_is_wrong_is_answered_in_words_and_changes_nothing(
    controlled: Controlled, method: str, path: str, body: Any, status: int, words: str
) -> None:
    before = controlled.link.state()
    got, answer = await controlled(method, path, body)
    assert got == status, answer
    assert words in answer["error"]
    assert controlled.link.state()["layers"] == before["layers"]
    assert controlled.link.broken is None


async def test_a_browser_is_turned_away(controlled: Controlled) -> None:
    status, _ = await controlled("PUT", "/partition", {"kind": "reset"}, Origin="https://evil.example")
    assert status == 403
    assert controlled.link.broken is None


async def test_the_status_line_tells_rates_and_what_is_broken(controlled: Controlled) -> None:
    link = controlled.link
    async with LinkTimeline(link) as timeline:
        before = link.state()
        async with Client(link) as client:
            await client.ask(bytes(125_000))
            link.partition("blackhole")
            line = words(timeline, link.state(), before, 1.0)
    assert "BLACKHOLE to/from · 1 connections · ↑ 1.00 ↓ 1.00 Mbit/s · 0 kB held" in line


@pytest.fixture
def running() -> Iterator[subprocess.Popen[str]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = subprocess.Popen(
            [sys.executable, "-m", "tidegate.netsim.proxy", "--upstream", f"127.0.0.1:{server.getsockname()[1]}",
             "--scenario", "lte_driving", "--seed", "5", "--control", "127.0.0.1:0", "--json"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        yield process
        process.kill()
        process.communicate()


@pytest.mark.slow
async def test_the_command_says_when_it_is_ready_obeys_its_control_and_ends_cleanly(
    running: subprocess.Popen[str],
) -> None:
    assert running.stdout is not None
    lines = iter(running.stdout.readline, "")
    ready = await asyncio.to_thread(
        lambda: next(one for line in lines if (one := json.loads(line))["event"] == "ready")
    )
    assert ready["seed"] == 5
    async with ClientSession() as http:
        async with http.put(f"{ready['control']}/partition", data='{"kind": "refuse"}') as answer:
            assert answer.status == 200
        host, port = ready["listen"].split(":")
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(host, int(port))
    running.send_signal(signal.SIGINT)
    rest, errors = await asyncio.to_thread(running.communicate)
    assert running.returncode == 0
    assert errors == ""
    assert json.loads(rest.splitlines()[-1])["event"] == "ended"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--listen", "7001"], "--upstream HOST:PORT is needed"),
        (["--upstream", "nowhere"], "'nowhere' is not HOST:PORT"),
        (["--upstream", "127.0.0.1:99999"], "is not HOST:PORT"),
        (["--upstream", "9", "--scenario", "lte_diving"], "no link scenario 'lte_diving'"),
    ],
)
def test_the_command_refuses_what_cannot_be_in_words(arguments: list[str], words: str) -> None:
    ran = CliRunner().invoke(command, arguments)
    assert ran.exit_code != 0
    assert words in ran.output


def test_the_command_names_the_option_whose_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ran = CliRunner().invoke(command, ["--upstream", "9", "--listen", str(taken.getsockname()[1])])
    assert ran.exit_code == 1
    assert "--listen: Address already in use" in ran.output


def test_the_command_lists_what_there_is() -> None:
    ran = CliRunner().invoke(command, ["--list"])
    assert ran.exit_code == 0
    assert "lte_driving" in ran.output
