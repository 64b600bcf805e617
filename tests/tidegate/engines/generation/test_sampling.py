"""Tokens come with the probabilities that temperature, `top_k` and `top_p` leave, and log-probabilities sum to one."""

from __future__ import annotations

from collections import Counter
from math import exp, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.engines.generation.logprobs import token_logprobs
from tidegate.engines.generation.sampling import draw_at, is_greedy, sampled_token
from tidegate.generate.request import Sampling

LOGITS = np.log(np.array([0.1, 0.4, 0.05, 0.3, 0.15], np.float32))
DRAWS = [(n + 0.5) / 1000 for n in range(1000)]


def shares(sampling: Sampling) -> dict[int, float]:
    """Each token's share of a thousand draws that are evenly spread: its probability, to a thousandth."""
    seen = Counter(sampled_token(LOGITS, sampling, draw) for draw in DRAWS)
    return {token: count / 1000 for token, count in sorted(seen.items())}


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(1.0), {0: 0.1, 1: 0.4, 2: 0.05, 3: 0.3, 4: 0.15}),
        (Sampling(1.0, top_k=2), {1: 4 / 7, 3: 3 / 7}),
        (Sampling(1.0, top_k=99), {0: 0.1, 1: 0.4, 2: 0.05, 3: 0.3, 4: 0.15}),
        (Sampling(1.0, top_p=0.4), {1: 1.0}),
        (Sampling(1.0, top_p=0.41), {1: 4 / 7, 3: 3 / 7}),
        (Sampling(1.0, top_p=0.8), {1: 8 / 17, 3: 6 / 17, 4: 3 / 17}),
        (Sampling(1.0, top_p=0.5, top_k=2), {1: 1.0}),  # the mass of the two
        (Sampling(0.5), {0: 0.01 / 0.285, 1: 0.16 / 0.285, 2: 0.0025 / 0.285, 3: 0.09 / 0.285, 4: 0.0225 / 0.285}),
        (Sampling(0.0), {1: 1.0}),
        (Sampling(5e-324), {1: 1.0}),
        (Sampling(2.0, top_p=0.0), {1: 1.0}),
        (Sampling(2.0, top_k=1), {1: 1.0}),
        (Sampling(1.0, min_p=0.5), {1: 4 / 7, 3: 3 / 7}),
        (Sampling(1.0, top_k=3, min_p=0.375), {1: 8 / 17, 3: 6 / 17, 4: 3 / 17}),
        (Sampling(1.0, top_p=0.8, min_p=0.7), {1: 4 / 7, 3: 3 / 7}),
        (Sampling(2.0, min_p=1.0), {1: 1.0}),
    ],
    ids=repr,
)
def test_tokens_come_with_their_probabilities(sampling: Sampling, expected: dict[int, float]) -> None:
    assert shares(sampling) == pytest.approx(expected, abs=0.002)
    assert is_greedy(sampling) <= (len(expected) == 1)


@given(
    st.lists(st.floats(-50.0, 50.0, width=32), min_size=1, max_size=30),
    st.floats(0.0, 2.0),
    st.floats(0.0, 1.0),
    st.integers(0, 40),
    st.floats(0.0, 1.0, exclude_max=True),
    st.integers(0, 29),
)
def test_a_token_that_cannot_come_never_does(
    logits: list[float], temperature: float, top_p: float, top_k: int, draw: float, masked: int
) -> None:
    row = np.array(logits, np.float32)
    if len(row) > 1:
        row[masked % len(row)] = -np.inf
    token = sampled_token(row, Sampling(temperature, top_p, top_k), draw)
    assert np.isfinite(row[token])
    if top_k:
        assert (row > row[token]).sum() < top_k


def test_log_probabilities_are_of_the_whole_vocabulary_and_the_likeliest_come_first() -> None:
    logprob, top = token_logprobs(LOGITS + 7.0, 4, 3)
    assert logprob == pytest.approx(log(0.15))
    assert [one.id for one in top] == [1, 3, 4]
    assert [exp(one.logprob) for one in top] == pytest.approx([0.4, 0.3, 0.15])
    assert token_logprobs(LOGITS, 4, 0)[1] == ()
    assert len(token_logprobs(LOGITS, 4, 99)[1]) == 5
    assert sum(exp(one.logprob) for one in token_logprobs(LOGITS, 4, 5)[1]) == pytest.approx(1.0)


@given(
    st.integers(0, 2**32 - 1), st.floats(0.05, 2.0), st.floats(0.05, 1.0), st.integers(0, 300), st.floats(0.0, 0.999)
)
def test_of_a_large_vocabulary_it_is_the_token_that_sorting_all_of_it_finds(
    seed: int, temperature: float, top_p: float, top_k: int, draw: float
) -> None:
    chance = np.random.default_rng(seed)
    logits = chance.integers(-40, 40, 2000).astype(np.float32) / 8  # many of them equal
    mass = np.exp((logits - logits.max()) * np.float32(1.0 / temperature)).astype(np.float64)
    order = np.argsort(-mass, kind="stable")[: top_k or None]
    reached = mass[order].cumsum()
    nucleus = order[: int(np.searchsorted(reached, top_p * reached[-1])) + 1] if top_p < 1.0 else order
    token = sampled_token(logits, Sampling(temperature, top_p, top_k), draw)
    assert token in nucleus or mass[token] == mass[nucleus[-1]]
    below = mass[np.sort(nucleus)].cumsum()
    assert np.interp(token, np.sort(nucleus), below) == pytest.approx(
        below[-1] * draw, abs=mass[token] + mass[nucleus[-1]] + 1e-3 * below[-1]
    )


def test_draws_are_even_and_know_their_place() -> None:
    """The first ones of SplitMix64 from 0 are published; of many, each tenth of the range has a tenth."""
    assert [int(draw_at(0, place) * 2**53) << 11 for place in range(3)] == [
        word >> 11 << 11 for word in (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    ]
    for draws in ([draw_at(7, place) for place in range(5000)], [draw_at(seed, 3) for seed in range(-2500, 2500)]):
        assert len(set(draws)) == 5000
        counts, _ = np.histogram(draws, 10, (0.0, 1.0))
        assert counts.sum() == 5000 and counts.min() > 420 and counts.max() < 580
    assert draw_at(-1, 0) == draw_at(2**64 - 1, 0) != draw_at(1, 0)
