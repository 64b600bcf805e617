"""`AsyncTidegate`, the client for code on an event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, Self, TypeVar, Unpack

import httpx2
from numpy.typing import ArrayLike

from tidegate import clock
from tidegate.client.answers import CallRecord, EmbeddingsAnswer, InferenceAnswer, TextAnswer
from tidegate.client.event_stream import ChatEvents, LineBuffer
from tidegate.client.exchange import Exchange, Messages, chat_exchange, embed_exchange, infer_exchange
from tidegate.client.options import CallOptions
from tidegate.client.retry_policy import RetryPolicy
from tidegate.client.settings import ClientSettings, OpenCall, named
from tidegate.outcome import ServeError

AnswerT = TypeVar("AnswerT")


class AsyncTidegate:
    """A gateway's endpoint. Close it, or use it in an `async with`. A cancelled call is cancelled at the server too.

    Args:
        url: the gateway's HTTP address.
        api_key: of `tidegate keys create`, where the gateway asks for one.
        budget_s: seconds that a call may take, tries included, unless it says otherwise; None leaves it to the model.
        retry: when a refusal is tried again.
        verify: an `ssl.SSLContext` for a private CA or a client certificate.

    Every call raises a `ServeError` of `tidegate.outcome` where there is no answer.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        budget_s: float | None = None,
        retry: RetryPolicy | None = None,
        verify: Any = None,
    ) -> None:
        self._settings = ClientSettings(url, api_key, budget_s, retry or RetryPolicy())
        self._http = httpx2.AsyncClient(**self._settings.http_settings(verify))

    def __repr__(self) -> str:
        return f"<AsyncTidegate {self._settings.url}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def embed(self, model: str, texts: str | list[str], **options: Unpack[CallOptions]) -> EmbeddingsAnswer:
        """The vectors of texts, in their order."""
        return await self._answer(embed_exchange(model, texts), options)

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        *,
        outputs: Iterable[str] | None = None,
        parameters: Mapping[str, Any] | None = None,
        **options: Unpack[CallOptions],
    ) -> InferenceAnswer:
        """A model's outputs for arrays by name. Lists of floats are sent as float32, texts as BYTES."""
        return await self._answer(infer_exchange(model, inputs, outputs, parameters or {}), options)

    async def chat(
        self,
        model: str,
        messages: Messages,
        *,
        wanted: Mapping[str, Any] | None = None,
        **options: Unpack[CallOptions],
    ) -> TextAnswer:
        """The next text of a conversation. `wanted`: OpenAI's fields, such as `{"max_tokens": 64}`."""
        return await self._answer(chat_exchange(model, messages, wanted or {}), options)

    @asynccontextmanager
    async def stream_chat(
        self,
        model: str,
        messages: Messages,
        *,
        wanted: Mapping[str, Any] | None = None,
        **options: Unpack[CallOptions],
    ) -> AsyncIterator[AsyncTextStream]:
        """The same, part by part as it is written; leaving the block early cancels the rest.

        async with client.stream_chat("smollm2", "Name three colours.") as stream:
            async for text in stream:
                print(text, end="", flush=True)
        """
        streamed = {**(wanted or {}), "stream": True, "stream_options": {"include_usage": True}}
        call = self._settings.call(chat_exchange(model, messages, streamed), options)
        response = await self._opened(call)
        try:
            yield AsyncTextStream(response, call)
        finally:
            await response.aclose()

    async def _answer(self, exchange: Exchange[AnswerT], options: CallOptions) -> AnswerT:
        call = self._settings.call(exchange, options)
        while True:
            try:
                answer: AnswerT = await self._once(call)
            except ServeError as error:
                wait_s = call.wait_s(error)
            else:
                return answer
            await clock.sleep(wait_s)

    async def _opened(self, call: OpenCall) -> httpx2.Response:
        while True:
            try:
                response = await self._sent(call)
                if response.status_code == 200:
                    return response
                async with aclosing(response):
                    call.answer(response.status_code, response.headers, await _body(response, call))
            except ServeError as error:
                wait_s = call.wait_s(error)
            await clock.sleep(wait_s)

    async def _once(self, call: OpenCall) -> Any:
        async with aclosing(await self._sent(call)) as response:
            return call.answer(response.status_code, response.headers, await _body(response, call))

    async def _sent(self, call: OpenCall) -> httpx2.Response:
        try:
            return await self._http.send(call.request(self._http), stream=True)
        except httpx2.HTTPError as error:
            raise named(error, self._settings.url) from error


class AsyncTextStream:
    """A text as it is written: iterate over its parts once. `answer()` is the whole of it afterwards."""

    def __init__(self, response: httpx2.Response, call: OpenCall) -> None:
        self._response = response
        self._call = call
        self._events = ChatEvents(response.headers)

    def __repr__(self) -> str:
        return f"<AsyncTextStream {self._events!r}>"

    @property
    def served(self) -> CallRecord:
        """Where it is written, and all of what happened once it has ended."""
        return self._events.served

    async def __aiter__(self) -> AsyncIterator[str]:
        lines = LineBuffer()
        async for chunk in _chunks(self._response, self._call):
            for line in lines.add(chunk):
                if text := self._events.read(line):
                    yield text

    def answer(self) -> TextAnswer:
        """The whole text, once all parts were read. Raises Disconnected where it was cut."""
        return self._events.answer()


async def _body(response: httpx2.Response, call: OpenCall) -> bytes:
    return b"".join([chunk async for chunk in _chunks(response, call)])


async def _chunks(response: httpx2.Response, call: OpenCall) -> AsyncIterator[bytes]:
    received_bytes = 0
    try:
        async for chunk in response.aiter_bytes():
            received_bytes += len(chunk)
            call.check(received_bytes)
            yield chunk
    except httpx2.HTTPError as error:
        raise named(error, call.settings.url) from error
