"""The console in a real headless Chromium, before a real gateway with targets on loopback.

Screenshots are kept in `.tidegate/screenshots/`: look at them after a change of the page.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from gateway.app import Gateway
from gateway.config.agreement import AgreementConfig
from gateway.core.agreement.agreement_watch import AnswerSource, ShadowedAnswer
from gateway.core.agreement.expectation import AgreementTerms
from gateway.core.fleet.link_events import LinkUp
from gateway.core.fleet.target import TargetSpec
from gateway.core.versions.traffic_split import TrafficSplit, TrafficSplits
from gateway.delivery.trials import TrialFigures
from gateway.operate.console.snapshot import ROWS
from tests.support.gateway.app import Far, ask, configured, gateway_for, running, target
from tests.support.gateway.guarded import guarded
from tests.support.gateway.text_gateway import text_gateway
from tests.support.observe.accessibility import violations
from tests.support.observe.browser import MISSING, PROGRAM, SHOTS, Page, chromium
from tidegate import clock
from tidegate.fleet.conditions import DeviceConditions
from tidegate.fleet.offers import ModelOffer, VariantOffer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.skipif(PROGRAM is None, reason=MISSING),
    pytest.mark.timeout(300),
]
LIVE = "document.body.dataset.stream === 'live' && document.querySelectorAll('#targets tr').length > 0"
NO_WORD = "document.querySelector('#sentence').textContent.startsWith('No word from the gateway')"
NODES = "document.querySelectorAll('*').length"
HOSTILE = "edge/<img src=x onerror=alert(1)>"


@asynccontextmanager
async def load(gateway: Gateway, session: aiohttp.ClientSession) -> AsyncIterator[None]:
    """Requests, some twenty a second, until the block ends."""

    async def ask_on() -> None:
        while True:
            await ask(gateway, session)
            await clock.sleep(0.05)

    asking = asyncio.create_task(ask_on(), name="load")
    try:
        yield
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


@asynccontextmanager
async def system(folder: Path) -> AsyncIterator[tuple[Gateway, aiohttp.ClientSession, Far]]:
    """A gateway with a pool and two edges; the first edge."""
    edges, pool = (Far("edge/attic", variant="int8"), Far("edge/cellar", variant="int8")), Far("pool/main")
    async with running(*edges, pool):
        config = configured(folder, *(target(far) for far in (*edges, pool)))
        async with gateway_for(config) as (gateway, session):
            yield gateway, session, edges[0]


def crowd(gateway: Gateway, first: int, last: int) -> None:
    """Edges that are there as far as the view knows: a real gateway's fleet, without a thousand processes."""
    offers = (ModelOffer("echo", "3", (VariantOffer("int8", "int8", ((1.0, 0.5),)),)),)
    for name in (f"edge/kiosk-{number:05}" for number in range(first, last)):
        gateway.fleet.add(TargetSpec(name, "edge", "127.0.0.1:1", static=False), clock.now())
        gateway.fleet.fold(LinkUp(name, name, 1, offers), clock.now())


async def looked_at(page: Page, gateway: Gateway) -> None:
    await page.goto(gateway.addresses["admin"] + "/")
    await page.until(LIVE)


