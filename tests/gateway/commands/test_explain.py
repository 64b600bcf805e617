"""`tidegate explain` at a running gateway: good, rerouted, failed and cancelled requests."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import AsyncExitStack
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from gateway.app import Gateway
from gateway.commands.explain import explain
from gateway.commands.explain import in_full as show_in_full
from gateway.core.history.recorder import AnswerRecord
from gateway.operate.explanation import explanation_json
from tests.support.gateway.app import BODY, INFER, TRIALS, Far, ask, configured, gateway_for, running, target, until
from tests.support.gateway.flowns import answered, given, request_record, went
from tests.support.gateway.targets import GROWING_S
from tidegate.generate.usage import Usage
from tidegate.outcome import Overloaded
from tidegate.types import Resumed, Route

pytestmark = pytest.mark.slow


async def said(gateway: Gateway, *words: str) -> Result:
    """What `tidegate explain` prints, as in a wide terminal; in a thread, since the gateway answers on this loop."""
    run = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke
    return await asyncio.to_thread(run, explain, [*words, "--admin", gateway.addresses["admin"]])


async def decisions(gateway: Gateway, *words: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((await said(gateway, *words, "--json")).stdout)["decisions"]
    return found


async def test_a_request_is_found_by_its_callers_id_and_shown_in_full(tmp_path: Path) -> None:
    edge, small, pool = Far("edge/attic"), Far("edge/closet", max_batch=1), Far("pool/main")
    edge.host.takes_s = 0.01  # more than it says, or that would be cut
    async with running(edge, small, pool), AsyncExitStack() as stack:
        config = configured(tmp_path, target(edge), target(small), target(pool), policy="value")
        gateway, session = await stack.enter_async_context(gateway_for(config))
        await session.post(gateway.addresses["http"] + INFER, json=BODY | {"id": "photo-7"})
        await ask(gateway, session)

        in_full = (await said(gateway, "photo-7")).stdout
        (told,) = await decisions(gateway, "photo-7")

    assert re.match(r"#1, id photo-7: echo 3 x 1, budget \d+ ms\n", in_full)
    assert "edge/attic in fp32, because it is the cheapest that is likely enough in time: expected in" in in_full
    assert "not edge/closet in fp32: takes at most 1 rows" in in_full
    assert "attempt 1 to edge/attic in fp32 (cheapest)" in in_full
    assert "attempt 1 accepted, promised in 250 ms" in in_full
    assert "attempt 1 answered: queue 2.0 ms, compute 5.0 ms, link" in in_full
    assert "ok from edge/attic (cheapest)" in in_full
    assert "margin" in in_full

    screen = Console(width=80, file=StringIO())
    show_in_full(told, screen)
    narrow = screen.file.getvalue()  # type: ignore[attr-defined]  # it is the one above
    head = next(line for line in narrow.splitlines() if line.startswith("target"))
    assert head.split() == ["target", "variant", "link", "wait", "comp", "finish", "chance", "cost", "value", "trust"]
    assert "…" not in narrow and "(on 100 columns also margin, claim, harm, price)" in narrow

    numbers = {one["target"]: one for one in told["candidates"]}
    assert set(numbers) == {"edge/attic", "pool/main"}
    assert numbers["edge/attic"]["price"] == 0.01 and numbers["pool/main"]["price"] == 1.0
    assert numbers["edge/attic"]["trust"] == 1.0
    assert {"chance", "calibrated", "harm", "value"} <= set(numbers["edge/attic"])
    assert told["prices"] == {"edge": 0.01, "pool": 1.0, "site": 0.01, "metered_byte": 4e-06, "scarcity": 1.0}
    assert (told["outcome"], told["stages_ms"]["compute"]) == ("ok", 5.0)


async def test_without_an_id_the_last_requests_are_shown_a_line_each(tmp_path: Path) -> None:
    pool = Far("pool/main")
    async with running(pool), AsyncExitStack() as stack:
        gateway, session = await stack.enter_async_context(gateway_for(configured(tmp_path, target(pool))))
        nothing = await said(gateway)
        for _ in range(3):
            await ask(gateway, session)
        in_time, none = await said(gateway, "--late"), await said(gateway, "--late", "--json")
        await ask(gateway, session, **{"tidegate-pin": "edge"})

        lines = (await said(gateway, "--last", "3")).stdout.splitlines()
        unknown = await said(gateway, "no-such-id")
        refused = (await said(gateway, "#4")).stdout

    assert (nothing.exit_code, nothing.stdout) == (0, "the gateway remembers no request yet\n")
    assert unknown.exit_code == 1 and "the gateway remembers no request of the id 'no-such-id'" in unknown.stderr
    assert (in_time.exit_code, in_time.stdout) == (0, "the gateway remembers no request of that kind\n")
    assert (none.exit_code, json.loads(none.stdout)["decisions"]) == (0, [])
    rows = [line for line in lines if "#" in line and "echo" in line]
    assert [row.split("#")[1].split()[0] for row in rows] == ["4", "3", "2"]
    assert "nothing_alive" in rows[0] and "refused" in rows[0]
    assert "pool/main" in rows[1] and "only" in rows[1] and " ok" in rows[1]
    assert "pinned to edge" in refused and "pool/main is outside of the pin, in zone cloud" in refused


async def test_fallbacks_and_hedges_are_shown_with_their_times_and_reasons(tmp_path: Path) -> None:
    edge, pool = Far("edge/attic"), Far("pool/main", says_s=0.3)
    async with running(edge, pool):
        config = configured(tmp_path, target(edge), target(pool))
        for _ in range(TRIALS):
            async with gateway_for(config) as (gateway, session):
                edge.host.error = Overloaded("the queue is full", retry_after_s=0.5)
                edge.host.gate.set()
                await ask(gateway, session)
                edge.host.gate.clear()
                status, _, _ = await ask(gateway, session, **{"tidegate-budget-ms": "3000"})
                hedged, fallen_back = await decisions(gateway)
                in_full = (await said(gateway, "2")).stdout
            if status == 200:
                break

    events = [(one["what"], one.get("attempt"), one.get("reason"), one.get("target")) for one in fallen_back["events"]]
    assert ("launched", 0, "cheapest", "edge/attic") in events
    assert ("launched", 1, "fallback", "pool/main") in events
    (failure,) = [one for one in fallen_back["events"] if one["what"] == "failed"]
    assert failure["error"].startswith("overloaded: ") and "the queue is full" in failure["error"]
    assert fallen_back["end"]["fallback"] and fallen_back["end"]["served_by"] == "pool/main"

    looks = [one["at_ms"] for one in hedged["events"] if one["what"] == "look"]
    (launched,) = [one["at_ms"] for one in hedged["events"] if one.get("reason") == "hedge"]
    before = [at_ms for at_ms in looks if at_ms - 1.0 <= launched]
    assert before and launched - before[-1] < 300.0 and launched < 3_000.0, "it is launched by one of the looks"
    assert ("cancelled", 0) in [(one["what"], one.get("attempt")) for one in hedged["events"]]
    assert "a second attempt is considered if there is no answer by then" in in_full
    assert "from pool/main (hedge, hedged)" in in_full


async def test_a_cancelled_request_is_remembered_as_cancelled(tmp_path: Path) -> None:
    pool = Far("pool/main")
    pool.host.gate.clear()
    async with running(pool), AsyncExitStack() as stack:
        gateway, session = await stack.enter_async_context(gateway_for(configured(tmp_path, target(pool))))
        asking = asyncio.create_task(ask(gateway, session))
        await pool.host.begun.acquire()
        asking.cancel()
        await until(lambda: pool.host.cancelled == 1)

        (told,) = await decisions(gateway)

    assert (told["outcome"], told["ended"]) == ("cancelled", "cancelled")
    assert [one["what"] for one in told["events"]][-1] == "cancelled"


async def test_a_gateway_that_does_not_answer_is_an_error_that_names_it() -> None:
    run = CliRunner().invoke
    result = await asyncio.to_thread(run, explain, ["--admin", "http://127.0.0.1:1"])
    assert result.exit_code == 1
    assert "no gateway answers at http://127.0.0.1:1" in result.stderr


def adds_up(one: dict[str, Any]) -> bool:
    """Whether its stages follow each other and make up its latency, to 2 % and a rounding."""
    path = one["waterfall"]["path"]
    ends = [stage["start_ms"] + stage["took_ms"] for stage in path]
    gapless = all(abs(then["start_ms"] - end) < 0.01 for end, then in zip(ends, path[1:], strict=False))
    total = sum(stage["took_ms"] for stage in path)
    return gapless and abs(total - one["elapsed_ms"]) <= 0.02 * one["elapsed_ms"] + 0.01


async def test_stages_add_up_to_the_latency_of_late_hedged_failed_and_refused_requests(tmp_path: Path) -> None:
    edge, pool = Far("edge/attic"), Far("pool/main", says_s=0.3)
    edge.host.takes_s = pool.host.takes_s = 0.010  # not less than they claim
    async with running(edge, pool):
        config = configured(tmp_path, target(edge), target(pool))
        for _ in range(TRIALS):
            async with gateway_for(config) as (gateway, session):
                await ask(gateway, session)
                edge.host.error = Overloaded("the queue is full", retry_after_s=0.5)
                await ask(gateway, session)
                edge.host.error = None
                edge.host.gate.clear()
                served, _, _ = await ask(gateway, session, **{"tidegate-budget-ms": "3000"})
                pool.host.gate.clear()
                asked = len(edge.host.calls + pool.host.calls)
                for budget_s in GROWING_S:
                    expired = await ask(gateway, session, **{"tidegate-budget-ms": f"{1e3 * budget_s:g}"})
                    if len(edge.host.calls + pool.host.calls) > asked:
                        break
                pinned_away = await ask(gateway, session, **{"tidegate-pin": "site"})
                edge.host.gate.set()
                pool.host.gate.set()

                everyone = await decisions(gateway)
                late = await decisions(gateway, "--late")
                hedged = await decisions(gateway, "--hedged")
                failed = await decisions(gateway, "--failed")
                slowest = await decisions(gateway, "--slowest", "1")
                there = await decisions(gateway, "--target", "pool/main")
                nothing = await said(gateway, "--tenant", "nobody")
                in_full = (await said(gateway, expired[2]["tidegate-request-id"])).stdout
            if served == 200:
                break

    last = len(everyone)
    assert last >= 5 and all(adds_up(one) for one in everyone), everyone
    assert all(one["waterfall"]["unaccounted_ms"] == pytest.approx(0.0, abs=0.01) for one in everyone)
    assert [one["number"] for one in late] == [one["number"] for one in failed] == [*range(last, 3, -1)]
    assert {3} <= {one["number"] for one in hedged} <= {*range(3, last)}
    assert [one["number"] for one in slowest] == [max(everyone, key=lambda one: one["elapsed_ms"])["number"]]
    assert {one["number"] for one in there} >= {2, 3} and last not in {one["number"] for one in there}
    assert (nothing.exit_code, nothing.stdout) == (0, "the gateway remembers no request of that kind\n")
    assert pinned_away[2]["tidegate-request-id"].endswith(f"-{last}"), "an error says its id as well"
    attempts = everyone[last - 3]["waterfall"]["attempts"]
    assert [(one["target"], one["end"]) for one in attempts] == [("edge/attic", "cancelled"), ("pool/main", "answered")]
    assert attempts[0]["start_ms"] < attempts[1]["start_ms"] < attempts[0]["start_ms"] + attempts[0]["took_ms"] + 0.01
    assert all(one["ended"] == ("no answer in time" if one["tried"] else "refused") for one in failed)
    assert everyone[1]["tried"] and "refused" not in in_full.lower()
    assert "unanswered" in in_full and "in hindsight: " in in_full and "in all" in in_full


def test_a_generation_that_was_gone_on_with_says_why_and_why_its_text_may_be_another() -> None:
    resumed = Resumed("edge/a", "pool/main", at=57, gap_s=0.212, grade="continued", why="stalled", because="of a rule")
    notes = [
        *went(0, "edge/a", 0.0, ends=0.3, what="failed", words="unreachable: silent"),
        *answered(1, "pool/main", 0.3),
    ]
    end = AnswerRecord(1, Route("pool/main", "resumed", "bf16", attempts=2, resumed=(resumed,)))
    screen = Console(width=160, file=StringIO())
    show_in_full(explanation_json(request_record(notes=notes, end=end, reasons=("cheapest", "resumed"))), screen)
    shown = " ".join(screen.file.getvalue().split())  # type: ignore[attr-defined]  # it is the one above
    assert "gone on with after 57 tokens: edge/a (stalled) to pool/main, 212 ms without a token" in shown
    assert "continued, since of a rule" in shown


def test_a_generations_end_has_its_tokens_and_what_they_took() -> None:
    notes = answered(0, "edge/a", 0.002)
    record = request_record(notes=notes, end=given(usage=Usage("stop", 31, 11, 24, prefill_s=0.02, decode_s=0.3)))
    screen = Console(width=120, file=StringIO())
    show_in_full(explanation_json(record), screen)
    shown = screen.file.getvalue()  # type: ignore[attr-defined]  # it is the one above
    assert "31 tokens in, 24 of them cached, 20.0 ms; 11 out, 300 ms; ended by stop" in " ".join(shown.split())
