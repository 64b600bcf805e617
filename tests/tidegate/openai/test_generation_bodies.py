"""Bodies of chats and completions: whatever comes is a request or its caller's fault, and what is refused is named."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import reduce
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.generate.request import generate_request as read_back
from tidegate.generate.request import infer_request
from tidegate.models.generative import Generative
from tidegate.oip.content_limits import ContentLimits
from tidegate.openai import chat, completions
from tidegate.openai.generation_fields import generate_request
from tidegate.openai.wrong_parameter import WrongParameter
from tidegate.outcome import InvalidRequest

MODEL = Generative(512, "d" * 64, 300, "tokenizer.json", "e" * 64, default_max_tokens=64)
SCALAR = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
VALUE = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)
SCHEMA = st.recursive(
    SCALAR,
    lambda inner: (
        st.dictionaries(
            st.sampled_from(["type", "properties", "items", "anyOf", "required", "$ref", "$defs", "not"]),
            inner,
            max_size=4,
        )
        | st.lists(inner, max_size=3)
    ),
)
FIELDS = sorted({*chat.ChatBody.__struct_fields__, *completions.CompletionBody.__struct_fields__})
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from([*chat.ROLES, "oracle"])},
    optional={"content": VALUE, "tool_calls": st.lists(VALUE, max_size=2), "name": VALUE, "tool_call_id": VALUE},
)
FORMAT = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "json_object", "json_schema"])},
    optional={"json_schema": st.fixed_dictionaries({"schema": SCHEMA})},
)
PLAIN = st.fixed_dictionaries(
    {"model": st.just("talker"), "messages": st.lists(MESSAGE, max_size=3), "prompt": st.just("the tide")},
    optional={
        "response_format": FORMAT,
        "stop": st.lists(st.text(max_size=4), max_size=5),
        "max_tokens": st.integers(),
    },
)
BODY = st.builds(
    lambda plain, odd: {**plain, **odd}, PLAIN, st.dictionaries(st.sampled_from(FIELDS), VALUE, max_size=2)
)


@pytest.mark.slow
@given(BODY)
def test_any_body_is_a_request_or_its_callers_fault(body: dict[str, Any]) -> None:
    for parse in (chat.parse, completions.parse):
        try:
            asked = parse(msgspec.json.encode(body))
            request = generate_request(asked.options, (5,), MODEL, ContentLimits())
        except InvalidRequest as error:
            assert error.message
        else:
            # What goes to a target is what a target reads.
            assert read_back(infer_request("talker", request), default_max_tokens=1) == request


@given(st.binary(max_size=60))
def test_any_bytes_are_refused(body: bytes) -> None:
    for parse in (chat.parse, completions.parse):
        with pytest.raises(InvalidRequest):
            parse(b"{" + body)


def parsed(**fields: Any) -> chat.ChatRequest:
    messages = fields.pop("messages", [{"role": "user", "content": "x"}])
    return chat.parse(msgspec.json.encode({"model": "talker", "messages": messages, **fields}))


def test_messages_are_put_into_the_form_of_templates() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "tide", "arguments": '{"at": "noon"}'}}
    asked = parsed(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "high"},
        ]
    )
    system, user, assistant, tool = asked.messages
    assert system == {"role": "system", "content": "be brief"}
    assert user == {"role": "user", "content": "ab"}
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"at": "noon"}
    assert tool == {"role": "tool", "content": "high", "tool_call_id": "1"}


@pytest.mark.parametrize(("schema", "words"), [
    ({"type": "flaot"}, "schema.type is 'flaot'"),
    ({"type": 5}, "schema.type is '5'"),
    ({"properties": []}, "schema.properties must be an object"),
    ({"anyOf": {}}, "schema.anyOf must be a list"),
    ({"required": "a"}, "schema.required must be a list"),
    ({"$ref": "http://elsewhere/x"}, "leads elsewhere"),
    ({"items": {"type": "nil"}}, "schema.items.type"),
    ({"properties": {"a": {"anyOf": [{"type": "x"}]}}}, "schema.properties.a.anyOf[0].type"),
    ({"enum": ["x" * 70_000]}, "at most 65536"),
])  # fmt: skip
def test_a_bad_schema_is_refused_with_the_place(schema: Any, words: str) -> None:
    with pytest.raises(WrongParameter) as refused:
        parsed(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert refused.value.parameter == "response_format"
    assert words in refused.value.message


AWAY: Any = {"$ref": "http://169.254.169.254/x"}
NAMED: Any = {"name": "tide", "schema": {"type": "object"}}


@pytest.mark.parametrize(("given", "passed"), [
    ({"type": "text", "json_schema": {"name": "x", "schema": AWAY}}, {"type": "text"}),
    ({"type": "json_object", "schema": AWAY}, {"type": "json_object"}),
    ({"type": "json_object", "json_schema": {"name": "x", "schema": AWAY}}, {"type": "json_object"}),
    ({"type": "json_schema", "schema": AWAY, "json_schema": {**NAMED, "grammar": "root ::= .", "strict": None}},
     {"type": "json_schema", "json_schema": NAMED}),
    ({"type": "json_schema", "json_schema": {**NAMED, "strict": False, "description": "of the sea"}},
     {"type": "json_schema", "json_schema": {**NAMED, "strict": False, "description": "of the sea"}}),
])  # fmt: skip
def test_a_format_that_is_passed_on_holds_nothing_but_what_was_checked(given: Any, passed: Any) -> None:
    body = msgspec.json.encode({"model": "talker", "prompt": "the tide", "response_format": given})
    for words in (parsed(response_format=given).words, completions.parse(body).words):
        assert msgspec.json.decode(words.fields["response_format"]) == passed


def test_the_schema_that_is_passed_on_is_the_text_that_was_checked() -> None:
    schema = {"enum": ["ü", 10**30, 1.5]}
    asked = parsed(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert asked.options.schema.encode() in bytes(asked.words.fields["response_format"])


def test_variables_of_a_template_are_passed_on() -> None:
    given = {"enable_thinking": False, "effort": "low", "budget": 5, "share": 0.5, "date": None}
    asked = parsed(chat_template_kwargs=given)
    assert msgspec.json.decode(asked.words.fields["chat_template_kwargs"]) == asked.variables == given
    assert "chat_template_kwargs" not in parsed(chat_template_kwargs=None).words.fields


@pytest.mark.parametrize("variables", [
    {"chat_template": "{{ 7 * 7 }}"}, {"enable_thinking": True, "tokenize": False}, {"add_generation_prompt": False},
    {"continue_final_message": True}, {"max_length": 2**40}, {"truncation": True}, {"template": "tool_use"},
    {"messages": "x"}, {"tools": None}, {"documents": "x"}, {"tokenizer_kwargs": {"padding": True}}, {"a": {"b": 1}},
    {"a": [1]}, {"a": 2**64}, ["a"], "a", {"bos_token": "<s>"}, {"eos_token": None}, {"raise_exception": ""},
    {"namespace": 1}, {"no name": 1}, {"": 1}, {"x" * 65: 1}, {"a\n": 1}, {"a": "x" * 16_384},
    {f"v{number}": True for number in range(17)},
])  # fmt: skip
def test_what_is_more_than_a_variable_of_a_template_is_refused_by_name(variables: Any) -> None:
    with pytest.raises(WrongParameter) as refused:
        parsed(chat_template_kwargs=variables)
    assert refused.value.parameter == "chat_template_kwargs"
    assert "chat_template_kwargs" in refused.value.message


def test_a_field_of_the_request_stands_above_a_variable_of_its_name() -> None:
    given = {"reasoning_effort": "high", "verbosity": "low", "enable_thinking": True}
    asked = parsed(chat_template_kwargs=given, reasoning_effort="none")
    assert asked.variables == {"reasoning_effort": "none", "verbosity": "low", "enable_thinking": True}


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"properties": {"city": {"$ref": "http://inside.example/schema"}}}, "leads elsewhere"),
        ({"x-unknown": [{"$ref": "file:///etc/passwd"}]}, "leads elsewhere"),
        (reduce(lambda inner, _: {"items": inner}, range(40), {}), "nested too deeply"),
    ],
)
def test_a_tools_parameters_lead_nowhere_and_are_not_endless(parameters: dict[str, Any], words: str) -> None:
    sane = {
        "name": "weather",
        "parameters": {"$defs": {"a": {"type": "any"}}, "properties": {"b": {"$ref": "#/$defs/a"}}},
    }
    assert parsed(tools=[{"type": "function", "function": sane}, sane, {}]).words.fields["tools"]
    for tool in ({"type": "function", "function": {"parameters": parameters}}, {"parameters": parameters}):
        with pytest.raises(WrongParameter, match=words) as refused:
            parsed(tools=[sane, tool])
        assert refused.value.parameter == "tools" and "tools[1]" in refused.value.message


@pytest.mark.parametrize("field", [
    {"frequency_penalty": 0}, {"presence_penalty": 0.0}, {"logit_bias": {}}, {"n": 1}, {"modalities": ["text"]},
    {"repetition_penalty": 1.0}, {"min_tokens": 0}, {"bad_words": []}, {"structured_outputs": None},
    {"function_call": "none"}, {"user": "x"}, {"store": True}, {"metadata": {"a": "b"}}, {"top_k": -1},
])  # fmt: skip
def test_fields_that_ask_for_nothing_are_passed_by(field: dict[str, Any]) -> None:
    asked, plain = parsed(**field), parsed()
    assert (asked.options, asked.messages, asked.tools) == (plain.options, plain.messages, plain.tools)


@pytest.mark.parametrize("options", [{}, {"search_context_size": "low"}])
def test_a_search_in_the_web_is_refused_also_as_it_is_by_default(options: dict[str, Any]) -> None:
    with pytest.raises(WrongParameter, match="web_search_options is not served"):
        parsed(web_search_options=options)
    assert parsed(web_search_options=None).options == parsed().options


@pytest.mark.parametrize("refused", [
    {"content": None, "refusal": "I cannot."}, {"content": [{"type": "refusal", "refusal": "I cannot."}]},
    {"content": "I cannot.", "refusal": None},
])  # fmt: skip
def test_a_refusal_in_a_conversation_is_what_its_model_said(refused: dict[str, Any]) -> None:
    told = [{"role": "user", "content": "help"}, {"role": "assistant", **refused}, {"role": "user", "content": "why?"}]
    assert parsed(messages=told).messages[1] == {"role": "assistant", "content": "I cannot."}


def peak_bytes(refused: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(WrongParameter):
            refused()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


TOO_LARGE = {
    "tools": {"tools": [{"type": "function", "x": ["y"] * 300_000}]},
    "response_format": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["y"] * 300_000}}}
    },
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_is_too_large_as_it_came_is_refused_before_anything_is_made_of_it(name: str) -> None:
    sent = msgspec.json.encode({"model": "talker", "messages": [{"role": "user", "content": "x"}], **TOO_LARGE[name]})
    with pytest.raises(WrongParameter, match=f"{name} has \\d+ bytes of JSON; at most \\d+ may be") as refused:
        chat.parse(sent)
    assert refused.value.parameter == name
    assert peak_bytes(lambda: chat.parse(sent)) < len(sent)


def test_tools_and_schemas_of_another_form_are_named() -> None:
    for fields in ({"tools": {}}, {"tools": [1]}, {"tools": [{}] * 129}, {"tools": "x"}):
        with pytest.raises(WrongParameter, match="wrong in tools: ") as refused:
            parsed(**fields)
        assert refused.value.parameter == "tools"
    with pytest.raises(WrongParameter, match="wrong in response_format: Expected `object`") as refused:
        parsed(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": [1]}})
    assert refused.value.parameter == "response_format"


def test_a_tool_that_is_no_function_is_refused() -> None:
    custom = {"type": "custom", "custom": {"name": "shell"}}
    with pytest.raises(WrongParameter, match=r"tools\[1\].type is 'custom': functions alone are served") as refused:
        parsed(tools=[{"type": "function", "function": {"name": "tide"}}, custom])
    assert refused.value.parameter == "tools"


def test_fields_that_nobody_knows_cost_nothing() -> None:
    known = {"model": "talker", "prompt": "the tide", "seed": 7, "stop": None}
    sent = msgspec.json.encode({**known, **{f"unknown_{index}": 0 for index in range(100_000)}})
    tracemalloc.start()
    try:
        fields = completions.parse(sent).words.fields
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert {name: bytes(raw) for name, raw in fields.items()} == {"prompt": b'"the tide"', "seed": b"7"}
    assert peak < len(sent)


@pytest.mark.parametrize(("name", "one", "most"), [
    ("content", {"type": "text", "text": "x"}, chat.MAX_PARTS),
    ("tool_calls", {"id": "1", "type": "function", "function": {"name": "tide"}}, chat.MAX_TOOL_CALLS),
])  # fmt: skip
def test_a_message_has_so_many_parts_and_calls_and_no_more(name: str, one: Any, most: int) -> None:
    role = "user" if name == "content" else "assistant"
    assert parsed(messages=[{"role": role, name: [one] * most}]).messages
    with pytest.raises(WrongParameter, match=f"length <= {most}") as refused:
        parsed(messages=[{"role": role, name: [one] * (most + 1)}])
    assert refused.value.parameter == "messages"
