"""The fields of a request that are passed on to a target that takes text.

Those that this side answers for itself are left out: the model's name, the most tokens of the answer, how it comes, and
what is accounted to whom. So are fields that nobody here has heard of: what a server does with them is between it and
its own callers.

Most fields go on as they came. Two may hold more than what was checked of them, and servers read more: llama-server
takes a schema beside `json_object`, and vLLM took parameters of its tokenizer from `chat_template_kwargs`. They are
written anew from what was read here.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from tidegate.generate.json_schema import BadSchema, check_bounds
from tidegate.openai.generation_fields import ResponseFormat
from tidegate.openai.wrong_parameter import WrongParameter
from tidegate.text_prompt import MESSAGES, PROMPT, TOOLS, TextPrompt

TEMPLATE_KWARGS: Final = "chat_template_kwargs"
_FORMAT: Final = "response_format"
_PASSED: Final = frozenset(
    {
        MESSAGES, PROMPT, TOOLS, "tool_choice", "parallel_tool_calls", "stop", "seed", "temperature", "top_p", "top_k",
        "min_p", "stop_token_ids", "ignore_eos", "reasoning_effort", "verbosity",
    }
)  # fmt: skip
# Servers call `apply_chat_template` of Hugging Face's transformers, or their own like it, with these names beside the
# variables of a template: as a variable, each would change what is done with the prompt (vLLM: CVE-2025-61620, -62426).
_PARAMETERS: Final = frozenset(
    {
        "add_generation_prompt", "add_special_tokens", "chat_template", "continue_final_message", "conversation",
        "documents", "max_length", "messages", "padding", "padding_side", "processor_kwargs",
        "return_assistant_tokens_mask", "return_dict", "return_tensors", "sanitize_control_tokens", "self", "template",
        "tokenize", "tokenizer", "tokenizer_kwargs", "tools", "truncation",
    }
)  # fmt: skip
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode

TemplateVariable = str | Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | float | bool | None


def passed_fields(
    body: bytes,
    *,
    response_format: ResponseFormat | None = None,
    schema: str = "",
    variables: Mapping[str, TemplateVariable] | None = None,
) -> TextPrompt:
    """The words of a body that has been parsed before; nothing of the body itself is kept.

    Args:
        schema: the text that was checked of a `response_format` with a schema.
        variables: of `chat_template_kwargs`, checked.
    """
    kept = {name: msgspec.Raw(bytes(raw)) for name, raw in _decode(body).items() if name in _PASSED}
    fields = {name: raw for name, raw in kept.items() if bytes(raw) != b"null"}
    if response_format is not None:
        fields[_FORMAT] = msgspec.Raw(msgspec.json.encode(_rebuilt(response_format, schema)))
    if variables is not None:
        fields[TEMPLATE_KWARGS] = msgspec.Raw(msgspec.json.encode(variables))
    return TextPrompt(fields)


def check_variables(variables: Mapping[str, TemplateVariable] | None) -> None:
    """Raises WrongParameter for a variable of a template that is a parameter of the call that renders it."""
    for name in variables or ():
        if name in _PARAMETERS:
            raise WrongParameter(TEMPLATE_KWARGS, f"{TEMPLATE_KWARGS}.{name} is not served: leave it out")


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raises WrongParameter for a tool whose parameters no server should be given to make a grammar of."""
    for index, tool in enumerate(tools):
        function = tool.get("function", tool)
        parameters = function.get("parameters") if isinstance(function, dict) else None
        try:
            check_bounds(parameters)
        except BadSchema as error:
            raise WrongParameter("tools", f"tools[{index}].function.parameters: {error}") from error


def _rebuilt(wanted: ResponseFormat, schema: str) -> dict[str, Any]:
    if wanted.type != "json_schema" or wanted.json_schema is None:
        return {"type": wanted.type}
    given = wanted.json_schema
    said = {"name": given.name or None, "description": given.description, "strict": given.strict}
    form: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
    return {"type": wanted.type, wanted.type: {**form, "schema": msgspec.Raw(schema.encode())}}
