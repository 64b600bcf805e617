"""`tidegate top`: sick links first and by name, within 80 columns, and the same as JSON for scripts."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from gateway.app import Gateway
from gateway.commands.top import snapshots_of, top
from gateway.commands.top_view import SORTS, render_screen, sick_links, sort_rows
from tests.support.gateway.app import Far, ask, configured, gateway_for, running, target, until
from tidegate import clock


def row(id: str, health: str = "well", reason: str = "", **more: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "id": id, "tier": id.partition("/")[0], "health": health, "reason": reason, "notes": "", "conditions": "",
        "rtt_ms": 2.25, "jitter_ms": 0.4, "usual_ms": 2.0, "queued": 0, "in_flight": 1, "wait_ms": 0.0, "models": [],
        "per_s": 40.0, "goodput_per_s": 39.5, "late_share": 0.0125, "asked": 400, "late": 5, "failed": 0,
        "p50_ms": 11.0, "p95_ms": 42.0, "p99_ms": 120.0,
    }  # fmt: skip
    return usual | more


def snapshot(*rows: dict[str, Any], more: int = 0) -> dict[str, Any]:
    one = row("edge/x")
    return {
        "gateway": "site-1", "verdict": {"state": "attention", "sentence": "edge/b is on a slow link", "findings": []},
        "total": one, "door": {"in_flight": 3, "limit": 128, "overloaded": True, "shed": 0}, "targets": list(rows),
        "more_targets": more, "classes": [{"model": "minilm", "priority": 1, **one}],
        "ways": [{"to": "edge", "why": "cheapest", **one}],
    }  # fmt: skip


def drawn(contents: dict[str, Any], sort: str = "health", *, width: int = 80, height: int | None = None) -> list[str]:
    text = StringIO()
    Console(file=text, width=width, color_system=None).print(render_screen(contents, sort, width=width, height=height))
    return text.getvalue().splitlines()


def test_sick_links_are_named_above_everything_the_worst_first_with_their_reasons() -> None:
    rows = [
        row("pool/main"),
        row("edge/b", "slow", "round trips take 84 ms, usually 2 ms"),
        row("edge/a", "down", "gone"),
    ]
    lines = drawn(snapshot(*rows))
    assert lines[1:3] == ["SICK edge/a down: gone", "SICK edge/b slow: round trips take 84 ms, usually 2 ms"]
    assert [one["target"] for one in sick_links(snapshot(*rows))] == ["edge/a", "edge/b"]
    assert "OVERLOADED" in lines[3]
    assert sick_links(snapshot(row("pool/main"))) == []


@pytest.mark.parametrize("width", [80, 100, 160])
def test_the_screen_fits_the_terminal_with_any_snapshot(width: int) -> None:
    long = row("edge/" + "a-very-long-device-name" * 4, "silent", "nothing heard for 900 ms, " * 9, rtt_ms=12345.6)
    big = row("edge/b", jitter_ms=4321.0, goodput_per_s=12345.67, queued=10_000, p95_ms=99_999.0, loss_ratio=1.0)
    lines = drawn(snapshot(long, big), width=width)
    assert max(map(len, lines)) <= width
    assert lines[1].startswith("SICK edge/a-very-long-device-name")
    assert any("12345.7" in line or "12346" in line for line in lines)


def test_names_from_the_network_are_text_and_no_markup() -> None:
    assert any("[red]x[/]" in line for line in drawn(snapshot(row("edge/[red]x[/]", "slow", "[bold]y"))))


def test_of_many_targets_as_many_are_shown_as_there_is_room_for_and_the_others_counted() -> None:
    rows = [row(f"edge/{number}", per_s=1.0) for number in range(40)]
    lines = drawn(snapshot(*rows, more=960), height=24)
    assert len(lines) <= 24
    shown = sum(line.startswith("edge/") for line in lines)
    assert f"and {1000 - shown} more targets" in [line.strip() for line in lines]


@pytest.mark.parametrize(
    ("sort", "values"),
    [("rtt", {"rtt_ms": 9.0}), ("jitter", {"jitter_ms": 9.0}), ("loss", {"loss_ratio": 0.1}), ("queue", {"queued": 4}),
     ("goodput", {"goodput_per_s": 99.0}), ("late", {"late_share": 0.5}), ("health", {"health": "silent"})],
)  # fmt: skip
def test_each_sort_puts_its_highest_first(sort: str, values: dict[str, Any]) -> None:
    rows = [row("edge/a"), row("edge/b", **values), row("edge/c", rtt_ms=None, jitter_ms=None)]
    assert sort_rows(rows, sort)[0]["id"] == "edge/b"
    assert sort in [word for word, _ in SORTS.values()]


def test_only_snapshots_are_read_of_a_stream() -> None:
    lines = [b"event: history\n", b'data: {"points":[]}\n', b"\n", b"event: snapshot\n", b'data: {"at":1}\n', b"\n"]
    assert list(snapshots_of(lines)) == [{"at": 1}]


async def said(gateway: Gateway, *words: str) -> Result:
    return await said_of(gateway.addresses["admin"], *words)


async def said_of(address: str, *words: str) -> Result:
    run = CliRunner(env={"COLUMNS": "80", "TERM": "dumb"}).invoke
    return await asyncio.to_thread(run, top, [*words, "--admin", address])


@pytest.mark.parametrize("option", ["--once", "--json"])
async def test_a_stream_that_ends_before_its_first_snapshot_is_an_error_that_says_so(option: str) -> None:
    async def ends_early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nevent: history\ndata: {}\n\n")
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(ends_early, "127.0.0.1", 0) as server:
        result = await said_of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", option)
    assert result.exit_code == 1 and result.stdout == ""
    assert "ended its stream before the first snapshot" in result.stderr.splitlines()[-1]


@pytest.mark.slow
async def test_a_running_gateway_is_shown_and_a_lost_target_is_named(tmp_path: Path) -> None:
    edge, pool = Far("edge/attic"), Far("pool/main")
    async with running(edge, pool), AsyncExitStack() as stack:
        config = configured(tmp_path, target(edge), target(pool))
        gateway, session = await stack.enter_async_context(gateway_for(config))
        for _ in range(12):
            await ask(gateway, session)
        picture = (await said(gateway, "--once", "--sort", "goodput")).stdout.splitlines()
        await edge.kill()
        await until(lambda: not gateway.fleet.targets["edge/attic"].up)
        sick: list[dict[str, str]] = []
        for _ in range(200):  # snapshots are shared, and up to half a second old
            sick = json.loads((await said(gateway, "--json")).stdout)["sick"]
            if sick:
                break
            await clock.sleep(0.1)

    assert max(map(len, picture)) <= 80
    assert any(line.startswith("edge/attic") and "well" in line for line in picture)
    assert any(line.startswith("echo") for line in picture)
    assert any("cheapest" in line for line in picture)
    assert [one["target"] for one in sick] == ["edge/attic"]


@pytest.mark.slow
async def test_a_gateway_without_its_console_is_an_error_that_says_so(tmp_path: Path) -> None:
    pool = Far("pool/main")
    async with running(pool), AsyncExitStack() as stack:
        gateway, _ = await stack.enter_async_context(gateway_for(configured(tmp_path, target(pool), console=False)))
        result = await said(gateway, "--once")
    assert result.exit_code == 1
    assert "404" in result.stderr