async def test_the_page_is_alive_while_requests_come_and_fits_every_screen_and_the_dark(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        gateway, session, _ = await stack.enter_async_context(system(tmp_path))
        await stack.enter_async_context(load(gateway, session))
        browser = await stack.enter_async_context(chromium())
        page = await stack.enter_async_context(browser.page(width=1366))
        await looked_at(page, gateway)
        # Well or not is this machine's business: under load its links may be slow indeed.
        assert await page.text("#state") in ("WELL", "LOOK AT THIS", "TROUBLE")
        await page.until("document.querySelector('#classes tr th')?.textContent === 'echo'")
        await page.until("parseFloat(document.querySelector('#figures .value').textContent) > 0")
        await page.until("document.querySelector('#requests tr') !== null")
        first = await page.text("#requests tr th")
        await page.until(f"document.querySelector('#requests tr th').textContent !== '{first}'")

        for name, width, dark in (("desktop", 1366, False), ("dark", 1366, True), ("phone", 390, True)):
            await page.seen_on(width, 844, dark=dark)
            await page.until("document.documentElement.scrollWidth <= innerWidth")  # the charts follow
            await page.until("document.querySelector('#chart-requests svg.plot').clientWidth > 0 && "
                             "document.querySelector('#chart-requests path.line').getTotalLength() > 0")  # fmt: skip
            await page.screenshot(SHOTS / f"console-{name}.png")
            assert await violations(page) == []
        assert page.errors == []


async def test_generations_under_way_and_their_tokens_are_shown_and_a_request_says_what_it_took(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        gateway, _ = await stack.enter_async_context(text_gateway(tmp_path, step_ms=20.0))
        client = openai.AsyncOpenAI(base_url=f"{gateway.addresses['http']}/v1", api_key="any", max_retries=0)
        await stack.enter_async_context(client)
        browser = await stack.enter_async_context(chromium())
        page = await stack.enter_async_context(browser.page(width=1366))
        await looked_at(page, gateway)
        shown = "[...document.querySelectorAll('#generations td')].map(cell => cell.textContent)"
        await page.until(f"{shown}.join() === '0,0/s,0/s,–,–'")  # it could
        streams = [
            await client.completions.create(
                model="talker",
                prompt="the tide",
                max_tokens=400,
                stream=True,
                stream_options={"include_usage": True},
            )
            for _ in range(2)
        ]
        reading = [asyncio.create_task(read(stream), name="reader") for stream in streams]
        await page.until(f"{shown}[0] === '2' && {shown}.slice(1, 3).every(cell => parseFloat(cell) > 0)")
        await page.screenshot(SHOTS / "console-generations.png")
        assert await asyncio.gather(*reading) == [400, 400]
        await page.until(f"{shown}[0] === '0' && parseFloat({shown}[3]) > 0")

        await page.until("document.querySelector('#requests button') !== null")
        await page.value("document.querySelector('#requests button').click()")
        await page.until("document.querySelector('#request').open")
        took = await page.text("#request-tokens")
        assert took.startswith("2 tokens in, 400 out; computed: the first after "), took
        await page.screenshot(SHOTS / "console-generation.png", whole=False)
        assert page.errors == []


async def read(stream: openai.AsyncStream[Any]) -> int:
    """How many tokens there were, as its end says."""
    return int([chunk async for chunk in stream][-1].usage.completion_tokens)


async def test_a_target_that_stops_is_named_on_top_and_in_its_row_and_forgotten_when_it_is_back(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        gateway, session, edge = await stack.enter_async_context(system(tmp_path))
        await stack.enter_async_context(load(gateway, session))
        browser = await stack.enter_async_context(chromium())
        page = await stack.enter_async_context(browser.page())
        await looked_at(page, gateway)
        await edge.kill()

        await page.until("document.querySelector('.said').textContent.includes('edge/attic is down')")
        await page.until("document.title.startsWith('!')")
        rows = "[...document.querySelectorAll('#targets tr')].map(row => [row.children[0].textContent,"
        told = dict(await page.value(f"{rows} row.children[1].textContent])"))
        assert told["edge/attic"].startswith("✕ down")
        assert "findings" in await page.value("document.querySelector('#announce').textContent")
        await page.screenshot(SHOTS / "console-partition.png")

        await edge.start()
        await page.until("!document.querySelector('.said').textContent.includes('edge/attic is down')")
        assert page.errors == []


async def test_two_versions_on_trial_stand_side_by_side_and_what_a_device_keeps_in_its_detail(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        gateway, _, _ = await stack.enter_async_context(system(tmp_path))
        gateway.fleet.add(TargetSpec("edge/ferry", "edge", "127.0.0.1:1", static=False), clock.now())
        gateway.fleet.targets["edge/ferry"].conditions = DeviceConditions(kept=17)
        browser = await stack.enter_async_context(chromium())
        page = await stack.enter_async_context(browser.page())
        await looked_at(page, gateway)
        assert await page.value("document.querySelector('#trials-card').hidden")

        gateway.trials.defaults.splits = TrafficSplits({"echo": TrafficSplit("3", "4", share=0.25, tenants=("acme",))})
        watched = gateway.trials.watched["echo"] = TrialFigures()
        for _ in range(8):
            watched.of("3").record("in_time", 0.010)
        watched.of("4").record("failed", 0.010, "unreachable")
        watched.agreement.record([0.99, 0.5], [True, False], classes=False)

        cells = "[...document.querySelectorAll('#trials tr')].map(row => [...row.children].map(one => one.textContent))"
        await page.until("document.querySelectorAll('#trials tr').length === 2")
        standing, candidate = await page.value(cells)
        assert standing[:5] == ["echo 3", "standing", "75 %", "8", "100 %"] and standing[5].endswith(" ms")
        assert candidate == ["echo 4", "candidate", "25 % and 1 tenant", "1", "0 %", "–", "–", "1", "50 % of 2"]
        await page.screenshot(SHOTS / "console-trial.png")

        button = "[...document.querySelectorAll('#targets th button')].find(one => one.textContent === 'edge/ferry')"
        await page.value(f"{button}.click()")
        await page.until("document.querySelector('#detail-facts').textContent.includes('17 to be brought in')")
        gateway.trials.defaults.splits = TrafficSplits()
        await page.until("document.querySelector('#trials-card').hidden")
        assert page.errors == []


async def test_devices_that_disagree_with_the_pool_stand_before_those_that_agree_in_the_light_and_in_the_dark(
    tmp_path: Path,
) -> None:
    async with AsyncExitStack() as stack:
        pool = Far("pool/main")
        await stack.enter_async_context(running(pool))
        config = configured(tmp_path, target(pool), agreement=AgreementConfig())
        gateway, _ = await stack.enter_async_context(gateway_for(config))
        browser = await stack.enter_async_context(chromium())
        page = await stack.enter_async_context(browser.page(width=1366))
        await looked_at(page, gateway)
        assert await page.value("document.querySelector('#agreement-card').hidden")

        assert gateway.shadowing is not None
        watch = gateway.shadowing.watch
        tokens, cosine = (
            AgreementTerms("tokens", "output_ids", 0.12, 0.05),
            AgreementTerms("cosine", "y", 0.0184, 0.0082),
        )
        for device, model, terms, score in (
            ("edge/attic", "minilm", cosine, 0.009),
            (HOSTILE, "minilm", cosine, 0.0071),
            ("edge/kiosk", "talker", tokens, 1.0),
            ("edge/till", "talker", tokens, 0.04),
        ):
            source = AnswerSource(device, model, "2", "int8")
            for _ in range(20):
                watch.record(ShadowedAnswer(source, "pool/main's fp32", score, terms, 2, "tokens"), clock.now())

        rows = (
            "[...document.querySelectorAll('#agreement tr')].map(row => [...row.children].map(one => one.textContent))"
        )
        await page.until("document.querySelectorAll('#agreement tr').length === 4")
        first, *others = await page.value(rows)
        assert first[:-1] == ["edge/kiosk", "talker 2 int8", "greedy tokens", "95.0 %", "0.0 %", "88.0 %", "20"]
        assert first[-1].startswith("✕ demoted, for ")
        assert [row[0] for row in others] == [HOSTILE, "edge/attic", "edge/till"]
        assert others[1] == ["edge/attic", "minilm 2 int8", "cosine", "99.2 %", "99.1 %", "98.2 %", "20", "● agrees"]
        why = await page.value("document.querySelector('#agreement tr td:last-child').title")
        assert "differ from pool/main's fp32 by 1 on average" in why
        for name, width, dark in (("light", 1366, False), ("dark", 1366, True), ("phone", 390, True)):
            await page.seen_on(width, 844, dark=dark)
            await page.until("document.documentElement.scrollWidth <= innerWidth")
            await page.screenshot(SHOTS / f"console-agreement-{name}.png")
            assert await violations(page) == []
        assert page.errors == []


async def test_everything_can_be_reached_and_read_with_a_keyboard(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        gateway, session, _ = await stack.enter_async_context(system(tmp_path))
        await stack.enter_async_context(load(gateway, session))
        browser = await stack.enter_async_context(chromium())
        page = await stack.enter_async_context(browser.page())
        await looked_at(page, gateway)
        focused = "document.activeElement.textContent.trim().slice(0, 40) || document.activeElement.id"
        met: list[str] = []
        while len(met) < 60 and "hold" not in met:
            await page.press("Tab", 9)
            met.append(str(await page.value(f"(document.activeElement.tagName === 'INPUT' && "
                                            f"document.activeElement.id) || {focused}")))  # fmt: skip
        assert met[0] == "Skip to the verdict"
        wanted = ["pool/main", "edge/attic", "edge/cellar", "find", "only-odd", "hold"]
        assert [one for one in wanted if one not in met] == []
        visible = "getComputedStyle(document.activeElement).outlineStyle !== 'none'"
        assert await page.value(visible)

        await page.value("document.querySelector('#targets button').focus()")
        await page.press("Enter", 13)
        await page.until("document.querySelector('#detail').open && "
                         "document.querySelectorAll('#detail-facts dd').length > 8")  # fmt: skip
        assert (await page.text("#detail-title")) == "pool/main"
        await page.until("document.querySelector('#detail-chart svg.plot')?.clientWidth > 0")
        await page.screenshot(SHOTS / "console-target.png", whole=False)
        assert await violations(page) == []
        await page.press("Escape", 27)
        await page.until("!document.querySelector('#detail').open")
        await page.until("document.activeElement.textContent === 'pool/main'")
        unnamed = (
            "[...document.querySelectorAll('button, input, section, dialog, [role=group]')].filter(node => "
            "!(node.textContent.trim() || node.labels?.length || node.ariaLabel)).length"
        )
        assert await page.value(unnamed) == 0
        assert page.errors == []


async def test_a_requests_waterfall_adds_up_to_what_it_took(tmp_path: Path) -> None:
    async with system(tmp_path) as (gateway, session, _), chromium() as browser, browser.page() as page:
        for _ in range(3):
            assert (await ask(gateway, session))[0] == 200
        await looked_at(page, gateway)
        await page.until("document.querySelectorAll('#requests button').length === 3")
        await page.value("document.querySelector('#requests button').click()")
        await page.until("document.querySelector('#request').open")

        took = await page.value("[...document.querySelectorAll('#waterfall .took')].map(node => node.textContent)")
        stages = await page.value("[...document.querySelectorAll('#waterfall .stage')].map(node => node.textContent)")

        end = stages.index("ok")
        parts = [float(one.split(" ms")[0]) for one in took[:end]]
        assert {"admit", "compute"} <= set(stages[:end])
        # Each figure is rounded to a tenth of a millisecond.
        assert abs(sum(parts) - float(took[end].split(" ms")[0])) <= 0.05 * (len(parts) + 1)
        await page.screenshot(SHOTS / "console-request.png", whole=False)
        assert page.errors == []


async def test_a_thousand_edges_make_the_page_no_larger_and_names_are_text(tmp_path: Path) -> None:
    async with system(tmp_path) as (gateway, *_), chromium() as browser, browser.page() as page:
        crowd(gateway, 0, 100)
        await looked_at(page, gateway)
        more = "document.querySelector('#targets-more').textContent.startsWith"
        await page.until(f"{more}('and {103 - ROWS} more')")
        of_hundred = await page.value(NODES)

        crowd(gateway, 100, 999)
        gateway.fleet.add(TargetSpec(HOSTILE, "edge", "127.0.0.1:1", static=False), clock.now())
        await page.until(f"{more}('and {1003 - ROWS} more')")
        await page.until(f"document.querySelector('.said').textContent.includes('{HOSTILE}')")

        assert await page.value(NODES) < of_hundred + 100
        assert await page.value("document.querySelectorAll('main img, [onerror], dialog img').length") == 0
        await page.screenshot(SHOTS / "console-thousand.png")
        await page.value("document.querySelector('#find').focus()")
        await page.call("Input.insertText", text="kiosk-00998")
        await page.until("document.querySelector('#targets tr th').textContent === 'edge/kiosk-00998' && "
                         "document.querySelectorAll('#targets tr').length === 1")  # fmt: skip
        assert page.errors == []


async def test_where_a_key_is_asked_for_the_page_asks_for_it_and_a_lost_gateway_is_said(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack, chromium() as browser, browser.page() as page:
        serving = guarded(tmp_path, admin_host="0.0.0.0")
        gateway, _, keys, _ = await stack.enter_async_context(serving)
        await page.goto(gateway.addresses["admin"].replace("0.0.0.0", "127.0.0.1") + "/")
        await page.until("!document.querySelector('#key-form').hidden")
        await page.until("document.activeElement.id === 'key'")

        await page.call("Input.insertText", text=keys.texts["operator"])
        await page.press("Enter", 13)

        await page.until(LIVE)
        assert await page.value("document.querySelector('#key-form').hidden")
        assert all("401" in one for one in page.errors), page.errors
        await stack.aclose()
        await page.until(NO_WORD)
        assert (await page.value("document.title")).startswith("! ")


async def test_when_its_key_has_run_out_the_page_calls_nothing_well_any_more(tmp_path: Path) -> None:
    async with (
        guarded(tmp_path, admin_host="0.0.0.0") as (gateway, _, keys, _),
        chromium() as browser,
        browser.page() as page,
    ):
        await page.goto(gateway.addresses["admin"].replace("0.0.0.0", "127.0.0.1") + "/")
        await page.until("document.activeElement.id === 'key'")
        # As a text processor or a chat gives it back: no header can hold it, so that asking would fail for ever.
        await page.call("Input.insertText", text=keys.texts["operator"].replace("_", "\u200b_"))
        await page.press("Enter", 13)
        await page.until("document.querySelector('#key-words').textContent.startsWith('That is no key')")
        await page.call("Input.insertText", text=keys.texts["operator"])
        await page.press("Enter", 13)
        await page.until(LIVE)
        await page.until("document.querySelector('#timeline').max > 0")

        keys.revoke("operator")

        await page.until("!document.querySelector('#key-form').hidden")
        await page.until(NO_WORD)
        assert (await page.value("document.title")).startswith("! ")
        # The timeline leads to what was, and from there back to what is now: nothing is heard.
        await page.value("(document.querySelector('#timeline').focus(), true)")
        await page.press("ArrowLeft", 37)
        await page.until("document.body.dataset.time === 'past'")
        await page.press("End", 35)
        await page.until("document.body.dataset.time === 'now'")
        assert await page.value(NO_WORD), await page.text("#sentence")
