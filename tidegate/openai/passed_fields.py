"""The fields of a request that are passed on to a target that takes text.

Those that this side answers for itself are left out: the model's name, the most tokens of the answer, how it comes, and
what is accounted to whom. So are fields that nobody here has heard of: what a server does with them is between it and
its own callers.

Most fields go on as they came. Two may hold more than what was checked of them, and servers read more: llama-server
takes a schema beside `json_object`, and vLLM took parameters of its tokenizer from `chat_template_kwargs`. They are
written anew from what was read here. The same variables go into the templates of models that are served here.

Pure.
"""

from __future__ import annotations

import re
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
# What a template finds beside its variables: a model's special tokens, and functions.
_FOUND_BY_TEMPLATES: Final = frozenset(
    {
        "additional_special_tokens", "bos_token", "cls_token", "cycler", "dict", "eos_token", "joiner", "lipsum",
        "mask_token", "namespace", "pad_token", "raise_exception", "range", "sep_token", "strftime_now", "unk_token",
    }
)  # fmt: skip
_RESERVED: Final = _PARAMETERS | _FOUND_BY_TEMPLATES
# Published templates read fewer than ten variables: switches, numbers, names of levels, dates.
MOST_VARIABLES: Final = 16
MOST_VARIABLES_BYTES: Final = 16 * 1024  # as JSON, all together
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_Fields = msgspec.defstruct("_Fields", [(name, msgspec.Raw, msgspec.Raw()) for name in sorted(_PASSED)])
_decode = msgspec.json.Decoder(_Fields).decode  # fields that nobody knows are passed by, however many they are

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
    given = msgspec.structs.asdict(_decode(body))
    fields = {name: msgspec.Raw(bytes(raw)) for name, raw in given.items() if bytes(raw) not in (b"", b"null")}
    if response_format is not None:
        fields[_FORMAT] = msgspec.Raw(msgspec.json.encode(_rebuilt(response_format, schema)))
    if variables is not None:
        fields[TEMPLATE_KWARGS] = msgspec.Raw(msgspec.json.encode(variables))
    return TextPrompt(fields)


def check_variables(variables: Mapping[str, TemplateVariable] | None) -> None:
    """Raises WrongParameter for too many or too large ones, and for what is no variable of a template's own."""
    if not variables:
        return
    if len(variables) > MOST_VARIABLES:
        raise WrongParameter(
            TEMPLATE_KWARGS, f"{TEMPLATE_KWARGS} has {len(variables)} variables: at most {MOST_VARIABLES} are served"
        )
    for name in variables:
        if not _NAME.fullmatch(name):
            raise WrongParameter(TEMPLATE_KWARGS, f"{TEMPLATE_KWARGS}: {name[:64]!r} is no name of a variable")
        if name in _RESERVED:
            raise WrongParameter(
                TEMPLATE_KWARGS, f"{TEMPLATE_KWARGS}.{name} is reserved, and no variable of a template: leave it out"
            )
    if len(msgspec.json.encode(variables)) > MOST_VARIABLES_BYTES:
        raise WrongParameter(TEMPLATE_KWARGS, f"{TEMPLATE_KWARGS} has more than {MOST_VARIABLES_BYTES} bytes")


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raises WrongParameter for a tool that is no function, or whose parameters should be made no grammar of."""
    for index, tool in enumerate(tools):
        if (kind := tool.get("type", "function")) != "function":  # its calls would come back in another form
            raise WrongParameter("tools", f"tools[{index}].type is {str(kind)[:64]!r}: functions alone are served")
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
