"""Quality figures on small examples, and latency that takes turns."""

from __future__ import annotations

import numpy as np
import pytest

from tidegate.tools.build.demo.corpus import texts
from tidegate.tools.build.evaluate import measure
from tidegate.tools.build.evaluate.measure import cosines, interleaved_s, top1


def test_cosines_are_by_row_and_blind_to_length() -> None:
    reference = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 0.0], [2.0, 0.0]])
    measured = np.array([[3.0, 0.0], [1.0, -1.0], [-1.0, 0.0], [1.0, 1.0]])
    assert cosines(reference, measured) == pytest.approx([1.0, 0.0, -1.0, 2**-0.5])


def test_two_zero_rows_are_the_same_and_one_is_not_like_any_other() -> None:
    assert list(cosines(np.array([[0.0, 0.0], [0.0, 0.0]]), np.array([[0.0, 0.0], [1.0, 0.0]]))) == [1.0, 0.0]


def test_rows_of_any_rank_are_compared_as_a_whole() -> None:
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    assert cosines(array, array) == pytest.approx([1.0, 1.0])


def test_top1_is_the_part_of_rows_with_the_label_on_top() -> None:
    assert top1(np.array([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]]), np.array([1, 0, 0, 1])) == 0.5


def test_calls_take_turns_after_their_warm_up() -> None:
    order: list[str] = []
    taken = interleaved_s({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repeats=2, warm_up=1)
    assert order == ["a", "b"] * 3
    assert set(taken) == {"a", "b"}


def test_measuring_ends_early_but_never_before_three_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr(measure.clock, "now", lambda: float(next(ticks)))
    calls: list[int] = []
    interleaved_s({"a": lambda: calls.append(1)}, repeats=100, warm_up=0, most_s=1.0)
    assert len(calls) == 3


@pytest.mark.slow
def test_the_corpus_is_real_text_of_all_lengths_and_always_the_same() -> None:
    corpus = texts(240)
    words = sorted(len(text.split()) for text in corpus)
    assert len(set(corpus)) == 240
    assert corpus == texts(240)
    assert words[24] < 10
    assert words[-24] > 50
