"""Evidence asked for over the link: made for the nonce and the client, the newest challenge first."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.loop import on_virtual_time, settle
from tests.support.serving.duplex import stream_pair
from tests.support.serving.link_pair import Heard, client_on, running, tensor_of
from tidegate.link import frames
from tidegate.link.frames import Greeting
from tidegate.outcome import Disconnected, NotSupported, Unreachable


@on_virtual_time
async def test_evidence_is_made_for_the_nonce_and_the_client_and_a_refusal_comes_with_its_words() -> None:
    def prove(nonce: bytes, certificate: bytes | None) -> bytes:
        if nonce == b"no":
            raise ValueError("not for you")
        return nonce + b" of " + (certificate or b"nobody")

    async with running(attest=prove) as pair:
        assert await pair.client.evidence(b"n1") == b"n1 of nobody"
        with pytest.raises(NotSupported, match="not for you"):
            await pair.client.evidence(b"no")
        assert await pair.client.evidence(b"n2") == b"n2 of nobody"
        assert tensor_of(await pair.ask()) == b"abc"


@on_virtual_time
async def test_of_a_flood_of_challenges_the_newest_is_answered() -> None:
    made: list[bytes] = []

    def prove(nonce: bytes, _certificate: bytes | None) -> bytes:
        made.append(nonce)
        return nonce

    async with running(attest=prove) as pair:
        for number in range(100):
            pair.client.session.send(frames.challenge(b"%d" % number))
        assert await pair.client.evidence(b"last") == b"last"
        assert len(made) < 10 and made[-1] == b"last"


@on_virtual_time
async def test_whoever_waits_for_evidence_hears_that_the_stream_has_ended() -> None:
    ours, theirs = stream_pair()
    client = client_on(ours, Heard())
    run = asyncio.create_task(client.run())
    await theirs.write(frames.hello(Greeting("edge/attic", 1, "0")))
    await settle(5)
    asking = asyncio.create_task(client.evidence(b"n"))
    await settle(5)
    await theirs.write(frames.chunk(99, b"x"))  # nothing that it asked for: it hangs up
    assert "request 99" in await run
    with pytest.raises(Disconnected, match="request 99"):
        await asking
    with pytest.raises(Unreachable, match="request 99"):
        await client.evidence(b"n")
