"""OpenAI's HTTP interface over a `ModelHost`: text in, embeddings out, for every tool that speaks it.

    POST /v1/embeddings          texts or tokens, float or base64
    POST /v1/chat/completions    text from models that generate it (`generation.py`)
    POST /v1/completions
    GET  /v1/models[/{id}]       the models that take text, and what each can do

A text is tokenized with the model's own tokenizer, and what the model cannot take is cut off and said so
(`tidegate-truncated: N`). A large body becomes several calls at a time (`embeddings.py`), all under the one deadline;
the first that fails ends them all.

Errors have OpenAI's form, and say in `x-should-retry` and `retry-after-ms` what the SDK should do: it would otherwise
repeat a late request twice. Its read timeout, announced on every request, is taken as the caller's budget.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import structlog
from aiohttp import web
from msgspec.structs import replace

from tidegate import clock
from tidegate.generate.text.text_models import TextModels
from tidegate.models.generative import MAX_CONTEXT
from tidegate.models.manifest import Manifest
from tidegate.oip import body_budget
from tidegate.oip.body_budget import BodyLimits, BodyMemory, BodyReservation
from tidegate.oip.budget import budget_s
from tidegate.oip.call import call_of, kept_headers
from tidegate.oip.check import quoted_input
from tidegate.oip.content_limits import DEFAULT, ContentLimits
from tidegate.oip.guard import Guard, OpenGuard
from tidegate.oip.host import ModelHost
from tidegate.oip.http.body import read_body
from tidegate.oip.http.guard import credentials_over_http
from tidegate.oip.http.json_bounds import check_json
from tidegate.oip.http.responses import RefusalObserver, json_response
from tidegate.oip.offload import CodecThreads
from tidegate.oip.reply import (
    ATTESTED_KEY,
    BUDGET_LEFT_KEY,
    REQUEST_ID_KEY,
    ROUTE_KEY,
    SERVED_BY_KEY,
    TIMING_KEY,
    reply_parameters,
)
from tidegate.oip.request_constraints import DEFER_KEY, VERSION_KEY, defer_of, version_of
from tidegate.oip.status import error_code
from tidegate.oip.unknown_headers import warn_of_unknown
from tidegate.openai import embeddings
from tidegate.openai.embeddings import EmbeddingsRequest, TokenRow
from tidegate.openai.errors import Handler, error_json, in_openais_form
from tidegate.openai.generation import GenerationRoutes
from tidegate.openai.request_id import with_request_id
from tidegate.openai.tokens import Tokenizers
from tidegate.outcome import BadAnswer, DeadlineExceeded, NotSupported, ServeError
from tidegate.trace_context import PARENT_KEY
from tidegate.types import Call, Reply

PROTOCOL: Final = "openai"
TRUNCATED_KEY: Final = "tidegate-truncated"
MAX_CONCURRENT_CALLS: Final = 8  # of one body, so that it cannot fill every queue by itself
_TIMES_AS_LONG: Final = 4  # numbers as text, as a tensor of so many bytes

_PATHS: Final = ("/v1/embeddings", "/v1/models", "/v1/chat/completions", "/v1/completions")
RowLimit = Callable[[Call, int], int | None]
Guarded = Callable[[web.Request, ModelHost], Awaitable[web.Response]]  # is given the host, and has no other

_log = structlog.get_logger(__name__)


def openai_routes(
    host: ModelHost,
    tokenizers: Tokenizers,
    *,
    max_body_bytes: int = 64 * 1024 * 1024,
    on_refused: RefusalObserver | None = None,
    guard: Guard | None = None,
    limits: ContentLimits = DEFAULT,
    body_limits: BodyLimits = body_budget.DEFAULT,
    held: BodyMemory | None = None,
    usage: UsageObserver | None = None,
    texts: TextModels | None = None,
    most_rows: RowLimit | None = None,
) -> list[web.RouteDef]:
    """OpenAI's routes over `host`, with the models' tokenizers.

    Args:
        host: answers the calls.
        texts: the text sides of generating models; None: such models are not served here.
        max_body_bytes: of a request, after decompression.
        on_refused: called with (protocol, model name, error) for each request refused here, before the host saw it.
        guard: authorizes requests; None: every request is allowed.
        limits: bounds on the content of a request.
        body_limits: how a body may come.
        held: the memory budget for large bodies, shared with other protocols.
        usage: observes the tokens and the time of each request.
        most_rows: of a call and a number, how many rows, at most that number, such a call may have just now; None where
            that is not known: as many as the manifest says.
    """
    guard = guard or OpenGuard(host)
    held = held or BodyMemory(body_limits.max_held_bytes)
    aside = CodecThreads()
    embedding = OpenAIRoutes(
        guard,
        tokenizers,
        max_body_bytes=max_body_bytes,
        on_refused=on_refused,
        limits=limits,
        body_limits=body_limits,
        held=held,
        aside=aside,
        usage=usage,
        texts=texts,
        most_rows=most_rows,
    )
    generating = (
        None
        if texts is None
        else GenerationRoutes(
            guard,
            texts,
            max_body_bytes=max_body_bytes,
            limits=limits,
            body_limits=body_limits,
            held=held,
            aside=aside,
            on_refused=on_refused,
        )
    )
    return [
        *(() if generating is None else generating.table()),
        *embedding.table(),
        # Last: any other path under /v1, one with line breaks too, is refused in OpenAI's form.
        web.route("*", "/v1/{tail:(?s:.*)}", _unknown),
    ]


class UsageObserver(Protocol):
    """An observer of what requests used."""

    def embedded(self, model: str, tokens: int, took_s: float) -> None: ...

    def failed(self, model: str, error: str, took_s: float) -> None:
        """Args: model: "" where it was none of ours."""


@dataclass(slots=True)
class _RequestUsage:
    """What is known of a request's use so far."""

    arrived_at: float
    model: str = ""
    tokens: int = 0


