"""A target behind OpenAI's interface: one HTTP request a generation, its answer read as it comes.

A task looks whether the server is there, and lists its models: the round trip of that is the link's. The first look
that succeeds probes what the server can do and reports `LinkUp` with its models; a look that fails reports `LinkDown`.
A server that comes back is probed again, and so is one whose list has changed, or that answered a request as if it
were another one. Requests are tried regardless of looks, as of any foreign server, and what they meet is the better
evidence: the breaker counts it, and an answer that is overdue by what the server has shown before is watched for.

A server does not say how much of an answer's time was waiting. All of it is reported as its compute, less the round
trip and less what the reader held up: what is learned so is what an answer takes there, its queue included.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, suppress
from typing import Final

import structlog

from gateway.config.upstreams import UpstreamConfig
from gateway.core.fleet.link_events import LinkDown, LinkEvent, LinkRtt, LinkUp
from gateway.targets.openai.api_key import ApiKey
from gateway.targets.openai.dialect import Event, PartReader
from gateway.targets.openai.probing import Listed, ProbeLimits, TextOf, UpstreamProbe, listed
from gateway.targets.openai.progress import AnswerProgress
from gateway.targets.openai.upstream_client import UpstreamClient
from gateway.targets.openai.upstream_model import UpstreamModel, text_manifest
from tidegate import clock
from tidegate.fleet.offers import ModelOffer
from tidegate.generate.request import generate_request
from tidegate.models.manifest import Manifest
from tidegate.outcome import (
    BadAnswer,
    DeadlineExceeded,
    Disconnected,
    NotSupported,
    ServeError,
    Unreachable,
)
from tidegate.runtime.owned_task import OwnedTask
from tidegate.token_sink import TokenObjectives, TokenSink
from tidegate.types import Accepted, InferRequest, Reply

log = structlog.get_logger(__name__)

_AGAIN_S: Final = 1.0  # after a look that failed
_COUNTS_S: Final = 0.5  # for what follows the end of an answer

ManifestOf = Callable[[str], Manifest | None]


class OpenAITarget:
    """A `Target`. `async with` opens it and begins to look.

    Args:
        manifest_of: the manifest of the gateway's own repository for a model; None for one that it lacks.
        text_of: the text side of such a model.
    """

    def __init__(
        self,
        id: str,
        url: str,
        section: UpstreamConfig,
        *,
        on_event: Callable[[LinkEvent], None],
        manifest_of: ManifestOf,
        text_of: TextOf,
    ) -> None:
        self._id = id
        self._url = url
        self._section = section
        self._report = on_event
        self._manifest_of = manifest_of
        self._text_of = text_of
        key = ApiKey(file=section.api_key_file, variable=section.api_key_env)
        self._client = UpstreamClient(id, url, key=key, ca_file=section.ca_file, silence_s=section.silence_s)
        self._stack = AsyncExitStack()
        self._looking = OwnedTask(self._look, name=f"look at {id}")
        self._due = asyncio.Event()  # a look is wanted now
        self._models: Mapping[str, UpstreamModel] = {}
        self._listed: Listed | None = None  # as it was probed
        self._up: bool | None = None  # None: no look has ended yet
        self._reason = "not looked at yet"
        self._rtt_s = 0.0

    def __repr__(self) -> str:
        kind = self._listed.kind if self._listed is not None else "unknown"
        return f"<OpenAITarget {self._id} at {self._url} ({kind}) {'up' if self._up else self._reason}>"

    @property
    def id(self) -> str:
        return self._id

    @property
    def address(self) -> str:
        return self._url

    @property
    def connected(self) -> bool:
        """Whether the last look succeeded; True before the first, since a request may be tried."""
        return self._up is not False

    async def __aenter__(self) -> OpenAITarget:
        await self._stack.enter_async_context(self._client)
        self._looking.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._looking.aclose()
        await self._stack.aclose()

    async def infer(
        self,
        request: InferRequest,
        *,
        variant: str,
        budget_s: float,
        priority: int,
        traceparent: str,
        on_accepted: Callable[[Accepted], None],
        tracestate: str = "",
        tokens: TokenSink | None = None,
        objectives: TokenObjectives | None = None,
    ) -> Reply:
        """`on_accepted` is never called: such a server has no word for it, nor for a priority that others share."""
        if budget_s <= 0:
            raise DeadlineExceeded("no time was left to ask")
        model = self._models.get(request.model_name)
        if model is None:
            raise Disconnected(f"{self._id} has no model {request.model_name!r} now: {self._reason}")
        progress = self._progress(request, model, tokens)
        try:
            async with asyncio.timeout(budget_s):
                await self._follow(request, model, progress)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self._id} was still answering at the deadline") from error
        except (BadAnswer, Unreachable):
            self._due.set()  # it may be another server now, or none
            raise
        return progress.reply(variant or self._section.variant, self._rtt_s)

    async def describe(self, models: Iterable[str]) -> tuple[Manifest, ...]:
        """Manifests of those models of which the gateway's repository has none."""
        found = [self._models[name] for name in models if name in self._models]
        return tuple([self._described(one) for one in found if one.manifest is None])

    # one answer

    def _progress(self, request: InferRequest, model: UpstreamModel, tokens: TokenSink | None) -> AnswerProgress:
        if model.grade != "ids":
            if request.text is None:
                raise NotSupported(f"{self._id} takes text, and the request has token ids only")
            return AnswerProgress(request, tokens, prompt_tokens=request.text.about_tokens)
        assert model.text is not None
        asked = generate_request(request, default_max_tokens=1)
        own = () if asked.ignore_stop else model.text.generative.stop_tokens
        return AnswerProgress(
            request,
            tokens,
            text=model.text,
            stops=frozenset((*own, *asked.stop_tokens)),
            prompt_tokens=len(asked.prompt),
            is_exact=True,
        )

    async def _follow(self, request: InferRequest, model: UpstreamModel, progress: AnswerProgress) -> None:
        """Ask, and read the answer to its end. Raises ServeError."""
        reader = model.dialect.reader(request)
        async with self._client.stream(model.dialect.question(request, model.name_there)) as events:
            async for event in events:
                await progress.take(reader.part(event))
                if progress.finish is not None:
                    await _read_counts(events, reader, progress)
                    return
                await progress.wait_for_room()
        raise Disconnected(f"{self._id} ended its answer in the middle")

    # looking

    async def _look(self) -> None:
        while True:
            try:
                await self._look_once()
                wait_s = self._section.probe_interval_s
            except ServeError as error:
                self._down(error.message)
                wait_s = min(_AGAIN_S, self._section.probe_interval_s)
            except Exception as error:  # a defect of ours must not cost the target for good
                log.exception("a look at a server failed", target=self._id)
                self._down(f"internal error: {type(error).__name__}")
                wait_s = _AGAIN_S
            self._due.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._due.wait()
                await clock.sleep(min(_AGAIN_S, wait_s))  # requests that fail may ask for it a thousand times a second
            except TimeoutError:
                pass

    async def _look_once(self) -> None:
        asked_at = clock.now()
        found = await listed(self._client, self._id)
        took_s = clock.now() - asked_at
        self._rtt_s = min(self._rtt_s, took_s) if self._up else took_s  # the least: a list takes its server some time
        if not self._up or self._is_other(found):
            await self._probe(found)
        self._report(LinkRtt(self._id, took_s))

    def _is_other(self, found: Listed) -> bool:
        before = self._listed
        return before is None or (before.kind, before.models.keys()) != (found.kind, found.models.keys())

    async def _probe(self, found: Listed) -> None:
        limits = ProbeLimits(self._section.grade, self._section.slots, self._section.context)
        probe = UpstreamProbe(self._client, found, limits, self._text_of)
        models, missing = {}, []
        for name, name_there in self._section.models.items():
            try:
                models[name] = await probe.model(name, name_there, self._manifest_of(name))
            except BadAnswer as error:
                missing.append(f"{name}: {error.message}")
                log.warning("a server lacks a model", target=self._id, model=name, reason=error.message)
        if not models:
            raise BadAnswer("; ".join(missing))
        self._models, self._listed = models, found
        for one in models.values():
            log.info(
                "a server was probed", target=self._id, model=one.name, kind=one.kind, grade=one.grade, why=one.why
            )
        self._report(LinkUp(self._id, self._id, 0, self._offers()))
        self._up = True

    def _offers(self) -> tuple[ModelOffer, ...]:
        return tuple([one.offer(self._section.variant) for one in self._models.values()])

    def _described(self, model: UpstreamModel) -> Manifest:
        return text_manifest(
            model.name,
            model.kind,
            variant=self._section.variant,
            context=model.context,
            default_max_tokens=self._section.default_max_tokens,
            default_budget_s=self._section.default_budget_s,
        )

    def _down(self, reason: str) -> None:
        if self._up is not False or reason != self._reason:
            self._report(LinkDown(self._id, reason))
        self._up, self._reason = False, reason


async def _read_counts(events: AsyncIterator[Event], reader: PartReader, progress: AnswerProgress) -> None:
    """Read on behind the end: counts may follow, and a connection that was read to its end can be used again.

    What goes wrong there changes nothing: the answer is whole.
    """
    with suppress(TimeoutError, ServeError):
        async with asyncio.timeout(_COUNTS_S):
            async for event in events:
                await progress.take(reader.part(event))
