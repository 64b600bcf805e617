"""One generation under way, as its front reads it: pieces of text as they come, and at the end why and what it took.

The host is asked in a task that lives as long as the `async with`: a front that leaves, since its caller has gone or
since a stop string ended the text, cancels it down to the engine. Tokens that the final answer has and the stream had
not, as from a target that answers in one piece, come last. A front that wants the whole at once needs no task, and
leaves the gateway free to begin the answer again elsewhere.

A front that writes to a socket `take`s the first pieces and lets the others be handed on to it: its task sleeps until
its caller reads too slowly, or the answer is over.

Each token is one piece, together with those before it that gave no text yet: half a character, or what may be the
beginning of a stop string. Without a text side a batch of tokens is a piece. A target that gives text instead of ids
has a piece for each of its deltas, and its answer has the text once more at the end.

Invariant: the texts of all pieces are the text of the answer; no piece holds a part of a character or of a stop string.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Self

from msgspec.structs import replace

from tidegate.arrays import split_bytes
from tidegate.generate.request import MAX_OUTPUT_TOKENS, MAX_TOKENS_KEY, OUTPUT_IDS, TEXT_OUTPUT, ids_of
from tidegate.generate.text.stop_strings import StopStrings
from tidegate.generate.text.text_side import TextSide
from tidegate.generate.token_stream import TokenStream
from tidegate.generate.usage import STOPPED, Usage, usage_of
from tidegate.oip.guard import Guard, PresentedCredentials
from tidegate.oip.host import ModelHost
from tidegate.oip.reply import reply_parameters, route_words
from tidegate.outcome import BadAnswer, InvalidRequest, ServeError
from tidegate.runtime.owned_task import cancel_and_wait
from tidegate.token_sink import TextDelta, TokenBatch, TopLogprob
from tidegate.types import Call, Reply, Resumed, Route, Tensor


class Piece(NamedTuple):
    """A part of an answer. A text without tokens is what was held back until the end."""

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()  # of each token, where they were asked for
    top: tuple[tuple[TopLogprob, ...], ...] = ()
    more: Mapping[str, Any] | None = None  # beside the text, from a target that gives text


class GenerationAnswer:
    """Enter it, `take` until nothing comes, perhaps with `hand_on` in between, then read `usage` and `words`.

    Args:
        text: None: ids only.
        prompt: its ids.
        stop: stop strings; only with a text side.
        whole: the caller wants the answer in one piece.
    """

    def __init__(
        self,
        host: ModelHost,
        call: Call,
        prompt: Sequence[int],
        text: TextSide | None = None,
        *,
        stop: Sequence[str] = (),
        whole: bool = False,
    ) -> None:
        self.usage: Usage | None = None  # once it has ended
        self.reply: Reply | None = (
            None  # once it has ended; None where a stop string ended it and the host says nothing
        )
        self.call = call
        self._host = host
        words = call.request.text
        self._prompt_tokens = len(prompt) or (0 if words is None else words.about_tokens)
        self._detokenizer = None if text is None else text.detokenizer(prompt)
        self._vocabulary_size = None if text is None else text.generative.vocabulary_size
        self._stop = StopStrings(stop)
        self._has_stops = bool(stop)
        # What comes beside a text (`Piece.more`) is not in the answer at the end.
        at_once = whole and not stop and "logprobs" not in call.request.parameters and not (words and words.has_tools)
        self._stream = None if at_once else TokenStream()
        self._answering: asyncio.Task[Reply] | None = None
        self._failure: ServeError | None = None
        self.route: Route | None = None  # from the first piece on, where the host knows it
        self._resumed = 0  # times that it was gone on with elsewhere, as far as `new_resumed` has said
        self._seen = 0  # tokens, or deltas of text
        self._seen_characters = 0  # of the deltas
        most = call.request.parameters.get(MAX_TOKENS_KEY, MAX_OUTPUT_TOKENS)
        self._most = most if isinstance(most, int) else MAX_OUTPUT_TOKENS  # a target is not trusted to keep to it
        self._held: list[tuple[int, TokenBatch]] = []  # tokens without text so far, as (index, batch)

    async def __aenter__(self) -> Self:
        if (stream := self._stream) is not None:
            call = replace(self.call, tokens=stream, on_begun=self._begun)
            self._answering = asyncio.create_task(self._ask(call), name="generation-answer")
            self._answering.add_done_callback(lambda _: stream.end())
        return self

    async def __aexit__(self, *_: object) -> None:
        answering, self._answering = self._answering, None  # whose error, if it has failed, knows this
        if answering is not None and self.reply is None:  # else it has ended
            await cancel_and_wait(answering, why=None if self.usage is None else STOPPED)

    @property
    def words(self) -> dict[str, str]:
        """Where and why it is answered, as headers; all of it at the end, the route from the first piece on."""
        if self.reply is not None:
            return reply_parameters(self.reply)
        return {} if self.route is None else route_words(self.route)

    @property
    def version(self) -> str:
        """Of the model that answers, as far as that is known."""
        if self.reply is not None:
            return self.reply.response.model_version
        return "" if self.route is None else self.route.version

    async def take(self) -> list[Piece]:
        """What has come since the last time, waiting for the first of it; nothing at the end. Raises ServeError."""
        while self.usage is None:
            batches = [] if self._stream is None else await self._stream.take()
            if self._failure is not None:
                raise self._failure
            pieces = self._pieces(batches) if batches else await self._end()
            if pieces:
                return pieces
        if self.reply is None:
            await self._let_go()
        return []

    async def hand_on(self, write: Callable[[list[Piece]], bool]) -> bool:
        """Give what comes to `write`, a turn of the loop after it came, for as long as that asks for more.

        What is left when it is over is `take`'s. Raises what `write` raises, and BadAnswer.

        Returns:
            Whether nothing more comes this way.
        """
        stream = self._stream
        if stream is None or self.usage is not None:
            return True
        over: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        stream.on_ready(partial(self._hand, stream, write, over))
        try:
            return await over
        finally:
            stream.on_ready(None)
            del over  # an error that it holds knows this frame

    def _hand(self, stream: TokenStream, write: Callable[[list[Piece]], bool], over: asyncio.Future[bool]) -> None:
        if over.done():
            return  # it was due when its reader left
        try:
            if self._failure is None:
                pieces = self._pieces(stream.taken())
                if pieces and not write(pieces):
                    over.set_result(False)
                elif self.usage is None and not stream.has_ended:
                    return  # nearly always
            if not over.done():
                over.set_result(True)
        except Exception as error:
            over.set_exception(error)
        finally:
            del over  # likewise

    def new_resumed(self) -> tuple[Resumed, ...]:
        """What is new of targets that went on with it, once; for a front to say as it comes."""
        if self.route is None or len(self.route.resumed) == self._resumed:
            return ()
        new = self.route.resumed[self._resumed :]
        self._resumed = len(self.route.resumed)
        return new

    def fail(self, error: ServeError) -> None:
        """End it with this error, though it is still being written."""
        self._failure = error
        if self._stream is not None:
            self._stream.end()

    @contextmanager
    def follow(self, guard: Guard, presented: PresentedCredentials) -> Iterator[None]:
        """Meanwhile it ends when its caller's credential is good no more."""
        with guard.follow(presented) as lapse:
            if lapse is None:
                yield
                return
            ending = asyncio.ensure_future(lapse)
            ending.add_done_callback(self._lapsed)
            try:
                yield
            finally:
                ending.remove_done_callback(self._lapsed)
                ending.cancel()

    def _lapsed(self, ending: asyncio.Future[ServeError]) -> None:
        if not ending.cancelled():
            self.fail(ending.result())

    async def whole(self) -> list[Piece]:
        """All of it. Raises ServeError."""
        every: list[Piece] = []
        while pieces := await self.take():
            every += pieces
        return every

    async def _let_go(self) -> None:
        """End what goes on behind a stop string. A gateway has a reply all the same, with all that is said of it."""
        answering, self._answering = self._answering, None
        if answering is None:
            return
        await cancel_and_wait(answering, why=STOPPED)
        if not answering.cancelled() and answering.exception() is None:
            self.reply = answering.result()

    async def _ask(self, call: Call) -> Reply:
        try:
            return await self._host.infer(call)
        except ServeError as error:
            error.without_frames()  # the task keeps it
            raise

    def _begun(self, route: Route) -> None:
        self.route = route

    async def _end(self) -> list[Piece]:
        reply = await (self._host.infer(self.call) if self._answering is None else self._answering)
        usage, rest = usage_of(reply.response), self._rest(reply)
        pieces = self._pieces([rest]) if rest.size else []
        if self.usage is None:  # no stop string in the last ones
            pieces += self._flushed()
        self.reply = reply
        if self.usage is None:
            self.usage = usage
        return pieces

    def _rest(self, reply: Reply) -> TokenBatch:
        """What the answer has that had not come before. Raises BadAnswer."""
        text = next((one for one in reply.response.outputs if one.name == TEXT_OUTPUT), None)
        if text is not None:
            rest = _one_text(text)[self._seen_characters :]
            return TokenBatch(self._seen, (), deltas=(TextDelta(rest),) if rest else ())
        ids = _output_ids(reply)
        if len(ids) < self._seen:
            raise BadAnswer(f"a generation of {len(ids)} tokens of which {self._seen} had come")
        return TokenBatch(self._seen, ids[self._seen :])

    def _pieces(self, batches: Sequence[TokenBatch]) -> list[Piece]:
        pieces: list[Piece] = []
        for batch in batches:
            if batch.deltas:
                pieces += self._text_pieces(batch.deltas)
                if self._stop.is_stopped:
                    return pieces
                continue
            ids = batch.ids
            if self._seen + len(ids) > self._most:
                raise BadAnswer(f"a generation of more than the {self._most} tokens that were asked for")
            if self._detokenizer is None:
                self._seen += len(ids)
                pieces.append(Piece("", ids, batch.logprobs, batch.top))
                continue
            self._check(ids)
            if len(ids) == 1 and not self._held and not self._has_stops:  # nearly always, and a third of the cost
                self._seen += 1
                if text := self._detokenizer.push(ids[0]):
                    pieces.append(Piece(text, ids, batch.logprobs, batch.top))
                else:
                    self._held.append((0, batch))
                continue
            for index, id in enumerate(ids):
                self._seen += 1
                text = self._detokenizer.push(id)
                if self._has_stops:
                    text = self._stop.push(text)
                if text and not self._held:  # most tokens, and spelled out for them
                    at = index + 1
                    pieces.append(Piece(text, (id,), batch.logprobs[index:at], batch.top[index:at]))
                else:
                    self._held.append((index, batch))
                    if text:
                        pieces.append(self._piece(text))
                if self._stop.is_stopped:
                    self._stopped()
                    return pieces
        return pieces

    def _text_pieces(self, deltas: Sequence[TextDelta]) -> list[Piece]:
        pieces: list[Piece] = []
        for delta in deltas:
            self._seen += 1
            self._seen_characters += len(delta.text)
            text = self._stop.push(delta.text)
            if text or delta.more is not None:
                pieces.append(Piece(text, (), more=delta.more))
            if self._stop.is_stopped:
                self._stopped()
                break
        return pieces

    def _check(self, ids: Sequence[int]) -> None:
        """A target is not trusted to stay within the vocabulary."""
        assert self._vocabulary_size is not None
        least, most = (ids[0], ids[0]) if len(ids) == 1 else (min(ids, default=0), max(ids, default=0))
        if not 0 <= least <= most < self._vocabulary_size:
            raise BadAnswer(f"a generation with a token that is not in the vocabulary of {self._vocabulary_size}")

    def _piece(self, text: str) -> Piece:
        held, self._held = self._held, []
        return Piece(
            text,
            tuple([batch.ids[index] for index, batch in held]),
            tuple([one for index, batch in held for one in batch.logprobs[index : index + 1]]),
            tuple([one for index, batch in held for one in batch.top[index : index + 1]]),
        )

    def _flushed(self) -> list[Piece]:
        text = self._stop.push("" if self._detokenizer is None else self._detokenizer.flush())
        if self._stop.is_stopped:
            self._stopped()
        else:
            text += self._stop.flush()
        return [self._piece(text)] if text or self._held else []

    def _stopped(self) -> None:
        """A stop string has come: what the target makes from now on is not wanted."""
        cached = 0 if self._stream is None else self._stream.cached_tokens
        self.usage = Usage("stop", self._prompt_tokens, self._seen, cached)

    def __repr__(self) -> str:
        state = "under way" if self.usage is None else f"ended: {self.usage.finish_reason}"
        return f"<GenerationAnswer {self._prompt_tokens}+{self._seen} tokens, {state}>"


def _one_text(tensor: Tensor) -> str:
    try:
        [text] = split_bytes(tensor.raw, name=tensor.name)
        return text.decode()
    except (InvalidRequest, ValueError) as error:
        raise BadAnswer(f"a generation whose {TEXT_OUTPUT!r} is not one text") from error


def _output_ids(reply: Reply) -> tuple[int, ...]:
    tensor = next((one for one in reply.response.outputs if one.name == OUTPUT_IDS), None)
    if tensor is None:
        raise BadAnswer(f"a generation without the output {OUTPUT_IDS!r}")
    try:
        return ids_of(tensor)
    except InvalidRequest as error:
        raise BadAnswer(error.message) from error
