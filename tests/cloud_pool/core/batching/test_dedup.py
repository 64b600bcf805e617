"""Deduplication finds equal inputs, and decides which request may wait for another."""

from __future__ import annotations

import numpy as np
import pytest

from cloud_pool.core.batching.dedup import Urgency, input_fingerprint, joint_urgency

IDS = np.array([[1, 2]], np.int64)


def test_the_order_of_names_does_not_matter_and_everything_else_does() -> None:
    one = {"a": IDS, "b": IDS + 1}
    assert input_fingerprint(one) == input_fingerprint({"b": IDS + 1, "a": IDS.copy()})
    others = (
        {"a": IDS, "b": IDS},
        {"a": IDS + 1, "b": IDS},
        {"a": IDS},
        {"a": IDS.astype(np.int32), "b": IDS + 1},
        {"a": IDS.reshape(2, 1), "b": IDS + 1},
        {"a": IDS.view(np.uint64), "b": IDS + 1},
    )
    assert input_fingerprint(one) not in {input_fingerprint(other) for other in others}


def test_texts_are_compared_by_what_they_say() -> None:
    said, same, other = (np.array([[text]], object) for text in (b"a", b"a", b"b"))
    assert input_fingerprint({"x": said}) == input_fingerprint({"x": same}) != input_fingerprint({"x": other})


def test_rows_that_are_no_block_in_memory_are_read_in_order() -> None:
    assert input_fingerprint({"a": np.arange(6).reshape(2, 3).T}) == input_fingerprint(
        {"a": np.array([[0, 3], [1, 4], [2, 5]])}
    )


@pytest.mark.parametrize(
    ("first", "second", "covers"),
    [
        (Urgency(1.0), Urgency(1.0), True),
        (Urgency(1.0), Urgency(2.0), True),
        (Urgency(2.0), Urgency(1.0), False),
        (Urgency(1.0, 1), Urgency(2.0, 3), True),
        (Urgency(1.0, 3), Urgency(2.0, 1), False),
        (Urgency(1.0, 0), Urgency(1.0, 2), True),
    ],
)
def test_who_is_no_more_urgent_may_rely_on_another(first: Urgency, second: Urgency, covers: bool) -> None:
    assert first.covers(second) is covers


def test_together_they_are_as_urgent_as_any_of_them() -> None:
    together = joint_urgency([Urgency(3.0, 1), Urgency(1.0, 4), Urgency(2.0)])
    assert together == Urgency(1.0, 1)
    assert all(together.covers(one) for one in (Urgency(3.0, 1), Urgency(1.0, 4), Urgency(2.0)))
