"""The fields of a request that are passed on as they came to a target that takes text.

Those that this side answers for itself are left out: the model's name, how the answer comes, and what is accounted to
whom. So are fields that nobody here has heard of: what a server does with them is between it and its own callers.

Pure.
"""

from __future__ import annotations

from typing import Final

import msgspec

from tidegate.text_prompt import MESSAGES, PROMPT, TOOLS, TextPrompt

_PASSED: Final = frozenset(
    {
        MESSAGES, PROMPT, TOOLS, "tool_choice", "parallel_tool_calls", "response_format", "stop", "seed",
        "temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens", "stop_token_ids",
        "ignore_eos", "reasoning_effort", "verbosity", "chat_template_kwargs",
    }
)  # fmt: skip
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def passed_fields(body: bytes) -> TextPrompt:
    """The words of a body that has been parsed before; nothing of the body itself is kept."""
    kept = {name: msgspec.Raw(bytes(raw)) for name, raw in _decode(body).items() if name in _PASSED}
    return TextPrompt({name: raw for name, raw in kept.items() if bytes(raw) != b"null"})
