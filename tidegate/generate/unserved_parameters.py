"""What a generation may be asked for elsewhere and not here, by the names that OpenAI, vLLM and Triton's backends have.

Each would change the answer: to pass one by would give a text that its caller takes for the one that was asked for. So
it is refused by name, unless its value asks for nothing, as clients send that spell out every field.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_ONE_IS_NOTHING: Final = frozenset({"n", "best_of", "beam_width", "repetition_penalty", "length_penalty"})
UNSERVED: Final = _ONE_IS_NOTHING | {
    "bad_words", "echo", "frequency_penalty", "guided_choice", "guided_grammar", "guided_json", "guided_regex",
    "logit_bias", "min_length", "min_tokens", "presence_penalty", "stop_words", "structured_outputs", "suffix",
    "use_beam_search",
}  # fmt: skip


def unserved_name(asked: Mapping[str, object]) -> str | None:
    """The name of the first that asks for anything; None where none does."""
    return next((name for name, value in asked.items() if name in UNSERVED and _asks(name, value)), None)


def _asks(name: str, value: object) -> bool:
    return value not in (None, 1) if name in _ONE_IS_NOTHING else bool(value)
