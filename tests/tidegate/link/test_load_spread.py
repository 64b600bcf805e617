"""Where several gateways have a stream to a target, each hears of the work that the others brought."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.loop import settle
from tests.support.serving.duplex import stream_pair
from tests.support.serving.link_pair import Heard, Pair, client_on, question, running
from tidegate import clock
from tidegate.link.client import LinkClient
from tidegate.link.service import SPREAD_S

SOON_S = 10 * SPREAD_S


class Second:
    """Another gateway's stream to the service of a pair."""

    def __init__(self, pair: Pair) -> None:
        asking, answering = stream_pair()
        self.heard = Heard()
        self.client: LinkClient = client_on(asking, self.heard)
        self.ends = [asyncio.create_task(self.client.run()), asyncio.create_task(pair.service.serve(answering))]

    async def hang_up(self) -> None:
        for end in self.ends:
            end.cancel()
        await asyncio.gather(*self.ends, return_exceptions=True)


@pytest.mark.slow
async def test_work_of_one_gateway_is_told_to_the_other_and_not_to_itself() -> None:
    async with running() as pair:
        pair.host.gate.clear()
        other = Second(pair)
        await settle(20)
        own, others = len(pair.heard.loads), len(other.heard.loads)
        asked = asyncio.create_task(pair.ask())
        await clock.sleep(SOON_S)
        assert len(other.heard.loads) == others + 1, "it was begun"
        pair.host.gate.set()
        await asked
        await clock.sleep(SOON_S)
        assert len(other.heard.loads) == others + 2, "it has ended"
        assert len(pair.heard.loads) == own, "whose work it is hears of it by accept and answer"
        await other.hang_up()


@pytest.mark.slow
async def test_many_requests_are_told_at_once() -> None:
    async with running() as pair:
        other = Second(pair)
        await settle(20)
        before = len(other.heard.loads)
        began_at = clock.now()
        await asyncio.gather(*(pair.ask() for _ in range(200)))
        await clock.sleep(SOON_S)
        told = len(other.heard.loads) - before
        assert 1 <= told <= 2 + (clock.now() - began_at) / SPREAD_S
        await other.hang_up()


@pytest.mark.slow
async def test_a_gateway_alone_is_told_nothing_and_one_that_has_gone_is_forgotten() -> None:
    async with running() as pair:
        before = len(pair.heard.loads)
        await pair.ask()
        await clock.sleep(SOON_S)
        assert len(pair.heard.loads) == before
        other = Second(pair)
        await settle(20)
        asked = asyncio.create_task(pair.client.ask(question()))
        await settle(2)
        await other.hang_up()
        await asked
        await clock.sleep(SOON_S)
        assert pair.service.streams == 1
        assert len(pair.heard.loads) <= before + 1
