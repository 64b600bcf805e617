"""A known answer lives for its time and within its bytes; the least recently asked for goes first."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.response_cache.response_cache import (
    OVERHEAD_BYTES,
    CacheLimits,
    KeptAnswer,
    ResponseCache,
    size_of,
)
from tidegate.types import Datatype, InferResponse, Tensor

EACH = OVERHEAD_BYTES + 10


def answer(size: int = 10, *, source: str = "edge/a") -> KeptAnswer:
    tensor = Tensor("y", Datatype.UINT8, (size,), bytes(size))
    return KeptAnswer(InferResponse("m", "1", (tensor,)), "fp32", source, "mark")


def cache(whole: int = 100, *, m: int = 100, n: int = 100, ttl_s: float = 10.0) -> ResponseCache:
    """With room for so many small answers."""
    return ResponseCache(whole * EACH, {"m": CacheLimits(ttl_s, m * EACH), "n": CacheLimits(ttl_s, n * EACH)})


def test_an_answer_is_found_until_its_time_is_over_and_being_found_does_not_prolong_it() -> None:
    kept = cache(ttl_s=10.0)
    assert kept.keep(b"k", "m", answer(), now=100.0)
    assert kept.find(b"k", now=105.0) is not None
    assert kept.find(b"k", now=109.999) is not None
    assert kept.find(b"k", now=110.0) is None
    assert repr(kept) == f"<ResponseCache 0 answers, 0 of {100 * EACH} bytes>"


def test_the_one_asked_for_longest_ago_makes_room() -> None:
    kept = cache(2)
    kept.keep(b"a", "m", answer(), now=0.0)
    kept.keep(b"b", "m", answer(), now=0.0)
    kept.find(b"a", now=1.0)
    kept.keep(b"c", "n", answer(), now=1.0)
    assert [kept.find(key, now=1.0) is not None for key in (b"a", b"b", b"c")] == [True, False, True]
    assert kept.evicted == 1


def test_a_model_that_has_reached_its_bound_makes_room_of_its_own_only() -> None:
    kept = cache(100, m=2)
    kept.keep(b"n", "n", answer(), now=0.0)
    for key in (b"a", b"b", b"c"):
        kept.keep(key, "m", answer(), now=1.0)
    assert kept.of_model("m") == (2, 2 * EACH)
    assert kept.of_model("n") == (1, EACH)
    assert kept.find(b"a", now=1.0) is None


@pytest.mark.parametrize(("model", "size"), [("m", 5 * EACH), ("unnamed", 10)])
def test_what_is_too_large_or_of_another_model_is_not_kept_and_moves_nothing(model: str, size: int) -> None:
    kept = cache(4)
    kept.keep(b"a", "m", answer(), now=0.0)
    assert not kept.keep(b"b", model, answer(size), now=0.0)
    assert kept.find(b"a", now=0.0) is not None
    assert kept.evicted == 0


def test_all_answers_of_one_source_are_forgotten_together() -> None:
    kept = cache()
    for number in range(6):
        kept.keep(bytes([number]), "m", answer(source=f"edge/{number % 2}"), now=0.0)
    assert kept.drop_where("m", lambda one: one.source == "edge/1") == 3
    assert kept.of_model("m") == (3, 3 * EACH)
    assert kept.drop_where("unnamed", lambda _one: True) == 0


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["keep", "find", "drop", "purge"]),
        st.integers(0, 7),
        st.integers(0, 3 * EACH),
        st.floats(0.0, 4.0),
    ),
    max_size=60,
)


@pytest.mark.slow
@given(OPERATIONS)
def test_bytes_stay_within_both_bounds_and_the_cache_agrees_with_a_plain_model(
    operations: list[tuple[str, int, int, float]],
) -> None:
    limits = {"m": CacheLimits(5.0, 4 * EACH), "n": CacheLimits(2.0, 3 * EACH)}
    kept, whole, now = ResponseCache(5 * EACH, limits), 5 * EACH, 0.0
    plain: OrderedDict[bytes, tuple[str, int, float]] = OrderedDict()  # the same, without any second index
    for what, number, size, after_s in operations:
        now += after_s
        key, model = bytes([number]), "mn"[number % 2]
        if what == "keep":
            made = answer(size)
            needs = size_of(made.response)
            fits = needs <= min(limits[model].max_bytes, whole)
            assert kept.keep(key, model, made, now) is fits
            if fits:
                plain.pop(key, None)
                while sum(one[1] for one in plain.values() if one[0] == model) + needs > limits[model].max_bytes:
                    del plain[next(of for of, one in plain.items() if one[0] == model)]
                while sum(one[1] for one in plain.values()) + needs > whole:
                    plain.popitem(last=False)
                plain[key] = model, needs, now + limits[model].ttl_s
        elif what == "find":
            if key in plain and now >= plain[key][2]:
                del plain[key]
            assert (kept.find(key, now) is not None) is (key in plain)
            if key in plain:
                plain.move_to_end(key)
        elif what == "drop":
            plain.pop(key, None)
            kept.drop(key)
        else:
            kept.drop_where(model, lambda _one: True)
            plain = OrderedDict((of, one) for of, one in plain.items() if one[0] != model)
        assert kept.held_bytes == sum(one[1] for one in plain.values()) <= whole
        assert len(kept) == len(plain)
        for each, limit in limits.items():
            held = [one[1] for one in plain.values() if one[0] == each]
            assert kept.of_model(each) == (len(held), sum(held))
            assert sum(held) <= limit.max_bytes


def test_an_old_answer_is_the_last_known_one_for_its_time_and_no_longer_found_as_a_fresh_one() -> None:
    kept = ResponseCache(100 * EACH, {"m": CacheLimits(10.0, 100 * EACH, stale_for_s=5.0)})
    kept.keep(b"k", "m", answer(), now=100.0)
    assert kept.last_known(b"k", now=101.0) is not None  # a fresh one as well, where no target serves its version
    assert kept.find(b"k", now=110.0) is None
    old = kept.last_known(b"k", now=114.0)
    assert old is not None and old.age_s == 14.0
    assert kept.last_known(b"k", now=114.0, max_age_s=14.0) is None
    assert kept.find(b"k", now=104.0, max_age_s=4.0) is None
    assert kept.last_known(b"k", now=115.0) is None
    assert len(kept) == 0


def test_an_answer_may_be_kept_as_a_last_known_one_from_the_beginning() -> None:
    kept = ResponseCache(100 * EACH, {"m": CacheLimits(10.0, 100 * EACH, stale_for_s=5.0)})
    kept.keep(b"k", "m", answer(), now=100.0, fresh=False)
    assert kept.find(b"k", now=100.0) is None
    assert kept.last_known(b"k", now=104.9) is not None
    assert kept.last_known(b"k", now=105.0) is None
