"""The exit status of a child, in words."""

from __future__ import annotations

import pytest

from tidegate.workers.exit_status import describe_exit


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "exited with status 0"),
        (3, "exited with status 3"),
        (-9, "was killed by SIGKILL"),
        (-40, "was killed by signal 40"),
    ],
)
def test_a_status_is_told_as_an_exit_or_as_a_signal(status: int, words: str) -> None:
    assert describe_exit(status) == words


def test_the_words_may_be_the_callers() -> None:
    assert describe_exit(1, exited="ended with exit code") == "ended with exit code 1"
    assert describe_exit(-15, killed="was ended by") == "was ended by SIGTERM"
