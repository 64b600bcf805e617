"""One answer of the server, checked token by token against what was asked for.

The server is not trusted: ids that the vocabulary lacks, more tokens than were asked for, a stop that no stop token
made, log-probabilities of other tokens, a count that is not that of the tokens that came, or a stream that ends before
its end, each is an UnexpectedMessage. Its tokens until then are good, and have gone out.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nlargest
from math import isfinite

from cloud_pool.vllm.wire import ChosenToken, ServerFault, StreamChoice, StreamUsage, read_event
from tidegate.generate.engine import SequenceProgress
from tidegate.generate.usage import FinishReason
from tidegate.token_sink import TokenBatch, TopLogprob
from tidegate.workers.generation.messages import UnexpectedMessage


class ServerRefused(Exception):
    """The server has ended an answer with an error, in its own words."""

    def __init__(self, fault: ServerFault) -> None:
        super().__init__(fault.message)
        self.fault = fault


class VllmAnswer:
    """Mutable: `take` each event, and `end` at the end of the stream.

    Args:
        id: of its sequence.
        logprobs: as of a `GenerateRequest`.
        stop_tokens: those that may end it.
        vocabulary_size: ids are below it.
    """

    def __init__(
        self,
        id: int,
        *,
        prompt_tokens: int,
        max_tokens: int,
        logprobs: int | None,
        stop_tokens: Iterable[int],
        vocabulary_size: int,
    ) -> None:
        self._id = id
        self._prompt_tokens = prompt_tokens
        self._max_tokens = max_tokens
        self._logprobs = logprobs
        self._stop_tokens = frozenset(stop_tokens)
        self._vocabulary_size = vocabulary_size
        self._made = 0  # tokens, without the stop token
        self._finished: FinishReason | None = None
        self._stop_token = False
        self._usage_seen = False

    def take(self, payload: bytes) -> SequenceProgress | None:
        """What an event says; None where that is nothing. Raises UnexpectedMessage, ServerRefused."""
        event = read_event(payload)
        if event.error is not None:
            raise ServerRefused(event.error)
        if self._usage_seen or len(event.choices) > 1:
            raise UnexpectedMessage("an event after the last one, or of two answers")
        if event.choices:
            return self._tokens(event.choices[0])
        if event.usage is None:
            raise UnexpectedMessage("an event of nothing")
        return self._end(event.usage)

    def end(self, *, done: bool) -> None:
        """The stream has ended; `done`: after it said so. Raises UnexpectedMessage where something is missing."""
        if not (done and self._usage_seen):
            raise UnexpectedMessage(f"the end of a stream after {self._made} tokens, without saying so")

    def _tokens(self, choice: StreamChoice) -> SequenceProgress | None:
        ids = choice.token_ids or ()
        if self._finished is not None or choice.index != 0:
            raise UnexpectedMessage("tokens after the end of an answer, or of another one")
        if ids and max(ids) >= self._vocabulary_size:
            raise UnexpectedMessage(f"token {max(ids)}: the model's vocabulary has {self._vocabulary_size}")
        if self._made + len(ids) > self._max_tokens:
            raise UnexpectedMessage(f"{self._made + len(ids)} tokens, where at most {self._max_tokens} were asked for")
        chosen = self._chosen(choice, ids)
        if choice.finish_reason is not None:
            self._finish(choice.finish_reason, ids)
        if self._stop_token:
            ids, chosen = ids[:-1], chosen[:-1]
        if not ids:
            return None
        first, self._made = self._made, self._made + len(ids)
        top = tuple(self._likeliest(one) for one in chosen) if self._logprobs else ()
        return SequenceProgress(self._id, TokenBatch(first, ids, tuple(one.logprob for one in chosen), top))

    def _finish(self, reason: str, ids: tuple[int, ...]) -> None:
        if reason == "stop" and ids and ids[-1] in self._stop_tokens:
            self._finished, self._stop_token = "stop", True
        elif reason == "length":
            self._finished = "length"
        else:
            raise UnexpectedMessage(f"an end for {reason!r}, with {ids[-1:]} as the last token")

    def _chosen(self, choice: StreamChoice, ids: tuple[int, ...]) -> tuple[ChosenToken, ...]:
        """Log-probabilities of the tokens, where they were asked for."""
        if self._logprobs is None:
            return ()
        chosen = (choice.logprobs.content or ()) if choice.logprobs is not None else ()
        if tuple(one.token_id for one in chosen) != ids or not all(isfinite(one.logprob) for one in chosen):
            raise UnexpectedMessage("log-probabilities that are not of the tokens beside them")
        return chosen

    def _likeliest(self, chosen: ChosenToken) -> tuple[TopLogprob, ...]:
        likely = [one for one in chosen.top_logprobs if one.token_id < self._vocabulary_size and isfinite(one.logprob)]
        most = nlargest(self._logprobs or 0, likely, key=lambda one: one.logprob)
        return tuple(TopLogprob(one.token_id, one.logprob) for one in most)

    def _end(self, usage: StreamUsage) -> SequenceProgress:
        if self._finished is None:
            raise UnexpectedMessage(f"an end after {self._made} tokens, without a reason")
        self._usage_seen = True
        if (completion := usage.completion_tokens) != self._made + self._stop_token:
            raise UnexpectedMessage(f"a count of {completion} tokens, of which {self._made + self._stop_token} came")
        cached = (usage.prompt_tokens_details.cached_tokens or 0) if usage.prompt_tokens_details is not None else 0
        if usage.prompt_tokens != self._prompt_tokens or cached > self._prompt_tokens:
            raise UnexpectedMessage(f"a prompt of {usage.prompt_tokens} tokens: there were {self._prompt_tokens}")
        return SequenceProgress(self._id, None, cached, self._finished, stop_token=self._stop_token)

    def __repr__(self) -> str:
        return f"<VllmAnswer {self._made} of {self._max_tokens} tokens>"
