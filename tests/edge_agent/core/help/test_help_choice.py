"""Where a local caller's request goes, what keeps it here, and when a gateway is left alone. Pure."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.core.help.help_breaker import FAILURES, FIRST_PAUSE_S, LONGEST_PAUSE_S, HelpBreaker
from edge_agent.core.help.help_choice import (
    HelpChoice,
    HelpingPeer,
    HelpLimits,
    HelpNeed,
    Place,
    ask_after_s,
    choose_place,
)
from edge_agent.core.help.help_times import LEAST_PATIENCE_S, MOST_MODELS, HelpTimes

LIMITS = HelpLimits(max_in_flight=4, max_request_bytes=1000)
MAIN, SLOW = HelpingPeer("main:8006", 0.1), HelpingPeer("slow:8006", 0.9)
NEW, DOWN = HelpingPeer("new:8006", None), HelpingPeer("down:8006", 0.01, "its link is lost")

seconds = st.floats(0.0, 100.0)
needs = st.builds(
    HelpNeed,
    left_s=st.floats(-1.0, 10.0),
    here_s=st.one_of(seconds, st.just(inf)),
    size_bytes=st.integers(0, 2000),
    stays=st.sampled_from(("", "", "", "it is pinned (edge)")),
    asked=st.booleans(),
)
gateways = st.lists(
    st.builds(
        HelpingPeer,
        st.sampled_from(("a:1", "b:1", "c:1")),
        st.one_of(st.none(), seconds),
        st.sampled_from(("", "", "down")),
    ),
    max_size=3,
)


def need(**changes: object) -> HelpNeed:
    return HelpNeed(**{"left_s": 1.0, "here_s": inf, "size_bytes": 10, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "known", "in_flight", "place", "gateway"),
    [
        (need(here_s=0.9), [MAIN], 0, "here", ""),  # in time here: nobody is bothered
        (need(here_s=1.1), [MAIN], 0, "peer", "main:8006"),  # late here, in time there
        (need(here_s=1.1), [SLOW, MAIN], 0, "peer", "main:8006"),  # the quicker of two
        (need(here_s=1.1), [HelpingPeer("m", 1.2)], 0, "here", ""),  # late at both: the queue here decides
        (need(), [HelpingPeer("m", 1.2)], 0, "peer", "m"),  # never here: a small chance is worth a question
        (need(), [HelpingPeer("m", 1.7)], 0, "nowhere", ""),  # and provable lateness is not
        (need(), [NEW], 0, "peer", "new:8006"),
        (need(), [DOWN, SLOW], 0, "peer", "slow:8006"),
        (need(), [DOWN], 0, "nowhere", ""),
        (need(), [], 0, "nowhere", ""),
        (need(here_s=1.1), [], 0, "here", ""),
        (need(stays="it is pinned (edge)"), [MAIN], 0, "nowhere", ""),
        (need(asked=True), [MAIN], 0, "nowhere", ""),
        (need(left_s=0.0), [MAIN], 0, "nowhere", ""),
        (need(size_bytes=1001), [MAIN], 0, "nowhere", ""),
        (need(), [MAIN], 4, "nowhere", ""),
    ],
)
def test_a_request_goes_where_it_is_in_time(
    asked: HelpNeed, known: list[HelpingPeer], in_flight: int, place: Place, gateway: str
) -> None:
    choice = choose_place(asked, known, in_flight, LIMITS)
    assert (choice.place, choice.peer) == (place, gateway)
    assert bool(choice.why) == (place != "peer")


@pytest.mark.slow
@given(needs, gateways, st.integers(0, 8))
def test_a_request_is_sent_only_where_everything_allows_it(
    asked: HelpNeed, known: list[HelpingPeer], in_flight: int
) -> None:
    choice: HelpChoice = choose_place(asked, known, in_flight, LIMITS)

    if choice.place == "peer":
        assert not asked.stays, "it is pinned"
        assert not asked.asked, "it was asked for once"
        assert asked.left_s > 0.0, "its budget is over"
        assert asked.here_s > asked.left_s, "it could be computed here in time"
        assert asked.size_bytes <= LIMITS.max_request_bytes
        assert in_flight < LIMITS.max_in_flight
        assert any(one.name == choice.peer and not one.why_not for one in known)
    elif choice.place == "nowhere":
        assert asked.here_s == inf, "it can be tried here"


@pytest.mark.parametrize(
    ("left_s", "here_s", "took_s", "after_s"),
    [
        (2.0, 0.01, None, 1.0),  # nothing is known of the gateway: half of the budget each
        (2.0, 0.01, 0.1, 1.8),  # as late as twice its time allows
        (2.0, 0.95, 0.1, 1.9),  # not before the device had twice its own
        (2.0, 0.99, 0.1, inf),  # and then it is too late to ask
        (2.0, 0.01, 1.5, 0.02),
        (2.0, 0.01, 4.0, inf),
        (2.0, 0.01, inf, inf),  # there is none
    ],
)
def test_a_gateway_is_asked_beside_the_device_at_the_last_moment_that_is_of_use(
    left_s: float, here_s: float, took_s: float | None, after_s: float
) -> None:
    assert ask_after_s(left_s, here_s, took_s) == pytest.approx(after_s)


@given(st.floats(0.0, 10.0), seconds, st.one_of(st.none(), seconds))
def test_beside_the_device_no_gateway_is_asked_after_the_budget(
    left_s: float, here_s: float, took_s: float | None
) -> None:
    after_s = ask_after_s(left_s, here_s, took_s)
    assert after_s >= 0.0
    assert after_s == inf or after_s <= left_s


def test_a_gateway_that_answers_nothing_is_left_alone_longer_and_longer_and_tried_with_one_question() -> None:
    breaker, now, pauses = HelpBreaker(), 0.0, []
    for _ in range(12):
        while breaker.why_not(now):
            now += 0.25
        breaker.asking()
        breaker.unanswered(now)
        pauses.append(now)
    steps = [later - sooner for sooner, later in pairwise(pauses)]
    assert steps[: FAILURES - 1] == [0.0] * (FAILURES - 1)
    assert steps[FAILURES - 1] == FIRST_PAUSE_S
    assert max(steps) == LONGEST_PAUSE_S

    now += LONGEST_PAUSE_S
    breaker.asking()
    assert "another question tries" in breaker.why_not(now)
    breaker.left()
    assert breaker.why_not(now) == ""
    breaker.asking()
    breaker.answered(now)
    assert breaker.why_not(now) == ""
    assert "CLOSED" in repr(breaker)


def test_a_gateway_without_room_is_left_alone_for_as_long_as_it_says_and_no_longer_than_the_longest_pause() -> None:
    breaker = HelpBreaker()
    breaker.asking()
    breaker.answered(10.0, retry_after_s=2.0)
    assert "no room" in breaker.why_not(11.0)
    assert breaker.why_not(12.0) == ""
    breaker.answered(20.0, retry_after_s=1e9)
    assert breaker.why_not(20.0 + LONGEST_PAUSE_S) == ""


def test_the_time_of_a_gateway_is_learned_from_its_answers_and_from_its_silence() -> None:
    times = HelpTimes()
    assert times.took_s("a", 0.0) is None
    times.silent("a", 1.0)  # nothing is known that it could be longer than
    assert times.took_s("a", 0.0) is None
    assert times.patience_s("a") == LEAST_PATIENCE_S
    times.answered("a", 0.1)
    assert times.took_s("a", 0.0) == pytest.approx(0.1)
    for _ in range(40):
        times.answered("a", 0.4)
    assert times.took_s("a", 0.0) == pytest.approx(0.4, rel=0.2)
    assert times.patience_s("a") == pytest.approx(0.8, rel=0.2)
    before = times.took_s("a", 0.0) or 0.0
    times.silent("a", before / 2)
    assert times.took_s("a", 0.0) == before
    times.silent("a", before * 3)
    assert (times.took_s("a", 0.0) or 0.0) > before
    for number in range(MOST_MODELS):
        times.answered(f"m{number}", 1.0)
    assert times.took_s("a", 0.0) is None
    assert repr(times) == f"<HelpTimes of {MOST_MODELS} models>"
