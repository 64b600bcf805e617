"""OpenAI's interface to generating models: text in, text out, at once or token by token.

    POST /v1/chat/completions
    POST /v1/completions

A request is refused in JSON, with its status, as long as nothing of the answer has been sent; so the headers of a
stream leave with its first token, and name the target that answers. What goes wrong later is an event of the stream,
which then ends without `[DONE]`. Whatever has come since the last write goes in one write, each token as an event of
its own: load generators count events as tokens. Calls of tools in the text are given as such (`called_tools.py`).

A stream's budget is that of the whole answer. The read timeout that OpenAI's SDK announces bounds the silence between
two bytes, so of a stream it bounds the first token and each further one (`tidegate/oip/token_budgets.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from secrets import token_hex
from typing import Any, Final, NamedTuple

from aiohttp import web
from msgspec.structs import replace

from tidegate import clock
from tidegate.generate.request import infer_request, words_request
from tidegate.generate.text.text_models import TextModel, TextModels
from tidegate.generate.text.text_side import PromptTooLong, check_room
from tidegate.models.manifest import Manifest
from tidegate.oip.body_budget import BodyLimits, BodyMemory
from tidegate.oip.call import call_of, kept_headers
from tidegate.oip.content_limits import ContentLimits
from tidegate.oip.generation.answer import GenerationAnswer, Piece
from tidegate.oip.generation.bounds import check_words, prompt_room
from tidegate.oip.guard import Guard
from tidegate.oip.host import ModelHost
from tidegate.oip.http.body import read_body
from tidegate.oip.http.event_stream import EventStream, resumed_comments
from tidegate.oip.http.guard import credentials_over_http
from tidegate.oip.http.json_bounds import check_prompt_json
from tidegate.oip.http.responses import RefusalObserver, json_response
from tidegate.oip.offload import CodecThreads
from tidegate.oip.request_constraints import DEFER_KEY, VERSION_KEY, defer_of, version_of
from tidegate.oip.unknown_headers import WARNING_KEY, warn_of_unknown
from tidegate.openai import chat, completions
from tidegate.openai.called_tools import CalledTools, tool_names
from tidegate.openai.chat import ChatRequest
from tidegate.openai.completions import CompletionRequest
from tidegate.openai.errors import error_body, in_openais_form
from tidegate.openai.generated import AnswerForm, ChatForm, CompletionForm, Events, error_event, whole_body
from tidegate.openai.generation_fields import GenerationOptions, generate_request
from tidegate.openai.request_id import with_request_id
from tidegate.openai.wrong_parameter import WrongParameter
from tidegate.outcome import NotSupported, ServeError
from tidegate.trace_context import PARENT_KEY
from tidegate.types import Call, InferRequest

PROTOCOL: Final = "openai"

_CHAT: Final = ChatForm()
_COMPLETION: Final = CompletionForm()
# A value as Python's objects: a call of a tool is several dicts, in the form that came and in that of templates.
_VALUE_BYTES: Final = 512


class GenerationRoutes:
    """The handlers over what the guard gives each caller.

    Args:
        on_refused: called with (protocol, model name, error) for each request refused here, before the host saw it.
        held: the memory budget for large bodies, shared with other protocols.
        aside: the threads for large bodies, shared with the other routes of the protocol.
    """

    def __init__(
        self,
        guard: Guard,
        texts: TextModels,
        *,
        max_body_bytes: int,
        limits: ContentLimits,
        body_limits: BodyLimits,
        held: BodyMemory,
        aside: CodecThreads,
        on_refused: RefusalObserver | None = None,
    ) -> None:
        self._guard = guard
        self._texts = texts
        self._max_body_bytes = max_body_bytes
        self._limits = limits
        self._body_limits = body_limits
        self._held = held
        self._aside = aside
        self._on_refused = on_refused

    def __repr__(self) -> str:
        return f"<GenerationRoutes {self._guard!r} {self._texts!r}>"

    def table(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/chat/completions", in_openais_form(self.chat)),
            web.post("/v1/completions", in_openais_form(self.complete)),
        ]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, _chat, self._chat_prompt, _CHAT)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, _completion, self._completion_prompt, _COMPLETION)

    async def _answer(
        self, request: web.Request, parse: _Parse, prompt_of: _PromptOf, form: AnswerForm
    ) -> web.StreamResponse:
        asked = await self._asked(request, parse, prompt_of)
        options = asked.options
        head = {
            "id": form.id_prefix + token_hex(12),
            "created": int(clock.utc_s()),
            "model": options.model,
        }
        token_text = None if options.logprobs is None or asked.text is None else asked.text.token_text
        async with GenerationAnswer(
            asked.host, asked.call, asked.prompt, asked.text, stop=options.stop, whole=not options.stream
        ) as answer:
            if options.stream:
                events = Events(
                    form,
                    head,
                    token_text=token_text,
                    include_usage=options.include_usage,
                    prompt_tokens=len(asked.prompt) if options.continuous_usage and asked.prompt else None,
                )
                return await self._stream(request, answer, asked.called, events, asked.without_effect)
            pieces = await answer.whole()
            assert answer.usage is not None
            words, usage = _words(answer, asked.without_effect), answer.usage
            if asked.called is not None:
                pieces, usage = asked.called.read(pieces) + asked.called.rest(), asked.called.ended(usage)
            body = whole_body(form, head, pieces, usage, words, token_text=token_text)
            return json_response(body, headers=with_request_id(words))

    async def _stream(
        self,
        request: web.Request,
        answer: GenerationAnswer,
        called: CalledTools | None,
        events: Events,
        without_effect: str,
    ) -> web.StreamResponse:
        pieces = await _take(answer, called)  # whatever is wrong until here is answered in JSON
        stream = EventStream(request, stall_s=self._body_limits.stall_s)
        try:
            with answer.follow(self._guard, credentials_over_http(request, PROTOCOL)):
                await stream.begin(_words(answer, without_effect))
                await self._write(stream, answer, called, events, pieces)
                await stream.end()
        except ConnectionError:  # the caller has left: leaving `answer` cancels what is under way
            pass
        return stream.response

    async def _write(
        self,
        stream: EventStream,
        answer: GenerationAnswer,
        called: CalledTools | None,
        events: Events,
        pieces: list[Piece],
    ) -> None:
        def push(pieces: list[Piece]) -> bool:
            given = pieces if called is None else called.read(pieces)
            if not given:
                return True
            told, new_resumed = events.pieces(given), answer.new_resumed()
            return stream.push(resumed_comments(new_resumed) + told if new_resumed else told)

        written = events.opening()
        try:
            while pieces:
                await stream.write(written + resumed_comments(answer.new_resumed()) + events.pieces(pieces))
                written = b""
                while not await answer.hand_on(push):
                    await stream.drain()
                pieces = await _take(answer, called)
        except ConnectionError:
            raise
        except Exception as error:
            await stream.write(written + error_event(error_body(error)))
            return
        assert answer.usage is not None
        written += resumed_comments(answer.new_resumed())
        usage = answer.usage if called is None else called.ended(answer.usage)
        await stream.write(written + events.end(usage, answer.words))

    async def _asked(self, request: web.Request, parse: _Parse, prompt_of: _PromptOf) -> _Asked:
        """The checked request. Nothing of its body is held any more when it returns."""
        arrived_at, name = clock.now(), ""
        try:
            host = await self._guard.admit(credentials_over_http(request, PROTOCOL))
            with self._held.share() as share:
                most_bytes = min(self._max_body_bytes, self._limits.max_prompt_bytes)
                body = await read_body(request, most_bytes, limits=self._body_limits, share=share)
                asked, values = await self._aside.run(len(body), partial(parse, body, self._limits))
                share.grow(len(body) + values * _VALUE_BYTES)
                name = asked.options.model
                headers = kept_headers(request.headers.items())
                if defer_of(headers, {}):
                    raise NotSupported(f"{DEFER_KEY}: a ticket is for one inference; use /v2/models/NAME/infer")
                manifest = _manifest(host, name, version_of(headers, {}))
                text: TextModel | None = None
                prompt: tuple[int, ...] = ()
                if manifest.generative is not None and not manifest.generative.is_text_only:
                    text = await self._texts.of(manifest)
                    prompt = await prompt_of(asked, text)
            if text is None:
                wanted = _in_words(asked, manifest, self._limits)
            else:
                wanted = _in_ids(asked, prompt, text, self._limits)
            call = call_of(
                wanted,
                manifest,
                protocol=PROTOCOL,
                headers=headers,
                arrived_at=arrived_at,
                streamed=asked.options.stream,
            )
        except ServeError as error:
            if self._on_refused is not None:
                self._on_refused(PROTOCOL, name, error)
            raise
        return _Asked(
            asked.options,
            host,
            call,
            prompt,
            text,
            called=_called(asked, text),
            without_effect=_without_effect(asked, text),
        )

    async def _chat_prompt(self, asked: ChatRequest, text: TextModel) -> tuple[int, ...]:
        values: dict[str, Any] = {}
        if asked.tools:
            if not text.takes_tools:
                raise WrongParameter("tools", f"the chat template of model {asked.options.model!r} has no tools")
            values["tools"] = asked.tools
        values |= {name: value for name, value in asked.variables.items() if text.takes(name)}
        try:
            return await text.chat_prompt(asked.messages, values, room=prompt_room(text.generative, self._limits))
        except PromptTooLong:
            raise
        except NotSupported as error:
            raise WrongParameter("model", error.message) from error

    async def _completion_prompt(self, asked: CompletionRequest, text: TextModel) -> tuple[int, ...]:
        room = prompt_room(text.generative, self._limits)
        if isinstance(asked.prompt, str):
            prompt = await text.encode(asked.prompt, room=room)
            if not prompt:
                raise WrongParameter("prompt", "prompt has no token")
            return prompt
        check_room(len(asked.prompt), room)
        if max(asked.prompt) >= text.generative.vocabulary_size:
            raise WrongParameter(
                "prompt", f"prompt has a token that is not in the vocabulary of {text.generative.vocabulary_size}"
            )
        return asked.prompt


class _Asked(NamedTuple):
    """A request that may be answered."""

    options: GenerationOptions
    host: ModelHost
    call: Call
    prompt: tuple[int, ...]  # () of a model whose tokens are not known here
    text: TextModel | None
    called: CalledTools | None
    without_effect: str  # fields that the model's template does not take, "" for none


_Parse = Callable[[bytes, ContentLimits], tuple[Any, int]]
_PromptOf = Callable[[Any, TextModel], Awaitable[tuple[int, ...]]]


def _chat(body: bytes, limits: ContentLimits) -> tuple[ChatRequest, int]:
    """The request in a body, and the most values that it is made of."""
    values = check_prompt_json(body, limits)
    return chat.parse(body), values


def _completion(body: bytes, limits: ContentLimits) -> tuple[CompletionRequest, int]:
    """As `_chat`. Its many values can only be token ids, which are small."""
    check_prompt_json(body, limits, ids=True)
    return completions.parse(body), 0


def _called(asked: ChatRequest | CompletionRequest, text: TextModel | None) -> CalledTools | None:
    """What reads the calls of tools in an answer; None where there can be none."""
    if text is None or isinstance(asked, CompletionRequest) or not asked.tools:
        return None
    dialect, names = text.tool_dialect, tool_names(asked.tools)
    if dialect is None:
        return None
    return CalledTools(dialect, names, parallel=asked.parallel_calls, new_id=lambda: f"call_{token_hex(12)}")


async def _take(answer: GenerationAnswer, called: CalledTools | None) -> list[Piece]:
    return await (answer.take() if called is None else called.take(answer))


def _in_ids(
    asked: ChatRequest | CompletionRequest, prompt: tuple[int, ...], text: TextModel, limits: ContentLimits
) -> InferRequest:
    """The request in token ids, with its words beside them if a target that takes text would answer the same.

    It would for a chat, which has messages for any server's template. A bare completion it might put into a template as
    well, and of ids, or of likelihoods that are asked for, it knows nothing.
    """
    options = asked.options
    wanted = infer_request(options.model, generate_request(options, prompt, text.generative, limits))
    of_ids = options.logprobs is not None or options.stop_tokens or options.ignore_stop
    return wanted if of_ids or isinstance(asked, CompletionRequest) else replace(wanted, text=asked.words)


def _in_words(asked: ChatRequest | CompletionRequest, manifest: Manifest, limits: ContentLimits) -> InferRequest:
    """The request to a model whose tokens are not known here. Raises WrongParameter, PromptTooLong."""
    options, generative = asked.options, manifest.generative
    assert generative is not None
    if options.logprobs is not None:
        raise WrongParameter("logprobs", f"model {options.model!r} is served as text: it gives no logprobs here")
    if isinstance(asked, CompletionRequest) and not isinstance(asked.prompt, str):
        raise WrongParameter("prompt", f"model {options.model!r} is served as text: it takes no token ids here")
    check_words(asked.words, generative, limits)
    return words_request(options.model, asked.words, generate_request(options, (), generative, limits))


def _manifest(host: ModelHost, name: str, demanded: str) -> Manifest:
    """The manifest of the version that answers. `demanded` may also be a role. Raises ModelNotFound, WrongParameter."""
    exact = demanded and any(one.name == name and one.version == demanded for one in host.manifests())
    manifest = host.manifest(name, demanded if exact else "")
    if manifest.generative is None:
        way_out = "/v1/embeddings" if manifest.text is not None else f"/v2/models/{name}"
        raise WrongParameter("model", f"model {name!r} generates no text; call it by {way_out}")
    return manifest


def _without_effect(asked: ChatRequest | CompletionRequest, text: TextModel | None) -> str:
    """The warning for what an answer is asked for that the model's template here does not take; "" for none."""
    if text is None or isinstance(asked, CompletionRequest):
        return ""
    names = [name for name in asked.variables if not text.takes(name)]
    return "; ".join(f"the chat template of this model does not take {name}" for name in names)


def _words(answer: GenerationAnswer, warning: str) -> dict[str, str]:
    """The headers of an answer, as far as it has come."""
    words, headers = answer.words, answer.call.headers
    warn_of_unknown(words, headers)
    if warning:
        words[WARNING_KEY] = "; ".join(filter(None, (words.get(WARNING_KEY), warning)))
    if answer.version:
        words[VERSION_KEY] = answer.version
    if PARENT_KEY in headers:
        words.setdefault(PARENT_KEY, headers[PARENT_KEY])
    return words
