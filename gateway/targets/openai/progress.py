"""One answer as it comes: its parts go to the caller's sink, and at the end it is a reply like any other.

What a server makes is held to what was asked for: no more tokens, ids within the vocabulary (`GenerationAnswer` looks
again), texts of a length that so many tokens may have. A stop token is taken off the end of the ids, and ends the
answer also where the server does not know it.

llama-server leaves out the first ids of a character that has several. They are put back by the model's own tokenizer
from the character, as which the server's text shows it: their number and their last one have to be the server's. Where
they are not, since a model may cut a character otherwise than its tokenizer, the ids are those of the tokenizer: the
text is right, and only another target that goes on from there begins behind other ids.

Credit is counted in tokens: `room` says how many more may be read from the server.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Collection
from typing import Final

import msgspec

from gateway.targets.openai.dialect import Part
from tidegate import clock
from tidegate.generate.request import MAX_OUTPUT_TOKENS, MAX_TOKENS_KEY, OUTPUT_IDS, TEXT_OUTPUT, ids_tensor
from tidegate.generate.text.text_side import TextSide
from tidegate.generate.usage import FinishReason, Usage, usage_parameters
from tidegate.outcome import BadAnswer
from tidegate.token_sink import TextDelta, TokenBatch, TokenSink
from tidegate.types import Datatype, InferRequest, InferResponse, Reply, Tensor

_CHARACTERS_PER_TOKEN: Final = 128  # of spaces, where they are a token
_CHARACTERS: Final = 4096  # beside them
_LOST_ROOM: Final = 64


class AnswerProgress:
    """Mutable: `take` each part in order, then `reply`.

    Args:
        text: the model's tokenizer, where ids come.
        stops: ids of which each ends the answer.
        prompt_tokens: as far as this side knows; the server's count outdoes a guess.
        is_exact: whether that is a count.
    """

    def __init__(
        self,
        request: InferRequest,
        sink: TokenSink | None,
        *,
        text: TextSide | None = None,
        stops: Collection[int] = (),
        prompt_tokens: int = 0,
        is_exact: bool = False,
    ) -> None:
        self._request = request
        self._sink = sink
        self._text = text
        self._stops = stops
        self._prompt_tokens, self._is_exact = prompt_tokens, is_exact
        most = request.parameters.get(MAX_TOKENS_KEY, MAX_OUTPUT_TOKENS)
        self._most = most if isinstance(most, int) else MAX_OUTPUT_TOKENS
        self.finish: FinishReason | None = None
        self._ids: list[int] = []
        self._texts: list[str] = []
        self._deltas = 0
        self._characters = 0
        self._cached_tokens = 0
        self._completion_tokens: int | None = None
        self._stop_token = False
        self._asked_at = clock.now()
        self._first_at: float | None = None
        self._last_at = self._asked_at
        self._paused_s = 0.0
        self._room = 1 if sink is None else sink.window
        self._credited: asyncio.Event = asyncio.Event()
        if sink is not None:
            sink.on_credit(self._credit)

    async def take(self, part: Part) -> None:
        """Raises BadAnswer for more than was asked for."""
        self._count(part)
        if self.finish is not None:  # what comes behind the end are counts
            return
        if part.ids or part.lost:
            await self._take_ids(part)
        elif (part.text or part.more is not None) and self._text is None:
            self._take_text(part)
        if part.finish is not None:
            self.finish = part.finish

    async def wait_for_room(self) -> None:
        """Until the reader wants more; meanwhile nothing is read from the server."""
        if self._sink is None or self._room > 0:
            return
        began_at = clock.now()
        while self._room <= 0:
            self._credited.clear()
            await self._credited.wait()
        self._paused_s += clock.now() - began_at

    def reply(self, variant: str, rtt_s: float) -> Reply:
        """The answer. Args: rtt_s: of its time, what the way took."""
        assert self.finish is not None
        first_at = self._last_at if self._first_at is None else self._first_at
        made = len(self._ids) + self._stop_token if self._ids else self._deltas
        usage = Usage(
            self.finish,
            self._prompt_tokens,
            made if self._completion_tokens is None else self._completion_tokens,
            min(self._cached_tokens, self._prompt_tokens),
            max(0.0, first_at - self._asked_at - rtt_s),
            max(0.0, self._last_at - first_at - self._paused_s),
        )
        response = InferResponse(
            self._request.model_name,
            self._request.model_version,
            (self._output(),),
            self._request.id,
            usage_parameters(usage),
        )
        return Reply(response, stages={"compute": usage.prefill_s + usage.decode_s}, variant=variant)

    def _output(self) -> Tensor:
        if self._text is not None:
            return ids_tensor(OUTPUT_IDS, tuple(self._ids))
        text = "".join(self._texts).encode()
        return Tensor(TEXT_OUTPUT, Datatype.BYTES, (1,), struct.pack("<I", len(text)) + text)

    async def _take_ids(self, part: Part) -> None:
        ids = part.ids if not part.lost else await self._restored(part)
        kept = next((at for at, id in enumerate(ids) if id in self._stops), len(ids))
        if kept < len(ids):
            self._stop_token, self.finish = True, "stop"
        if len(self._ids) + kept > self._most:
            raise BadAnswer(f"a generation of more than the {self._most} tokens that were asked for")
        whole = len(part.logprobs) == len(ids)
        if kept:
            first = len(self._ids)
            self._ids += ids[:kept]
            self._put(
                TokenBatch(first, ids[:kept], part.logprobs[:kept] if whole else (), part.top[:kept] if whole else ())
            )

    async def _restored(self, part: Part) -> tuple[int, ...]:
        """The ids of a part of which some were left out."""
        assert self._text is not None
        ids = await self._text.encode(part.text, room=_LOST_ROOM, special=False)
        return ids or part.ids

    def _take_text(self, part: Part) -> None:
        more = 0 if part.more is None else len(msgspec.json.encode(part.more))
        self._characters += len(part.text) + more
        if self._characters > _CHARACTERS + _CHARACTERS_PER_TOKEN * self._most:
            raise BadAnswer(f"a text of more than the {self._most} tokens that were asked for")
        self._texts.append(part.text)
        self._put(TokenBatch(self._deltas, (), deltas=(TextDelta(part.text, part.more),)))
        self._deltas += 1

    def _put(self, batch: TokenBatch) -> None:
        self._last_at = clock.now()
        if self._first_at is None:
            self._first_at = self._last_at
            if self._sink is not None:
                self._sink.started(self._prompt_tokens, self._cached_tokens)
        self._room -= batch.size
        if self._sink is not None:
            self._sink.put(batch)

    def _count(self, part: Part) -> None:
        if part.prompt_tokens is not None and not self._is_exact:
            self._prompt_tokens = part.prompt_tokens
        if part.cached_tokens is not None:
            self._cached_tokens = part.cached_tokens
        if part.completion_tokens is not None:
            self._completion_tokens = min(part.completion_tokens, self._most + 1)

    def _credit(self, tokens: int) -> None:
        self._room += tokens
        self._credited.set()

    def __repr__(self) -> str:
        return f"<AnswerProgress {len(self._ids) or self._deltas} tokens, {self.finish or 'under way'}>"
