"""The word for a request without an answer, from its error and whether it was sent to a target."""

from __future__ import annotations

from io import StringIO

import pytest
from msgspec.structs import replace
from rich.console import Console

from gateway.commands.explain import summaries
from gateway.core.history.unanswered import unanswered_word
from gateway.operate.explanation import explanation_json
from tests.support.gateway.flowns import request_record, went
from tidegate.outcome import Outcome

LATE = "deadline_exceeded: no answer from minilm before the deadline"
ON_TWO_EDGES = [*went(0, "edge/a", 0.002), *went(1, "edge/b", 0.1, ends=0.2, what="cancelled")]


@pytest.mark.parametrize(
    ("code", "attempted", "word"),
    [
        ("deadline_exceeded", True, "no answer in time"),
        ("deadline_exceeded", False, "refused"),
        ("nothing_alive", True, "failed"),
        ("nothing_alive", False, "refused"),
        ("overloaded", True, "refused"),
        ("overloaded", False, "refused"),
        ("too_large", True, "refused"),
        ("forbidden", False, "refused"),
        ("unreachable", True, "failed"),
        ("poisonous", True, "failed"),
        ("internal", False, "failed"),
        ("deferred", True, "deferred"),
        ("cancelled", True, "cancelled"),
        ("cancelled", False, "cancelled"),
    ],
)
def test_the_word_says_whether_anything_was_sent(code: str, attempted: bool, word: str) -> None:
    assert code in set(Outcome)
    assert unanswered_word(code, attempted=attempted) == word


def test_a_request_that_ran_on_two_edges_and_was_not_answered_in_time_was_not_refused() -> None:
    record = request_record(notes=ON_TWO_EDGES, end=LATE, elapsed_s=1.001)
    screen = Console(width=200, file=StringIO())
    screen.print(summaries([explanation_json(record)]))
    line = screen.file.getvalue()  # type: ignore[attr-defined]  # it is the one above

    assert record.ended == "no answer in time"
    assert "edge/a, edge/b" in line and "no answer in time" in line and "refused" not in line


def test_the_sentence_of_a_request_that_found_a_target_only_later_does_not_say_refused() -> None:
    held = replace(request_record(notes=ON_TWO_EDGES, end=LATE), decision=None)
    assert explanation_json(held)["sentence"] == f"No answer in time: {LATE}"
    unsent = replace(held, notes=())
    assert explanation_json(unsent)["sentence"] == f"Refused: {LATE}"
    left = replace(held, end="cancelled: the caller left")
    assert explanation_json(left)["sentence"] == "Cancelled: the caller left"


def test_an_answered_request_is_late_or_answered() -> None:
    assert [request_record(elapsed_s=took_s).ended for took_s in (0.5, 1.5)] == ["answered", "late"]