class OpenAIRoutes:
    """The handlers over what the guard gives each caller."""

    def __init__(
        self,
        guard: Guard,
        tokenizers: Tokenizers,
        *,
        max_body_bytes: int,
        on_refused: RefusalObserver | None,
        limits: ContentLimits,
        body_limits: BodyLimits,
        held: BodyMemory,
        aside: CodecThreads,
        usage: UsageObserver | None,
        texts: TextModels | None,
        most_rows: RowLimit | None,
    ) -> None:
        self._usage = usage
        self._most_rows = most_rows
        self._texts = texts
        self._guard = guard
        self._limits = limits
        self._body_limits = body_limits
        self._held = held
        self._tokenizers = tokenizers
        self._max_body_bytes = max_body_bytes
        self._on_refused = on_refused
        self._aside = aside

    def __repr__(self) -> str:
        return f"<OpenAIRoutes {self._guard!r} {self._tokenizers!r}>"

    def table(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/embeddings", in_openais_form(self.embed)),
            web.get("/v1/models", self._guarded(self.models)),
            web.get("/v1/models/{model}", self._guarded(self.model)),
        ]

    def _guarded(self, handler: Guarded) -> Handler:
        async def guarded(request: web.Request) -> web.Response:
            return await handler(request, await self._guard.admit(credentials_over_http(request, PROTOCOL)))

        return in_openais_form(guarded)

    async def embed(self, request: web.Request) -> web.Response:
        used = _RequestUsage(clock.now())
        try:
            with self._held.share() as share:
                answer = await self._embed_within(share, request, used)
        except Exception as error:
            if self._usage is not None:
                self._usage.failed(used.model, error_code(error), clock.now() - used.arrived_at)
            raise
        if self._usage is not None:
            self._usage.embedded(used.model, used.tokens, clock.now() - used.arrived_at)
        return answer

    async def _embed_within(self, share: BodyReservation, request: web.Request, used: _RequestUsage) -> web.Response:
        name = ""
        try:
            host = await self._guard.admit(credentials_over_http(request, PROTOCOL))
            body = await read_body(request, self._max_body_bytes, limits=self._body_limits, share=share)
            asked = await self._aside.run(len(body), partial(_asked, body, self._limits))
            name = asked.model
            headers = kept_headers(request.headers.items())
            if defer_of(headers, {}):
                raise NotSupported(f"{DEFER_KEY}: a ticket is for one inference; use /v2/models/NAME/infer")
            demanded = version_of(headers, {})
            manifest = _manifest(host, name, demanded)
            used.model = manifest.name
            embeddings.check_dimensions(asked, manifest)
            rows = await self._rows_in_time(asked, manifest, headers, used.arrived_at)
            embeddings.check_rows(rows)
            used.tokens = sum(len(row.ids) for row in rows)
            made = partial(call_of, manifest=manifest, protocol=PROTOCOL, headers=headers, arrived_at=used.arrived_at)
            parts = self._parts(manifest, rows, made)
            # One call gets whatever is the default for it; several get one version, so that they agree.
            pinned = len(parts) > 1 and demanded in ("", manifest.version)
            calls = [
                made(embeddings.infer_request(manifest, [rows[index] for index in part], pinned=pinned))
                for part in parts
            ]
        except ServeError as error:
            if self._on_refused is not None:
                self._on_refused(PROTOCOL, name, error)
            raise
        replies = await self._infer_all(calls, host)
        work_bytes = _TIMES_AS_LONG * sum(reply.response.size_bytes for reply in replies)
        return await self._aside.run(work_bytes, lambda: _answer(asked, manifest, rows, parts, calls, replies))

    def _parts(self, manifest: Manifest, rows: Sequence[TokenRow], made: Callable[..., Call]) -> list[list[int]]:
        """Indices of rows by the calls that they go into, none larger than what is there now takes."""
        max_rows, max_work = embeddings.group_limits(manifest)
        if self._most_rows is not None and len(rows) > 1:
            # The pool may be away, and a small device takes less. By the longest row: the others are taken as well.
            longest = max(rows, key=lambda row: len(row.ids))
            max_rows = self._most_rows(made(embeddings.infer_request(manifest, [longest])), max_rows) or max_rows
        return embeddings.groups([len(row.ids) for row in rows], max_rows=max_rows, max_work=max_work)

    async def models(self, _: web.Request, host: ModelHost) -> web.Response:
        found = {one.name: one for one in host.manifests() if self._is_listed(one)}
        return json_response({"object": "list", "data": [await self._model(one) for one in found.values()]})

    async def model(self, request: web.Request, host: ModelHost) -> web.Response:
        manifest = host.manifest(request.match_info["model"])
        if not self._is_listed(manifest):
            embeddings.text_of(manifest)
        return json_response(await self._model(manifest))

    def _is_listed(self, manifest: Manifest) -> bool:
        return manifest.text is not None or (manifest.generative is not None and self._texts is not None)

    async def _model(self, manifest: Manifest) -> dict[str, Any]:
        """A model as OpenAI lists it, with the paths that serve it in a field that OpenAI's clients pass by."""
        paths = ["/v1/embeddings"] if manifest.text is not None else []
        said: dict[str, Any] = {"id": manifest.name, "object": "model", "created": 0, "owned_by": "tidegate"}
        if manifest.generative is not None and manifest.generative.is_text_only:
            paths += ["/v1/chat/completions", "/v1/completions"]
        elif manifest.generative is not None and self._texts is not None:
            try:
                chats = (await self._texts.of(manifest)).chats
                paths += [*(["/v1/chat/completions"] if chats else []), "/v1/completions"]
            except NotSupported:
                paths.append(f"/v2/models/{manifest.name}/infer")  # in token ids
        if manifest.generative is not None and manifest.generative.context < MAX_CONTEXT:  # else it is not known
            said["max_model_len"] = manifest.generative.context  # as vLLM calls it
        return {**said, "tidegate": {"paths": paths}}

    async def _rows(self, asked: EmbeddingsRequest, manifest: Manifest) -> list[TokenRow]:
        text = embeddings.text_of(manifest)
        if asked.texts:
            return await self._tokenizers.rows(manifest, asked.texts)
        return embeddings.token_rows(asked.tokens, text.max_tokens)

    async def _rows_in_time(
        self, asked: EmbeddingsRequest, manifest: Manifest, headers: Mapping[str, str], arrived_at: float
    ) -> list[TokenRow]:
        budget = budget_s(headers, {})
        if budget is None:
            return await self._rows(asked, manifest)
        try:
            async with asyncio.timeout(arrived_at + budget - clock.now()):
                return await self._rows(asked, manifest)
        except TimeoutError as error:
            raise DeadlineExceeded("the budget ran out while the texts were made into tokens") from error

    async def _infer_all(self, calls: Sequence[Call], host: ModelHost) -> list[Reply]:
        """Every call's reply, in order and of one version; the first failure cancels the rest and is raised."""
        if len(calls) == 1 or not calls[0].request.model_version:
            # What a caller's `candidate` means may change between two calls: the others follow the first.
            first = await host.infer(calls[0])
            rest = [replace(one, request=one.request.pinned(first.response.model_version)) for one in calls[1:]]
            return [first, *(await self._infer_together(rest, host) if rest else [])]
        return await self._infer_together(calls, host)

    async def _infer_together(self, calls: Sequence[Call], host: ModelHost) -> list[Reply]:
        gate = asyncio.Semaphore(MAX_CONCURRENT_CALLS)
        failure: BaseException | None = None
        tasks: list[asyncio.Task[Reply]] = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_infer(host, call, gate), name="openai-infer") for call in calls]
        except* Exception as failed:
            failure = failed.exceptions[0]
        if failure is not None:
            raise failure
        return [task.result() for task in tasks]


