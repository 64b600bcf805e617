"""A generation in its caller's own words, for a target that takes text and gives text.

Most targets of a generation take token ids. Another maker's server may take text only, and then what the caller sent
is passed on as it came: a conversation stays a list of messages, for the server's own chat template, and the fields
beside it keep their spelling. So a request may have two forms, ids and words, and whichever target it is placed on
takes the one that it can read. Words never travel on a link of our own.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

MESSAGES = "messages"
PROMPT = "prompt"
TOOLS = "tools"
_CHARACTERS_PER_TOKEN = 4  # of English, about


class TextPrompt(msgspec.Struct, frozen=True):
    """The words of one generation.

    Args:
        fields: of OpenAI's request body, each as the JSON that came; `messages` makes it a chat, `prompt` a completion.
        begun: the beginning of the answer, which the caller has already; a target has to go on behind it.
    """

    fields: Mapping[str, msgspec.Raw]
    begun: str = ""

    @property
    def is_chat(self) -> bool:
        return MESSAGES in self.fields

    @property
    def has_tools(self) -> bool:
        return TOOLS in self.fields

    @property
    def about_tokens(self) -> int:
        """How many tokens the prompt has, about: only the server that answers knows."""
        raw = self.fields.get(MESSAGES) or self.fields.get(PROMPT) or msgspec.Raw()
        return -(-len(bytes(raw)) // _CHARACTERS_PER_TOKEN)

    def __repr__(self) -> str:
        return f"<TextPrompt {'chat' if self.is_chat else 'completion'} of about {self.about_tokens} tokens>"
