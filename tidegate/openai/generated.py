"""The bodies of chat completions and completions, whole and as events of a stream.

An event of one token is most of what a gateway writes, so all of it but the text is made once a stream: a token costs
the encoding of its text and one joining of bytes.

Pure.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from tidegate.generate.text.token_text import TokenText
from tidegate.generate.usage import Usage
from tidegate.oip.generation.answer import Piece
from tidegate.openai.deltas import merged_deltas
from tidegate.token_sink import TopLogprob

DONE: Final = b"data: [DONE]\n\n"
_SLOT: Final = "\u0000text\u0000"  # stands for the text in an event that is made beforehand; no model's name has it

_encode = msgspec.json.Encoder().encode

_characters = codecs.getincrementaldecoder("utf-8")
TokenTextOf = Callable[[int], TokenText]


class AnswerForm(Protocol):
    """How one of the two interfaces says things."""

    kind: str  # of a whole answer
    chunk_kind: str
    id_prefix: str

    def opening(self) -> dict[str, Any] | None:
        """The choice of a first event without text; None where there is none."""
        ...

    def delta(self, text: str, logprobs: Any, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The choice of an event. Args: more: what a target of text gave beside it."""
        ...

    def end(self, finish_reason: str) -> dict[str, Any]:
        """The choice of the last event."""
        ...

    def choice(self, text: str, logprobs: Any, finish_reason: str, more: Mapping[str, Any]) -> dict[str, Any]:
        """The choice of a whole answer. Args: more: what a target of text gave beside it, all of it."""
        ...

    def logprobs(self, pieces: Sequence[Piece], token_text: TokenTextOf, offset: int) -> Any:
        """Those of these pieces, of which the first begins `offset` characters into the text."""
        ...


class ChatForm:
    """An `AnswerForm`."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def opening(self) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, text: str, logprobs: Any, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
        delta = {"content": text} if more is None else {**({"content": text} if text else {}), **more}
        return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def end(self, finish_reason: str) -> dict[str, Any]:
        return {"index": 0, "delta": {}, "logprobs": None, "finish_reason": finish_reason}

    def choice(self, text: str, logprobs: Any, finish_reason: str, more: Mapping[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", "content": text or (None if more else ""), "refusal": None, **more}
        return {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}

    def logprobs(self, pieces: Sequence[Piece], token_text: TokenTextOf, offset: int) -> Any:
        return {"content": [
            {
                **_likelihood(token_text(id), logprob),
                "top_logprobs": [_likelihood(token_text(other), likely) for other, likely in top],
            }
            for id, logprob, top in _tokens(pieces)
        ]}  # fmt: skip

    def __repr__(self) -> str:
        return "<ChatForm>"


class CompletionForm:
    """An `AnswerForm`."""

    kind = "text_completion"
    chunk_kind = "text_completion"
    id_prefix = "cmpl-"

    def opening(self) -> dict[str, Any] | None:
        return None

    def delta(self, text: str, logprobs: Any, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": None}

    def end(self, finish_reason: str) -> dict[str, Any]:
        return {"index": 0, "text": "", "logprobs": None, "finish_reason": finish_reason}

    def choice(self, text: str, logprobs: Any, finish_reason: str, more: Mapping[str, Any]) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def logprobs(self, pieces: Sequence[Piece], token_text: TokenTextOf, offset: int) -> Any:
        tokens, offsets = _tokens(pieces), []
        for piece in pieces:
            offsets += _offsets(piece, token_text, offset)
            offset += len(piece.text)
        return {
            "tokens": [_key(token_text(id)) for id, _, _ in tokens],
            "token_logprobs": [logprob for _, logprob, _ in tokens],
            "top_logprobs": [_by_key(top, token_text) for _, _, top in tokens],
            "text_offset": offsets,
        }

    def __repr__(self) -> str:
        return "<CompletionForm>"


class Events:
    """The events of one stream.

    Args:
        head: the fields that all events share: id, model, when it was made.
        token_text: where logprobs were asked for, the text of a token by itself.
        include_usage: whether the last event before the end says what was used, and the others that it is to come.
        prompt_tokens: for usage with every event; None: not asked for.
    """

    def __init__(
        self,
        form: AnswerForm,
        head: Mapping[str, Any],
        *,
        token_text: TokenTextOf | None = None,
        include_usage: bool = False,
        prompt_tokens: int | None = None,
    ) -> None:
        self._form = form
        self._head = {**head, "object": form.chunk_kind}
        self._token_text = token_text
        self._include_usage = include_usage
        self._prompt_tokens = prompt_tokens
        self._tokens = 0
        self._has_ids = False  # whether what answers gives ids, so that tokens are counted and not guessed
        self._characters = 0
        before, _, after = self._event(form.delta(_SLOT, None)).partition(_encode(_SLOT))
        self._before, self._after = before, after

    def opening(self) -> bytes:
        choice = self._form.opening()
        return b"" if choice is None else self._event(choice)

    def pieces(self, pieces: Sequence[Piece]) -> bytes:
        """One event a piece."""
        if self._token_text is None and self._prompt_tokens is None:
            before, after = self._before, self._after
            if len(pieces) == 1 and pieces[0].more is None:  # nearly always
                return b"%b%b%b" % (before, _encode(pieces[0].text), after)
            return b"".join(
                [
                    b"%b%b%b" % (before, _encode(piece.text), after)
                    if piece.more is None
                    else self._event(self._form.delta(piece.text, None, piece.more))
                    for piece in pieces
                ]
            )
        return b"".join([self._full_event(piece) for piece in pieces])

    def end(self, usage: Usage, words: Mapping[str, str]) -> bytes:
        """The last events. `words` say where it was made, in a field that OpenAI's clients pass by."""
        last = self._event(self._form.end(usage.finish_reason), tidegate=words)
        if self._include_usage:
            last += _as_event({**self._head, "choices": [], "usage": usage_body(usage)})
        return last + DONE

    def _full_event(self, piece: Piece) -> bytes:
        # Without ids a piece is about a token of a target of text, but nothing new where tokens are known: the end of
        # a text that was held back for a stop string, or what followed a call of a tool in one token.
        self._has_ids = self._has_ids or bool(piece.ids)
        self._tokens += len(piece.ids) if self._has_ids else 1
        logprobs = None
        if self._token_text is not None:
            logprobs = self._form.logprobs([piece], self._token_text, self._characters)
        self._characters += len(piece.text)
        more = {}
        if self._prompt_tokens is not None:
            more["usage"] = usage_body(Usage("stop", self._prompt_tokens, self._tokens))
        return self._event(self._form.delta(piece.text, logprobs, piece.more), **more)

    def _event(self, choice: Mapping[str, Any], **more: Any) -> bytes:
        usage = {"usage": None} if self._include_usage else {}
        return _as_event({**self._head, "choices": [choice], **usage, **more})

    def __repr__(self) -> str:
        return f"<Events of {self._form!r}>"