def _asked(body: bytes, limits: ContentLimits) -> EmbeddingsRequest:
    check_json(body, limits)
    return embeddings.parse(body)


def _manifest(host: ModelHost, name: str, demanded: str) -> Manifest:
    """The manifest of the version that answers: its tokenizer reads the texts. `demanded` may also be a role."""
    if demanded and any(one.name == name and one.version == demanded for one in host.manifests()):
        return host.manifest(name, demanded)
    return host.manifest(name)


async def _infer(host: ModelHost, call: Call, gate: asyncio.Semaphore) -> Reply:
    async with gate:
        return await host.infer(call)


async def _unknown(request: web.Request) -> web.Response:
    # aiohttp tries routes in turn, so a known path arrives here only by a verb that it does not have.
    known = request.path in _PATHS or request.path.startswith("/v1/models/")
    status = 405 if known else 404
    words = f"{request.method} {quoted_input(request.path)} is not {'allowed' if known else 'served here'}"
    code = "method_not_allowed" if known else "unknown_url"
    return error_json(status, words, "invalid_request_error", None, code, {"x-should-retry": "false"})


def _answer(
    asked: EmbeddingsRequest,
    manifest: Manifest,
    rows: Sequence[TokenRow],
    parts: Sequence[Sequence[int]],
    calls: Sequence[Call],
    replies: Sequence[Reply],
) -> web.Response:
    output = embeddings.text_of(manifest).output
    found: dict[int, Any] = {}
    for part, reply in zip(parts, replies, strict=True):
        found.update(zip(part, embeddings.vectors(reply.response, output, len(part)), strict=True))
    versions = {reply.response.model_version for reply in replies}
    if len(versions) != 1:
        raise BadAnswer(f"the vectors are of several versions ({', '.join(sorted(versions))}): send the request again")
    words = _joined([reply_parameters(reply) for reply in replies])
    warn_of_unknown(words, calls[0].headers)
    if version := versions.pop():
        words[VERSION_KEY] = version
    headers = dict(words)
    truncated = sum(row.truncated for row in rows)
    if truncated:
        headers[TRUNCATED_KEY] = str(truncated)
    if PARENT_KEY in calls[0].headers:
        headers.setdefault(PARENT_KEY, calls[0].headers[PARENT_KEY])
    return json_response(embeddings.answer(asked, rows, found, words), headers=with_request_id(headers))


def _joined(all_words: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The headers of several replies as one: every place and route once, and the least budget left."""
    if len(all_words) == 1:
        return dict(all_words[0])
    words = {}
    for key, joint in ((SERVED_BY_KEY, ", "), (ROUTE_KEY, " | "), (ATTESTED_KEY, " | "), (REQUEST_ID_KEY, ", ")):
        if said := dict.fromkeys(one[key] for one in all_words if key in one):
            words[key] = joint.join(said)
    if named := [one[PARENT_KEY] for one in all_words if PARENT_KEY in one]:
        words[PARENT_KEY] = named[0]
    if left := [one[BUDGET_LEFT_KEY] for one in all_words if BUDGET_LEFT_KEY in one]:
        words[BUDGET_LEFT_KEY] = min(left, key=float)
    slowest = min(all_words, key=lambda one: float(one.get(BUDGET_LEFT_KEY, "inf")))
    if TIMING_KEY in slowest:
        words[TIMING_KEY] = slowest[TIMING_KEY]
    return words
