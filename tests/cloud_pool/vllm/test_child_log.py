"""What a server prints, in our log: whole lines, bounded in length and in number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from cloud_pool.vllm.child_log import ChildLog
from tidegate import clock


@pytest.fixture
def now() -> Iterator[list[float]]:
    at = [100.0]
    with clock.reading(lambda: at[0]):
        yield at


def lines_of(logs: list[Any]) -> list[str]:
    return [entry["line"] for entry in logs]


def test_lines_are_logged_whole_however_they_come(now: list[float]) -> None:
    child = ChildLog("w")
    with capture_logs() as logs:
        for part in (b"load", b"ing\nrea", b"dy\n\n", b"\x1b[32mgreen\x1b[0m\x07\r\n", b"no end"):
            child.feed(part)
    assert lines_of(logs) == ["loading", "ready", "green"] and child.last_line == "green"


def test_a_line_without_end_is_cut_and_the_next_one_is_whole(now: list[float]) -> None:
    child = ChildLog("w")
    with capture_logs() as logs:
        for _ in range(100):
            child.feed(b"x" * 1000)
        child.feed(b"tail\nnext\n")
    assert [len(line) for line in lines_of(logs)] == [2000, 4] and lines_of(logs)[-1] == "next"


def test_so_many_lines_a_second_are_logged_and_the_others_counted(now: list[float]) -> None:
    child = ChildLog("w")
    with capture_logs() as logs:
        child.feed(b"line\n" * 1000)
        assert len(logs) == 200
        now[0] += 1.0
        child.feed(b"line\n" * 1000)
        assert len(logs) == 220 and logs[200]["left_out"] == 800


def test_its_last_words_are_those_that_name_an_error(now: list[float]) -> None:
    child = ChildLog("w")
    with capture_logs():
        child.feed(b"begin\nValueError: no room\n" + b"leaked\n" * 20)
        assert child.last_words() == "ValueError: no room"
        child.feed(b"x\n" * 50)
        assert set(child.last_words().split(" | ")) == {"x"}
        child.feed(b"Error: " + b"y" * 1900 + b"\nError: " + b"z" * 1900 + b"\n")
    assert len(child.last_words()) == 2000


def test_one_that_says_nothing_has_no_last_words() -> None:
    assert (ChildLog("w").last_words(), ChildLog("w").last_line) == ("", "")