def error_event(body: Mapping[str, Any]) -> bytes:
    """The last event of a stream that breaks off."""
    return _as_event(body)


def whole_body(
    form: AnswerForm,
    head: Mapping[str, Any],
    pieces: Sequence[Piece],
    usage: Usage,
    words: Mapping[str, str],
    *,
    token_text: TokenTextOf | None = None,
) -> dict[str, Any]:
    """The body of an answer that is given at once."""
    logprobs = None if token_text is None else form.logprobs(pieces, token_text, 0)
    text = "".join([piece.text for piece in pieces])
    return {
        **head,
        "object": form.kind,
        "choices": [form.choice(text, logprobs, usage.finish_reason, merged_deltas([piece.more for piece in pieces]))],
        "usage": usage_body(usage),
        "tidegate": dict(words),
    }


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _as_event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


def _tokens(pieces: Sequence[Piece]) -> list[tuple[int, float, tuple[TopLogprob, ...]]]:
    """Each token with what was said of it; a target that says nothing says that it was certain."""
    found = []
    for piece in pieces:
        for index, id in enumerate(piece.ids):
            logprob = piece.logprobs[index] if index < len(piece.logprobs) else 0.0
            found.append((id, logprob, piece.top[index] if index < len(piece.top) else ()))
    return found


def _offsets(piece: Piece, token_text: TokenTextOf, offset: int) -> list[int]:
    """Where each token of a piece begins in the text, in characters.

    Tokens may have more text than their piece: a stop string, or a special token. They begin at its end at the latest.
    """
    if len(piece.ids) == 1:  # nearly always
        return [offset]
    reader, begun, found = _characters("replace"), 0, []
    for id in piece.ids:
        found.append(offset + min(begun, len(piece.text)))
        begun += len(reader.decode(token_text(id).raw))
    return found


def _key(token: TokenText) -> str:
    """A token as completions name it, so that no two parts of characters have one name."""
    return token.spelled if token.is_whole else f"bytes:{token.spelled}"


def _by_key(top: Sequence[TopLogprob], token_text: TokenTextOf) -> dict[str, float]:
    found: dict[str, float] = {}
    for id, logprob in top:
        key = _key(token_text(id))
        found[key] = max(logprob, found.get(key, logprob))  # of two that are spelled alike, the likelier
    return found


def _likelihood(token: TokenText, logprob: float) -> dict[str, Any]:
    return {"token": token.spelled, "logprob": logprob, "bytes": list(token.raw)}
