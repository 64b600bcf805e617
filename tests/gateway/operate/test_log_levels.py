"""Log levels over the admin port, and the command that reads and changes them."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner
from structlog.testing import capture_logs

from gateway.commands.log_level import log_level
from gateway.observe.access_log import AccessLog
from gateway.operate.log_levels import log_level_routes
from gateway.serving.work_estimate import WorkDescription
from tests.support.gateway.app import configured, gateway_for
from tidegate.outcome import Overloaded
from tidegate.runtime.logs import Levels
from tidegate.servers.http_server import open_http_server
from tidegate.trace_context import Trace
from tidegate.types import Call, InferRequest, InferResponse, Reply


@pytest.mark.slow
async def test_the_command_changes_what_a_running_gateway_logs() -> None:
    levels = Levels("info")
    door = open_http_server(
        log_level_routes(levels), "127.0.0.1", 0, key="admin_port", max_body_bytes=2**20, grace_s=0.1
    )
    async with door as address:

        def command(*words: str) -> tuple[int, str]:
            ran = CliRunner().invoke(log_level, [*words, "--admin", address])
            return ran.exit_code, ran.output

        async def run(*words: str) -> tuple[int, str]:
            return await asyncio.to_thread(command, *words)

        assert await run() == (0, "info\n")
        with capture_logs() as logs:
            assert await run("debug", "--module", "gateway.targets.directory") == (
                0,
                "info\ngateway.targets.directory: debug\n",
            )
            told = json.loads((await run("--json"))[1])
            assert told == {"level": "info", "modules": {"gateway.targets.directory": "debug"}}
            assert await run("warning") == (0, "warning\ngateway.targets.directory: debug\n")
            assert await run("default", "--module", "gateway.targets.directory") == (0, "warning\n")
        changes = [line for line in logs if line["event"] == "log level changed"]
        assert [line["module"] for line in changes] == ["gateway.targets.directory", "all", "gateway.targets.directory"]
        status, words = await run("debug", "--module", "../etc")
        assert status != 0 and "no module's name" in words
        status, words = await run("default")
        assert status != 0 and "for a module" in words
        assert (levels.level, levels.modules) == ("warning", {})


@pytest.mark.slow
async def test_a_gateways_admin_port_has_the_route(tmp_path: Path) -> None:
    async with gateway_for(configured(tmp_path)) as (gateway, session):
        url = gateway.addresses["admin"] + "/v1/log-level"
        async with session.get(url) as response:
            assert (await response.json())["level"] in ("debug", "info", "warning", "error")
        for body in (b"{", b'{"level": "loud"}', b'{"level": "info", "x": 1}', b"x" * 5000):
            shown = {"Authorization": f"Bearer {gateway.operator_token.value}"}
            async with session.put(url, data=body, headers=shown) as response:
                assert response.status == 400


def lines_of(sample: float, calls: int, *, late: bool = False, trace: Trace | None = None) -> list[str]:
    lines: list[str] = []
    draw = random.Random(7).random
    describe = lambda call: WorkDescription("tokens", 1.0, "cheap", 2.0)  # noqa: E731
    log = AccessLog(
        describe, lambda event, **fields: lines.append(fields.get("trace_id", "")), sample=sample, draw=draw
    )
    call = Call(InferRequest("minilm", ()), "oip-http", 10.0, trace=trace)
    for _ in range(calls):
        log.answered(call, Reply(InferResponse("minilm", "1", ()), budget_left_s=-0.1 if late else 0.1), 10.1)
    return lines


def test_a_share_of_the_good_requests_has_a_line_and_every_other_request_has_one() -> None:
    assert len(lines_of(1.0, 100)) == 100
    assert 150 < len(lines_of(0.2, 1000)) < 250
    assert lines_of(0.0, 100) == []
    assert len(lines_of(0.0, 100, late=True)) == 100
    kept = Trace(0xABC, 1, sampled=True)
    assert lines_of(0.0, 2, trace=kept) == [kept.hex_id] * 2
    failed: list[str] = []
    describe = lambda call: WorkDescription("tokens", 1.0, "cheap", 2.0)  # noqa: E731
    log = AccessLog(describe, lambda event, **fields: failed.append(fields["outcome"]), sample=0.0)
    log.ended(Call(InferRequest("minilm", ()), "oip-http", 10.0), Overloaded("full"), 10.1)
    assert failed == ["overloaded"]
