"""Stop strings: none is shown, nothing else is lost, however the text is cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.generate.text.stop_strings import StopStrings

AB = st.text("ab", max_size=30)


def shown(strings: list[str], pieces: list[str]) -> tuple[str, bool]:
    one = StopStrings(strings)
    text = "".join([one.push(piece) for piece in pieces])
    return (text, True) if one.is_stopped else (text + one.flush(), False)


def expected(strings: list[str], text: str) -> tuple[str, bool]:
    """The text before the string that is complete first; of several at once, before the longest."""
    ends = [(text.find(one) + len(one), -len(one)) for one in strings if one in text]
    if not ends:
        return text, False
    end, length = min(ends)
    return text[: end + length], True


@given(st.lists(st.text("ab", min_size=1, max_size=5), max_size=4), st.lists(AB, max_size=8))
def test_any_cut_of_a_text_gives_what_comes_before_the_first_stop_string(strings: list[str], pieces: list[str]) -> None:
    assert shown(strings, pieces) == expected(strings, "".join(pieces))


@pytest.mark.parametrize(("pieces", "given_out"), [
    (["x", "<e", "n", "d>", "y"], ["x", "", "", "", ""]),
    (["x<en", "z"], ["x", "<enz"]),
    (["<<<end>"], ["<<"]),
    (["plain", "text"], ["plain", "text"]),
])  # fmt: skip
def test_what_may_be_the_beginning_of_one_is_held_back(pieces: list[str], given_out: list[str]) -> None:
    one = StopStrings(["<end>"])
    assert [one.push(piece) for piece in pieces] == given_out


def test_no_more_is_held_back_than_a_stop_string_has() -> None:
    one = StopStrings(["a" * 1000 + "b"])
    for _ in range(5000):
        one.push("a")
    assert len(one.flush()) == 1000
