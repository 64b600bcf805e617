"""`make screenshots`: the README's picture of the console, of a whole system whose link to the pool is sick.

A real `tidegate up` with three edges, short and long texts and images for half a minute, and a network in front of the
pool that is gone for some seconds every so often. The picture is taken when the console's first sentence names it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import aiohttp

from tests.e2e.stack import Stack, running
from tests.support.observe.browser import MISSING, PROGRAM, chromium
from tidegate import clock

PICTURE: Final = Path("docs/images/console.png")
DATA: Final = Path(".tidegate")  # the demo models of `make run`: built once
LINK: Final = "pool=flap_slow"
SHORT: Final = "Time and tide wait for no one."
LONG: Final = "The tide rises, the tide falls, the twilight darkens, the curlew calls. " * 12
SEEN_S: Final = 40.0  # of traffic before the picture, so that the charts show something
GAP_S: Final = 0.12
SICK: Final = "/silent|slow|in doubt/.test(document.querySelector('main, body').innerText.slice(0, 400))"


@asynccontextmanager
async def traffic(stack: Stack) -> AsyncIterator[None]:
    """Mostly short texts, which devices take, and long ones for the pool, until the block ends."""
    url = f"{stack.http}/v1/embeddings"

    async def ask(session: aiohttp.ClientSession, text: str) -> None:
        async with session.post(url, json={"model": "minilm", "input": text}, headers=stack.headers) as response:
            await response.read()

    async def ask_on() -> None:
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as asking:
            turn = 0
            while True:
                asking.create_task(ask(session, LONG if turn % 3 == 0 else SHORT))
                turn += 1
                await clock.sleep(GAP_S)

    task = asyncio.create_task(ask_on(), name="traffic")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def take(stack: Stack) -> None:
    async with traffic(stack), chromium() as browser, browser.page(width=1280, height=800) as page:
        await page.goto(stack.ready["admin"] + "/")
        await page.until("document.body.dataset.stream === 'live'")
        await clock.sleep(SEEN_S)
        await page.until(SICK, within_s=90.0)
        PICTURE.parent.mkdir(exist_ok=True)
        await page.screenshot(PICTURE, whole=False)


def main() -> None:
    if PROGRAM is None:
        sys.exit(MISSING)
    with running(DATA, "--demo", "minilm,digits", "--edges", "3", "--link", LINK) as stack:
        asyncio.run(take(stack))
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()
