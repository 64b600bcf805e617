"""Calls of tools are read out of a text, however it is cut into pieces, and what is no call stays text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.generate.text.tool_calls import (
    MAX_CALL_CHARACTERS,
    Dialect,
    ToolCall,
    ToolCallReader,
    dialect_of,
)

NAMES = ("tide_at", "moon")
HIGH = '{"name": "tide_at", "arguments": {"port": "Brest", "hours": [1.50, 1e3]}}'
CALL = ToolCall("tide_at", '{"port": "Brest", "hours": [1.50, 1e3]}')
MOON = ToolCall("moon", "{}")


def read(dialect: Dialect, *parts: str, at_most: int = 128) -> tuple[str, list[ToolCall]]:
    """All of the text, and the calls."""
    reader = ToolCallReader(dialect, NAMES, at_most=at_most)
    found = [one for part in parts for one in reader.push(part)] + reader.flush()
    assert "" not in found and reader.flush() == []
    calls = [one for one in found if isinstance(one, ToolCall)]
    assert reader.has_called == bool(calls)
    return "".join([one for one in found if isinstance(one, str)]), calls


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        (f"<tool_call>\n{HIGH}\n</tool_call>", "", [CALL]),
        (f"Let me see.\n<tool_call>{HIGH}</tool_call>\n", "Let me see.", [CALL]),
        (f'<tool_call>{HIGH}</tool_call>\n<tool_call>{{"name": "moon"}}</tool_call>', "", [CALL, MOON]),
        (f'<tool_call>[{HIGH}, {{"name": "moon", "arguments": {{}}}}]</tool_call>', "", [CALL, MOON]),
        (f"<tool_call>{HIGH}", "", [CALL]),
        (f"<tool_call>{HIGH}</tool_call> and so on", " and so on", [CALL]),
        ('<tool_call>{"name": "moon", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [ToolCall("moon", '{"a": 1}')]),
        ('<tool_call>{"name": "moon", "parameters": {"a": ";"}}</tool_call>', "", [ToolCall("moon", '{"a": ";"}')]),
    ],
)
def test_calls_in_tags_are_read_and_the_text_before_them_stays(text: str, shown: str, calls: list[ToolCall]) -> None:
    assert read("tagged", text) == (shown, calls)
    assert read("tagged", *text) == (shown, calls)


def test_a_call_may_nest_as_deep_as_any_model_writes() -> None:
    arguments = '{"a":' * 100 + "1" + "}" * 100
    shown, calls = read("tagged", f'<tool_call>{{"name": "moon", "arguments": {arguments}}}</tool_call>')
    assert (shown, [one.arguments for one in calls]) == ("", [arguments])


@pytest.mark.parametrize(
    "body",
    [
        "",
        "no JSON",
        "{",
        "[]",
        "3",
        HIGH[:-1],
        f"{HIGH} and more",
        '{"name": "sun", "arguments": {}}',
        f'[{HIGH}, {{"name": "sun"}}]',
        '{"name": "", "arguments": {}}',
        '{"name": "moon", "arguments": [1]}',
        '{"name": "moon", "arguments": "x"}',
        '{"name": "moon", "arguments": {"a": NaN}}',
        '{"name": 3}',
        '{"arguments": {}}',
        "[" * 50_000,
        '{"name": "moon", "arguments": ' + '{"a":' * 127 + "1" + "}" * 128,
        '{"name": "moon", "arguments": ' + '{"a":' * 9_000 + "1" + "}" * 9_001,
        '{"name": "moon", "arguments": {"a": ' + "9" * 5_000 + "}}",
    ],
)
def test_what_is_no_call_of_a_tool_stays_text_to_the_last_character(body: str) -> None:
    for text in (f"<tool_call>{body}</tool_call>", f" <tool_call>{body}", f"{body}</tool_call>\n"):
        assert read("tagged", text) == (text, [])


def test_a_call_that_is_far_too_long_is_given_as_text_and_holds_nothing_back() -> None:
    reader = ToolCallReader("tagged", NAMES)
    assert reader.push("<tool_call>") == []
    given = reader.push("x" * MAX_CALL_CHARACTERS)
    assert given == ["<tool_call>" + "x" * MAX_CALL_CHARACTERS]
    assert reader.push("y") == ["y"] and reader.push("</tool_call>") == ["</tool_call>"] and reader.flush() == []
    assert read("whole", "{", "x" * MAX_CALL_CHARACTERS, "y") == ("{" + "x" * MAX_CALL_CHARACTERS + "y", [])


def test_text_goes_out_as_it_comes_and_only_what_may_be_a_tag_waits() -> None:
    reader = ToolCallReader("tagged", NAMES)
    assert [reader.push(part) for part in ("The", " tide", " <", "b>", " x <tool_", "box>", " ")] == [
        ["The"], [" tide"], [], [" <b>"], [" x"], [" <tool_box>"], [],
    ]  # fmt: skip
    assert reader.flush() == [" "]


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        (HIGH, "", [CALL]),
        (' {"name": "tide_at", "parameters": {"a": "}; {"}}\n', "", [ToolCall("tide_at", '{"a": "}; {"}')]),
        (f'{HIGH}; {{"name": "moon"}}', "", [CALL, MOON]),
        (f'[{HIGH}, {{"name": "moon"}}]', "", [CALL, MOON]),
        ('{"tide": 4.5}', '{"tide": 4.5}', []),
        (f"{HIGH} is what I call", f"{HIGH} is what I call", []),
        (f"I call {HIGH}", f"I call {HIGH}", []),
        ("", "", []),
    ],
)
def test_a_text_that_is_a_call_as_a_whole_is_one(text: str, shown: str, calls: list[ToolCall]) -> None:
    assert read("whole", text) == read("whole", *text) == (shown, calls)


def test_a_text_that_begins_otherwise_is_not_held_back() -> None:
    reader = ToolCallReader("whole", NAMES)
    assert [reader.push(part) for part in ("", "\n", "The", " {", "")] == [[], [], ["\nThe"], [" {"], []]


def test_more_calls_than_may_be_are_left_out() -> None:
    two = f'<tool_call>{HIGH}</tool_call><tool_call>{{"name": "moon"}}</tool_call>'
    assert read("tagged", two, at_most=1) == ("", [CALL])
    assert read("whole", f'[{HIGH}, {{"name": "moon"}}]', at_most=1) == ("", [CALL])


PARTS = st.lists(
    st.sampled_from([
        "<tool_call>", "</tool_call>", "<tool", "_call>", "<", ">", " ", "\n", ";", "[", "]", ",", "{", "}", HIGH,
        '{"name": "moon"}', '"', "text", "é",
    ]),
    max_size=12,
)  # fmt: skip


@given(PARTS, st.data())
def test_what_is_read_does_not_depend_on_how_the_text_is_cut(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for dialect in ("tagged", "whole"):
        assert read(dialect, *pieces) == read(dialect, text) == read(dialect, *text)


@given(PARTS)
def test_a_text_without_a_call_comes_out_as_it_went_in(parts: list[str]) -> None:
    text = "".join(parts)
    for dialect in ("tagged", "whole"):
        shown, calls = read(dialect, *text)
        assert calls or shown == text
        assert all(json.loads(one.arguments).__class__ is dict and one.name in NAMES for one in calls)


@pytest.mark.parametrize(
    ("template", "dialect"),
    [
        ("{% if tools %}for each call return <tool_call>{...}</tool_call>{% endif %}", "tagged"),
        ('{% if tools %}Respond in the format {"name": f, "parameters": {}}{% endif %}', "whole"),
        ("{% if tools %}[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]{% endif %}", "whole"),
        ("{% if tools %}{{ tools | tojson }}{% endif %}", None),
        ("{{ messages }}", None),
    ],
)
def test_the_template_says_how_calls_are_written(template: str, dialect: Dialect | None) -> None:
    assert dialect_of(template) == dialect
