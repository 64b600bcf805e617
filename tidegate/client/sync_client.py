"""`Tidegate`, the client for code that blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
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


class Tidegate:
    """A gateway's endpoint. Safe to share between threads; close it, or use it in a `with`.

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
        self._http = httpx2.Client(**self._settings.http_settings(verify))

    def __repr__(self) -> str:
        return f"<Tidegate {self._settings.url}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def embed(self, model: str, texts: str | list[str], **options: Unpack[CallOptions]) -> EmbeddingsAnswer:
        """The vectors of texts, in their order."""
        return self._answer(embed_exchange(model, texts), options)

    def infer(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        *,
        outputs: Iterable[str] | None = None,
        parameters: Mapping[str, Any] | None = None,
        **options: Unpack[CallOptions],
    ) -> InferenceAnswer:
        """A model's outputs for arrays by name. Lists of floats are sent as float32, texts as BYTES."""
        return self._answer(infer_exchange(model, inputs, outputs, parameters or {}), options)

    def chat(
        self,
        model: str,
        messages: Messages,
        *,
        wanted: Mapping[str, Any] | None = None,
        **options: Unpack[CallOptions],
    ) -> TextAnswer:
        """The next text of a conversation. `wanted`: OpenAI's fields, such as `{"max_tokens": 64}`."""
        return self._answer(chat_exchange(model, messages, wanted or {}), options)

    @contextmanager
    def stream_chat(
        self,
        model: str,
        messages: Messages,
        *,
        wanted: Mapping[str, Any] | None = None,
        **options: Unpack[CallOptions],
    ) -> Iterator[TextStream]:
        """The same, part by part as it is written; leaving the block early cancels the rest.

        with client.stream_chat("smollm2", "Name three colours.") as stream:
            for text in stream:
                print(text, end="", flush=True)
        """
        streamed = {**(wanted or {}), "stream": True, "stream_options": {"include_usage": True}}
        call = self._settings.call(chat_exchange(model, messages, streamed), options)
        response = self._opened(call)
        try:
            yield TextStream(response, call)
        finally:
            response.close()

    def _answer(self, exchange: Exchange[AnswerT], options: CallOptions) -> AnswerT:
        call = self._settings.call(exchange, options)
        while True:
            try:
                answer: AnswerT = self._once(call)
            except ServeError as error:
                wait_s = call.wait_s(error)
            else:
                return answer
            clock.block_until(clock.now() + wait_s)

    def _opened(self, call: OpenCall) -> httpx2.Response:
        while True:
            try:
                response = self._sent(call)
                if response.status_code == 200:
                    return response
                with closing(response):
                    call.answer(response.status_code, response.headers, _body(response, call))
            except ServeError as error:
                wait_s = call.wait_s(error)
            clock.block_until(clock.now() + wait_s)

    def _once(self, call: OpenCall) -> Any:
        with closing(self._sent(call)) as response:
            return call.answer(response.status_code, response.headers, _body(response, call))

    def _sent(self, call: OpenCall) -> httpx2.Response:
        try:
            return self._http.send(call.request(self._http), stream=True)
        except httpx2.HTTPError as error:
            raise named(error, self._settings.url) from error


class TextStream:
    """A text as it is written: iterate over its parts once. `answer()` is the whole of it afterwards."""

    def __init__(self, response: httpx2.Response, call: OpenCall) -> None:
        self._response = response
        self._call = call
        self._events = ChatEvents(response.headers)

    def __repr__(self) -> str:
        return f"<TextStream {self._events!r}>"

    @property
    def served(self) -> CallRecord:
        """Where it is written, and all of what happened once it has ended."""
        return self._events.served

    def __iter__(self) -> Iterator[str]:
        lines = LineBuffer()
        for chunk in _chunks(self._response, self._call):
            for line in lines.add(chunk):
                if text := self._events.read(line):
                    yield text

    def answer(self) -> TextAnswer:
        """The whole text, once all parts were read. Raises Disconnected where it was cut."""
        return self._events.answer()


def _body(response: httpx2.Response, call: OpenCall) -> bytes:
    return b"".join(_chunks(response, call))


def _chunks(response: httpx2.Response, call: OpenCall) -> Iterator[bytes]:
    received_bytes = 0
    try:
        for chunk in response.iter_bytes():
            received_bytes += len(chunk)
            call.check(received_bytes)
            yield chunk
    except httpx2.HTTPError as error:
        raise named(error, call.settings.url) from error
