"""A prompt's blocks are known by all that stands before them, and what is expected is held to what answers say."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.estimate.known_prefixes import (
    BLOCK,
    LONGEST_CHAIN,
    MOST_BLOCKS,
    UNPROVEN_BLOCKS,
    KnownPrefixes,
    PrefixChain,
    prefix_chain,
)

TOKENS = st.lists(st.integers(0, 3), max_size=6 * BLOCK)


def chain(*ids: int, salt: str = "a tenant") -> PrefixChain:
    return prefix_chain(struct.pack(f"<{len(ids)}i", *ids), salt)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@given(TOKENS, TOKENS)
def test_two_prompts_share_the_whole_blocks_of_what_they_have_in_common(one: list[int], other: list[int]) -> None:
    assert common(chain(*one), chain(*other)) == common(one, other) // BLOCK


def test_tenants_share_nothing_and_chains_are_bounded() -> None:
    ids = range(4 * BLOCK)
    assert set(chain(*ids)).isdisjoint(chain(*ids, salt="another"))
    assert len(chain(*ids, 7)) == 4 and chain() == ()
    assert len(chain(*range(2 * LONGEST_CHAIN * BLOCK))) == LONGEST_CHAIN


def test_what_answers_show_to_be_there_is_expected_of_the_next() -> None:
    known, instructions = KnownPrefixes(), tuple(range(8 * BLOCK))
    first = chain(*instructions, *range(500, 520))
    assert known.expected_tokens(first) == 0.0
    known.computed(first, 0)
    assert known.known_tokens(first) == 9 * BLOCK
    assert known.expected_tokens(first) == 0.0, "it was never seen to keep anything"
    for number in range(20):
        known.computed(chain(*instructions, *range(600 + number, 640 + number)), len(instructions))
    again = chain(*instructions, *range(900, 980))
    assert known.known_tokens(again) == len(instructions)
    assert known.expected_tokens(again) == pytest.approx(len(instructions), rel=0.05)
    assert known.expected_tokens(chain(9, *instructions)) == 0.0


def test_a_cache_that_lost_what_it_had_is_believed_less_within_a_few_answers() -> None:
    known, prompt = KnownPrefixes(), chain(*range(32 * BLOCK))
    for _ in range(20):
        known.computed(prompt, 32 * BLOCK)
    before = known.expected_tokens(prompt)
    for _ in range(8):
        known.computed(prompt, 0)
    assert known.expected_tokens(prompt) < 0.5 * before
    for _ in range(8):
        known.computed(prompt, 32 * BLOCK)
    assert known.expected_tokens(prompt) > 0.5 * before


@pytest.mark.slow
@given(st.lists(st.tuples(TOKENS, st.integers(-5, 1000)), max_size=30), TOKENS)
def test_no_more_is_expected_than_is_known_whatever_answers_say(
    answers: list[tuple[list[int], int]], prompt: list[int]
) -> None:
    known = KnownPrefixes()
    for ids, cached in answers:
        known.computed(chain(*ids), cached)
    asked = chain(*prompt)
    assert 0.0 <= known.expected_tokens(asked) <= known.known_tokens(asked) <= len(prompt)
    assert 0.0 <= known.share < 1.0


def test_it_is_bounded_and_forgets_what_was_used_least_recently() -> None:
    unproven, proven = KnownPrefixes(), KnownPrefixes()
    kept = chain(*range(BLOCK))
    proven.computed(kept, 0)
    for number in range(MOST_BLOCKS + 100):
        one = chain(*range(1000 * number, 1000 * number + BLOCK))
        unproven.computed(one, 0)
        proven.computed(one, 0)
        if number % 100 == 0:
            proven.computed(kept, BLOCK)
    assert repr(unproven).startswith(f"<KnownPrefixes {UNPROVEN_BLOCKS} blocks")
    assert repr(proven).startswith(f"<KnownPrefixes {MOST_BLOCKS} blocks")
    assert proven.known_tokens(kept) == BLOCK
    assert proven.known_tokens(chain(*range(1000, 1000 + BLOCK))) == 0
