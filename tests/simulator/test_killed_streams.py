"""Streams whose targets are killed and stopped under them: no token is lost or doubled, and every stream ends."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulator.killed_streams import Lives, lives_of

_SEEDS = range(1, 201)
_SECONDS = 6.0
_DECLARED = ("it was gone on with 4 times already", "no answer from", "no target", "deadline_exceeded")


@pytest.mark.slow
def test_no_token_is_lost_or_doubled_and_every_stream_ends_whole_or_with_a_declared_reason() -> None:
    all_lives = [lives_of(seed, _SECONDS) for seed in _SEEDS]

    assert [str(one) for one in all_lives if one.wrong] == []
    assert [str(one) for one in all_lives if one.whole + one.refused + sum(one.broken.values()) != one.answers] == []
    assert sum(one.lives for one in all_lives) > 1400
    assert sum(one.resumed for one in all_lives) > 500, "or else nothing was tried"
    assert sum(one.handed_over for one in all_lives) > 50, "nor while its target was well"
    assert _undeclared(all_lives) == {}


def test_a_seed_gives_the_same_lives_each_time() -> None:
    assert lives_of(7, 3.0) == lives_of(7, 3.0)


@pytest.mark.slow
def test_a_successor_that_is_given_up_ends_together_with_what_was_asked_beside_it() -> None:
    lives = lives_of(4)  # in which one is
    assert (lives.wrong, lives.whole + lives.refused + sum(lives.broken.values())) == (0, lives.answers)


def _undeclared(all_lives: list[Lives]) -> Counter[str]:
    """Reasons that nobody has written down."""
    found: Counter[str] = Counter()
    for one in all_lives:
        found.update({why: many for why, many in one.broken.items() if not any(word in why for word in _DECLARED)})
    return found
