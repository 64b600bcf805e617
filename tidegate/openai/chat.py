"""The body of a chat completion: messages checked and put into the form that chat templates are written for.

Templates of published models expect a message's content to be one text, and the arguments of a tool call to be an
object: content in parts is joined, and arguments that are JSON are parsed. `developer` is OpenAI's newer name of
`system`, which templates do not know; nor do they know a `refusal`, which is what its model said.

Pure. Not served: images and sound.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from tidegate.openai.generation_fields import GenerationFields, GenerationOptions, options_of, refuse_unserved
from tidegate.openai.passed_fields import TemplateVariable, check_tools, check_variables, passed_fields
from tidegate.openai.wrong_parameter import WrongParameter, decoded, decoded_field
from tidegate.text_prompt import TextPrompt

MAX_MESSAGES: Final = 4096
MAX_PARTS: Final = 1024  # of one message's content
MAX_TOOL_CALLS: Final = 128  # of one message
MAX_TOOLS: Final = 128
MAX_TOOLS_BYTES: Final = 2**20  # all together
ROLES: Final = ("system", "developer", "user", "assistant", "tool")


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)] | None = None
    refusal: str | None = None  # what a model said instead
    name: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOL_CALLS)] | None = None
    tool_call_id: str | None = None


Level = Annotated[str, Meta(min_length=1, max_length=32, pattern=r"^[a-z_]+\Z")]  # "low", "high"; models add others


class ChatBody(GenerationFields, frozen=True, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: msgspec.Raw = msgspec.Raw()  # decoded once they are known to be short enough
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    # these three go to servers that take text and into templates that have them
    chat_template_kwargs: dict[str, TemplateVariable] | None = None
    reasoning_effort: Level | None = None
    verbosity: Level | None = None
    # refused, unless they ask for nothing
    functions: list[Any] | None = None
    function_call: Any = None
    audio: Any = None
    modalities: list[str] | None = None
    prediction: Any = None
    web_search_options: Any = None


class ChatRequest(msgspec.Struct, frozen=True):
    options: GenerationOptions
    messages: list[dict[str, Any]]  # as templates take them
    tools: list[dict[str, Any]]  # [] for none
    words: TextPrompt  # the request as it came, for a target that takes text
    parallel_calls: bool = True  # whether one answer may call several tools
    variables: dict[str, TemplateVariable] = {}  # of the template: how much it should think and say, and others


def parse(body: bytes) -> ChatRequest:
    """The request in a body. Raises WrongParameter, InvalidRequest."""
    asked = decoded(body, _decode)
    refuse_unserved(
        {
            "functions": asked.functions,
            "function_call": asked.function_call if asked.function_call != "none" else None,
            "audio": asked.audio,
            "modalities": [one for one in asked.modalities or () if one != "text"],
            "prediction": asked.prediction,
            "web_search_options": asked.web_search_options is not None,  # {} asks for a search as it is by default
        }
    )
    if asked.tool_choice not in (None, "none", "auto"):
        raise WrongParameter("tool_choice", "a call of a tool cannot be required here: auto and none are served")
    if asked.top_logprobs is not None and not asked.logprobs:
        raise WrongParameter("top_logprobs", "top_logprobs is for logprobs: true")
    check_variables(asked.chat_template_kwargs)
    given = decoded_field("tools", asked.tools, _decode_tools, max_bytes=MAX_TOOLS_BYTES) if asked.tools else None
    check_tools(given or ())
    if not asked.messages:
        raise WrongParameter("messages", "messages must not be an empty list")
    options = options_of(
        asked,
        max_tokens=asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens,
        logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
    )
    messages = [_message(index, one) for index, one in enumerate(asked.messages)]
    tools = [] if asked.tool_choice == "none" else given or []
    words = passed_fields(
        body,
        response_format=asked.response_format,
        schema=options.schema,
        variables=asked.chat_template_kwargs,
    )
    said = {"reasoning_effort": asked.reasoning_effort, "verbosity": asked.verbosity}
    levels = {name: level for name, level in said.items() if level is not None}
    variables = {**(asked.chat_template_kwargs or {}), **levels}  # a field of the request's own says it best
    return ChatRequest(options, messages, tools, words, asked.parallel_tool_calls is not False, variables)


_decode = msgspec.json.Decoder(ChatBody).decode
_decode_tools = msgspec.json.Decoder(Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None).decode


def _message(index: int, given: ChatMessage) -> dict[str, Any]:
    if given.role not in ROLES:
        known = ", ".join(ROLES)
        raise WrongParameter("messages", f"messages[{index}].role is {given.role[:60]!r}: one of {known} is wanted")
    message: dict[str, Any] = {"role": "system" if given.role == "developer" else given.role}
    content = given.refusal if given.content is None and given.role == "assistant" else given.content
    if content is None and not (given.role == "assistant" and given.tool_calls):
        raise WrongParameter("messages", f"messages[{index}] has no content")
    message["content"] = "" if content is None else _text(index, content)
    if given.name is not None:
        message["name"] = given.name
    if given.tool_calls:
        message["tool_calls"] = [_tool_call(index, one) for one in given.tool_calls]
    if given.tool_call_id is not None:
        message["tool_call_id"] = given.tool_call_id
    return message


def _text(index: int, content: str | list[ContentPart]) -> str:
    if isinstance(content, str):
        return content
    texts = [{"text": part.text, "refusal": part.refusal}.get(part.type) for part in content]
    if None in texts:
        kind = content[texts.index(None)].type
        raise WrongParameter("messages", f"messages[{index}] has content of type {kind[:60]!r}: only text is served")
    return "".join([text or "" for text in texts])


def _tool_call(index: int, call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        raise WrongParameter("messages", f"messages[{index}].tool_calls has a call without function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # A model wrote it: what is no JSON goes to the template as it is.
        with suppress(msgspec.DecodeError, RecursionError, UnicodeError):
            arguments = msgspec.json.decode(arguments)
    return {**call, "function": {**function, "arguments": arguments}}
