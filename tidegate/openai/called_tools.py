"""The calls of tools in a model's text, as OpenAI's interface gives them: apart from the text, each with an id.

It stands between the pieces of an answer and the events or the body that is made of them. A piece whose text waits,
since it may be a part of a call, goes with the next one that has something to give, tokens and likelihoods included.
A call is one delta with all of its arguments. What a target of text has read for itself (`Piece.more`) passes.

Decides purely; ids are drawn by `new_id`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from msgspec.structs import replace

from tidegate.generate.text.tool_calls import MAX_CALLS, Dialect, ToolCall, ToolCallReader
from tidegate.generate.usage import Usage
from tidegate.oip.generation.answer import GenerationAnswer, Piece


class CalledTools:
    """Of one answer: `take` of it, or `read` its pieces and the `rest` of them; then it has `ended`.

    Args:
        names: of the tools that the request has.
        parallel: whether several may be called; else the first call alone is given.
    """

    def __init__(
        self, dialect: Dialect, names: Collection[str], *, parallel: bool = True, new_id: Callable[[], str]
    ) -> None:
        self._reader = ToolCallReader(dialect, names, at_most=MAX_CALLS if parallel else 1)
        self._new_id = new_id
        self._index = 0
        self._waiting: list[Piece] = []  # their text has not been given out, or not all of it

    async def take(self, answer: GenerationAnswer) -> list[Piece]:
        """As `GenerationAnswer.take`, of what can be given."""
        while pieces := await answer.take():
            if given := self.read(pieces):
                return given
        return self.rest()

    def read(self, pieces: Sequence[Piece]) -> list[Piece]:
        """What may be given now."""
        given: list[Piece] = []
        for piece in pieces:
            if piece.more is not None:
                given += [*self.rest(), piece]
                continue
            found = self._reader.push(piece.text)
            if found == [piece.text] and not self._waiting:  # most pieces
                given.append(piece)
                continue
            self._waiting.append(piece)
            given += self._given(found)
        return given

    def rest(self) -> list[Piece]:
        """What still waits, at the end of the text."""
        found = self._reader.flush()
        if not found and any(piece.ids for piece in self._waiting):
            found = [""]  # the white space behind a call: tokens are counted, whatever their text
        return self._given(found)

    def ended(self, usage: Usage) -> Usage:
        """How the answer has ended: for calls, unless it was cut."""
        called = self._reader.has_called and usage.finish_reason == "stop"
        return replace(usage, finish_reason="tool_calls") if called else usage

    def _given(self, found: Sequence[str | ToolCall]) -> list[Piece]:
        given: list[Piece] = []
        for one in found:
            waiting, self._waiting = self._waiting, []
            text, more = (one, None) if isinstance(one, str) else ("", {"tool_calls": [self._delta(one)]})
            given.append(
                Piece(
                    text,
                    tuple([id for piece in waiting for id in piece.ids]),
                    tuple([logprob for piece in waiting for logprob in piece.logprobs]),
                    tuple([top for piece in waiting for top in piece.top]),
                    more,
                )
            )
        return given

    def _delta(self, call: ToolCall) -> dict[str, Any]:
        index, self._index = self._index, self._index + 1
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": index, "id": self._new_id(), "type": "function", "function": function}

    def __repr__(self) -> str:
        return f"<CalledTools {self._reader!r}>"


def tool_names(tools: Sequence[Any]) -> frozenset[str]:
    """The names of a request's tools: of OpenAI's form, and of the bare functions that some clients send."""
    found = set()
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, dict) and isinstance(name := function.get("name"), str):
            found.add(name)
    return frozenset(found)
