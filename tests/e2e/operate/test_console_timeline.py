"""The console's timeline in a real headless Chromium: back to an instant, over all panels, and to live again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from gateway.app import Gateway
from gateway.operate.console import moments
from tests.e2e.operate.test_console_page import NODES, crowd, load, looked_at, system
from tests.support.gateway.app import Far
from tests.support.observe.accessibility import violations
from tests.support.observe.browser import MISSING, PROGRAM, SHOTS, Page, chromium

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.skipif(PROGRAM is None, reason=MISSING),
    pytest.mark.timeout(300),
]
PAST = "document.body.dataset.time === 'past'"
NOW = "document.body.dataset.time !== 'past'"
SAID = "document.querySelector('.said').textContent"
TOLD = "document.querySelector('#timeline').getAttribute('aria-valuetext')"
WORDS = "document.querySelector('#timeline-words').textContent"
STATE = "[...document.querySelectorAll('#targets tr')].find(row => row.children[0].textContent === 'edge/attic').children[1].textContent"  # noqa: E501
PLACES = "Number(document.querySelector('#timeline').max)"
PINNED = "document.querySelector('#chart-requests .cursor').getAttribute('visibility') === 'visible'"


@pytest.fixture
async def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Page, Gateway, Far]]:
    """A page before a gateway that keeps a moment each half second; its first edge."""
    monkeypatch.setattr(moments, "EVERY_S", 0.5)
    async with AsyncExitStack() as stack:
        gateway, session, edge = await stack.enter_async_context(system(tmp_path))
        await stack.enter_async_context(load(gateway, session))
        browser = await stack.enter_async_context(chromium())
        page = await stack.enter_async_context(browser.page())
        await looked_at(page, gateway)
        yield page, gateway, edge
        assert page.errors == []


async def test_the_arrow_keys_go_back_to_before_a_device_died_and_live_is_a_key_away(
    watched: tuple[Page, Gateway, Far],
) -> None:
    page, _, edge = watched
    await page.until(f"{PLACES} >= 4 && {STATE}.startsWith('●')")
    assert await page.value(TOLD) == "live, now"
    well = await page.value(PLACES)
    await edge.kill()
    await page.until(f"{SAID}.includes('edge/attic is down')")
    await page.until(f"{PLACES} >= {well} + 3")

    await page.value("document.querySelector('#timeline').focus()")
    await page.press("Home", 36)
    await page.until(f"{PAST} && !{SAID}.includes('edge/attic is down') && {STATE}.startsWith('●')")
    assert (await page.value(WORDS)).startswith("Paused at ")
    assert (await page.value(TOLD)).startswith("paused at ")
    assert await page.value("document.title.startsWith('!')"), "what is wrong now is still said"
    await page.until(PINNED)
    assert await page.value("document.querySelector('#find').disabled")
    # Time passes and the page stays where it is.
    held = await page.value(WORDS)
    await page.until(f"{PLACES} >= {well} + 6")
    assert await page.value(WORDS) == held
    assert not await page.value(f"{SAID}.includes('edge/attic is down')")

    await page.press("ArrowRight", 39)
    await page.until(f"{WORDS} !== '{held}' || document.querySelector('#timeline').value === '1'")
    await page.press("End", 35)
    await page.until(f"{NOW} && {SAID}.includes('edge/attic is down') && {TOLD} === 'live, now'")
    assert await page.value("document.querySelector('#timeline-live').hidden")
    assert not await page.value("document.querySelector('#find').disabled")
    assert not await page.value(PINNED)


async def test_the_requests_of_that_time_are_shown_and_the_button_leads_back(
    watched: tuple[Page, Gateway, Far],
) -> None:
    page, *_ = watched
    newest = "Number(document.querySelector('#requests tr th').textContent.slice(1))"
    await page.until(f"{PLACES} >= 4 && {newest} > 20")
    latest = await page.value(newest)
    await page.value("(() => { const one = document.querySelector('#timeline'); one.value = 1; "
                     "one.dispatchEvent(new Event('input')); })()")  # fmt: skip
    await page.until(f"{PAST} && {newest} < {latest}")
    await page.value("document.querySelector('#targets button').click()")
    await page.until("document.querySelector('#detail').open && !document.querySelector('#detail-now').hidden")
    await page.press("Escape", 27)
    await page.value("document.querySelector('#timeline-live').click()")
    await page.until(f"{NOW} && {newest} > {latest}")
    assert await page.value("document.activeElement.id") == "timeline"


async def test_paused_it_fits_every_screen_in_light_and_dark_and_tells_all_to_a_screen_reader(
    watched: tuple[Page, Gateway, Far],
) -> None:
    page, *_ = watched
    await page.until(f"{PLACES} >= 4")
    await page.value("document.querySelector('#timeline').focus()")
    await page.press("Home", 36)
    await page.until(f"{PAST} && {PINNED}")
    for width in (420, 900, 1600):
        for dark in (False, True):
            await page.seen_on(width, 844, dark=dark)
            await page.until("document.documentElement.scrollWidth <= innerWidth")
            await page.screenshot(SHOTS / f"console-paused-{width}{'-dark' if dark else ''}.png", whole=False)
            assert await violations(page) == [], (width, dark)
    top = "document.querySelector('.timeline').getBoundingClientRect().top"
    await page.value("scrollTo(0, document.body.scrollHeight)")
    await page.until(f"Math.abs({top}) < 1")  # it stays in sight


async def test_with_five_hundred_targets_the_whole_past_can_be_walked_through(
    watched: tuple[Page, Gateway, Far],
) -> None:
    page, gateway, _ = watched
    crowd(gateway, 0, 500)
    await page.until("document.querySelector('#targets-more').textContent.startsWith('and ')")
    before = await page.value(PLACES)
    await page.until(f"{PLACES} >= {before} + 6")
    await page.value("document.querySelector('#timeline').focus()")
    nodes = await page.value(NODES)
    for _ in range(5):
        await page.press("ArrowLeft", 37)
    await page.until(f"{PAST} && document.querySelector('#targets-more').textContent.startsWith('and ')")
    assert await page.value(NODES) < nodes + 100
    assert await page.value("document.querySelectorAll('#targets tr').length") == 25
    await page.press("Home", 36)
    await page.until("document.querySelector('#targets-more').textContent === ''")  # before they came
    assert await violations(page) == []
