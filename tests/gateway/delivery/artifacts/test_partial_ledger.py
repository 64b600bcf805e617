"""Partial uploads: how many a caller and all may have, and when they are removed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.delivery.artifacts.partial_ledger import PartialBounds, PartialLedger
from gateway.delivery.artifacts.store import ArtifactStore, TooManyPartials
from tidegate import clock


def name(number: int) -> str:
    return hashlib.sha256(bytes([number])).hexdigest()


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abc"), st.integers(1, 60), st.booleans()), max_size=60),
    st.integers(2, 6),
)
def test_no_caller_has_more_than_half_and_all_have_no_more_than_there_is(
    steps: list[tuple[int, str, int, bool]], most: int
) -> None:
    ledger = PartialLedger(PartialBounds(most, 100, 10.0))
    held: dict[str, tuple[str, int]] = {}
    for number, caller, size, done in steps:
        digest = name(number)
        if done:
            ledger.drop(digest)
            held.pop(digest, None)
        elif ledger.refusal(digest, caller, size) is None:
            new = digest not in held
            ledger.put(digest, caller, size, 0.0)
            held[digest] = (caller, size)
            mine = [one for one in held.values() if one[0] == caller]
            assert not new or len(mine) <= most // 2
            assert sum(one[1] for one in mine) <= 50
        assert len(held) <= most and sum(size for _, size in held.values()) <= 100


def test_a_caller_that_fills_its_half_hurts_no_other(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path, partials=PartialBounds(4, 1000, 60.0))
    store.append(name(0), 0, b"x", "one")
    store.append(name(1), 0, b"x", "one")
    with pytest.raises(TooManyPartials, match=r"artifacts\.max_partials"):
        store.append(name(2), 0, b"x", "one")
    with pytest.raises(TooManyPartials, match="500 bytes"):
        store.append(name(1), 1, b"x" * 499, "one")

    assert store.append(name(3), 0, b"x", "another") == 1
    assert store.append(name(1), 1, b"y", "one") == 2


def test_a_partial_that_an_earlier_process_left_counts_and_is_removed_when_it_is_old(tmp_path: Path) -> None:
    for number in (1, 2):
        ArtifactStore(tmp_path).append(name(number), 0, b"x")
    left = tmp_path / "partial" / name(1)
    os.utime(left, (clock.utc_s() - 100.0,) * 2)
    store = ArtifactStore(tmp_path, partials=PartialBounds(2, 1000, 60.0))
    with pytest.raises(TooManyPartials, match="in all"):
        store.append(name(3), 0, b"x", "one")

    assert store.collect() == [name(1)] and not left.exists()
    assert store.append(name(2), 1, b"y", "one") == 2, "it goes on where it was"
    assert store.collect() == []


def test_a_finished_or_spoilt_upload_gives_its_place_back(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path, partials=PartialBounds(2, 1000, 60.0))
    content = bytes([1])
    for _ in range(3):
        store.append(name(1), 0, content, "one")
        store.finish(name(1))
        store.path(name(1)).unlink()
    store.append(name(2), 0, b"wrong", "one")
    with pytest.raises(Exception, match="send it again"):
        store.finish(name(2))
    assert store.append(name(3), 0, b"x", "one") == 1


def test_a_clock_that_is_set_takes_no_upload_that_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ArtifactStore(tmp_path, partials=PartialBounds(2, 1000, 60.0))
    store.append(name(1), 0, b"x", "one")
    true = clock.utc_s
    monkeypatch.setattr(clock, "utc_s", lambda: true() + 1e8)
    assert store.collect() == []
    assert store.append(name(1), 1, b"y", "one") == 2
