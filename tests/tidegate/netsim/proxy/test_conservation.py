"""Whatever the link does and however bytes are cut: what comes out is what went in, in order, all of it."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.loop import run
from tests.tidegate.netsim.proxy.ends import Client, echo, linked, pattern
from tidegate import clock
from tidegate.netsim.links.profile import Alternation, Jitter, States
from tidegate.netsim.links.stream import StreamProfile
from tidegate.netsim.proxy.ledger import ByteLedger, Totals

profiles = st.builds(
    StreamProfile,
    delay_ms=st.floats(0.0, 50.0),
    jitter=st.none() | st.builds(Jitter, st.just("pareto"), st.floats(0.0, 20.0), st.just(1.5)),
    loss=st.sampled_from([0.0, 0.0, 0.05]),
    to_mbit=st.none() | st.floats(0.5, 50.0),
    from_mbit=st.none() | st.floats(0.5, 50.0),
    queue_kbyte=st.sampled_from([2.0, 64.0, float("inf")]),
    overflow=st.sampled_from(["stall", "drop"]),
    states=st.none() | st.just(States(0.3, 0.1, 0.2, delay_times=3.0, loss=0.1)),
) | st.builds(StreamProfile, outages=st.just(Alternation(every_s=0.5, for_s=0.2)))
changes = st.one_of(
    profiles.map(lambda profile: ("apply", profile)),
    profiles.map(lambda profile: ("toxic", profile)),
    st.sampled_from([("hole", "both"), ("hole", "to"), ("hole", "from"), ("heal", ""), ("clear", "")]),
)
acts = st.lists(st.tuples(st.floats(0.0, 0.3), st.integers(0, 40_000), st.none() | changes), min_size=1, max_size=12)


@pytest.mark.slow
@settings(max_examples=60)
@given(acts, st.integers(0, 1000))
def test_every_byte_comes_back_through_any_link_under_any_changes(
    acts: list[tuple[float, int, tuple[str, object] | None]], seed: int
) -> None:
    sent = pattern(sum(size for _, size, _ in acts))

    async def main() -> None:
        async with linked(echo, seed=seed) as link, Client(link) as client:
            reading = asyncio.ensure_future(client.reader.read(-1))
            place = 0
            for gap_s, size, change in acts:
                await clock.sleep(gap_s)
                client.writer.write(sent[place : place + size])
                place += size
                _change(link, change)
                link.verify()
            link.heal()
            client.writer.write_eof()
            got = await reading
            assert got == sent
            totals = link.totals()
            assert totals["to"]["received"] == totals["from"]["delivered"] == len(sent)

    run(main())


def _change(link: object, change: tuple[str, object] | None) -> None:
    match change:
        case ("apply", profile):
            link.apply(profile)  # type: ignore[attr-defined]
        case ("toxic", profile):
            link.put("toxic", profile, "to")  # type: ignore[attr-defined]
        case ("hole", direction):
            link.partition("blackhole", direction)  # type: ignore[attr-defined]
        case ("heal", _):
            link.heal()  # type: ignore[attr-defined]
        case ("clear", _):
            link.clear()  # type: ignore[attr-defined]


def test_books_that_are_right_have_no_error() -> None:
    ledger = ByteLedger()
    ledger.take(b"hello")
    assert ledger.error(held_bytes=5) is None
    ledger.give(b"hello")
    assert ledger.error(held_bytes=0) is None


@pytest.mark.parametrize(
    ("out", "held", "words"),
    [(b"hell", 0, "5 bytes in, but 4 out"), (b"hello!", 0, "6 out"), (b"olleh", 0, "are not the bytes that went in")],
)
def test_a_byte_too_few_too_many_or_moved_is_found(out: bytes, held: int, words: str) -> None:
    ledger = ByteLedger()
    ledger.take(b"hello")
    ledger.give(out)
    assert words in (ledger.error(held) or "")


def test_what_was_dropped_is_accounted_for_by_its_reason() -> None:
    ledger = ByteLedger()
    ledger.refuse(3, "limit")
    ledger.take(b"hello")
    ledger.give(b"hel")
    ledger.lose(2, "cut")
    assert ledger.error(held_bytes=0) is None
    totals = Totals()
    totals.add(ledger)
    totals.add(ledger)
    assert totals.plain() == {"received": 16, "delivered": 6, "held": 0, "dropped": {"limit": 6, "cut": 4}}
