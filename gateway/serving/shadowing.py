"""Shadowing computes a few of devices' answers again in the pool, and tells the agreement watch how they differ.

An answer goes to its caller first; `answered` then draws whether it is shadowed, and does nothing but keep it in a
queue of `PENDING`. One owned task takes them one after another:

    watch     a device's answer is known: the reference, the best variant of a pool, is asked for the same
    recheck   a demoted device gets no requests, so it is asked for a copy of one that another target has answered; the
              pool is asked too, unless it gave that answer

A pool is asked in quiet moments only (`shadow_budget.py`), while the gateway is not strained, the cloud costs its plain
price and the budget of shadows lasts. A shadow that finds no quiet moment in `PATIENCE_S` is dropped. It is sent to the
target itself, at the lowest priority: it is no request of any caller, so that no quota, no metric of requests and no
flight record counts it, no breaker learns from it, and nothing waits for it. What it costs the pool is charged to the
cloud's budget.

Never shadowed: a request that is pinned or needs attestation, by its caller or its manifest; of a tenant that forbids
it; a step of a sequence; one larger than `MAX_BYTES`; one without the output that is compared.

Of a generation, greedy tokens are compared (`token_comparison.py`): the beginning of the device's answer is followed by
greedy runs of the reference, each in a quiet moment; an answer that was begun is compared to its end, and what it took
beyond the budget is paid off before the next. Where the caller's answer was sampled, the device is asked for a greedy
one. In a recheck of a reference's own greedy answer it is the device that follows. Both are a few tokens of a second
target at the lowest priority.

Source: docs/agreement.md.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import replace as dataclass_replace
from typing import Final, Literal, NamedTuple, Self

import structlog
from msgspec.structs import replace

from gateway.core.agreement.agreement_watch import AgreementTurn, AgreementWatch, AnswerSource, ShadowedAnswer
from gateway.core.agreement.disagreement import AnswerComparison, compared
from gateway.core.agreement.expectation import AgreementTerms, agreement_terms, promised_quality, slice_of
from gateway.core.agreement.shadow_budget import ShadowBudget, is_quiet, reference_offers
from gateway.core.agreement.token_comparison import GreedyPrompt, TokenComparison, greedy_prompt, known_answer
from gateway.core.fleet.fleet import AnswerDrift
from gateway.core.fleet.offer_index import Offer
from gateway.core.placement.ask import Ask
from gateway.core.placement.placer import Placer
from gateway.serving.cache_salt import under_tenant
from gateway.serving.compared_run import ComparedRun, tokens_of
from gateway.serving.disagreements import Disagreements
from gateway.serving.work_estimate import AskBuilder, ManifestOf
from gateway.targets.target import Target
from tidegate import clock
from tidegate.generate.request import GenerateRequest, infer_request
from tidegate.generate.teacher_forcing import KnownAnswer, TextDiffers
from tidegate.models.generative import Generative
from tidegate.models.manifest import Manifest
from tidegate.outcome import ServeError, Unreachable
from tidegate.priority import LAST_LEVEL
from tidegate.runtime.owned_task import OwnedTask
from tidegate.types import DEFERRED, Call, InferRequest, InferResponse, Reply

PENDING: Final = 8
MAX_BYTES: Final = 4 << 20  # of a request's tensors, and of an answer's
PATIENCE_S: Final = 5.0
LOOK_S: Final = 0.05
LIMIT_S: Final = 10.0  # for one answer
_FORGIVE_S: Final = 3600.0

Outcome = Literal["compared", "busy", "unanswered", "incomparable"]

log = structlog.get_logger(__name__)


class ShadowTerms(NamedTuple):
    """What an operator allows (`gateway/config/agreement.py`)."""

    share: float  # of devices' answers
    tolerance: float
    forbids: Callable[[str], bool] = lambda _tenant: False  # whether a tenant's requests are never shadowed


class _Reference(NamedTuple):
    name: str
    response: InferResponse
    quality: float


@dataclass(frozen=True, slots=True)
class _Shadow:
    """One request whose answers are compared."""

    request: InferRequest
    ask: Ask
    manifest: Manifest
    at: float
    prompt: GreedyPrompt | None = None  # of a generation
    known: tuple[tuple[AnswerSource, Offer, InferResponse], ...] = ()
    recheck: tuple[tuple[AnswerSource, Offer], ...] = ()
    reference: _Reference | None = None

    def generation(self, asked: GenerateRequest) -> InferRequest:
        """The request for another generation of the same version."""
        return under_tenant(infer_request(self.ask.model, asked, version=self.ask.version), self.ask.tenant)


class _Following(NamedTuple):
    """A greedy answer, and the offer whose tokens are compared with it."""

    known: KnownAnswer | None  # the device's answer or the reference's; None: it has no tokens
    by: Offer  # the other one's
    reference: str
    quality: float  # of the reference


class Shadowing:
    """The shadowing of one gateway. `async with` runs its task; its end cancels what is under way."""

    def __init__(
        self,
        terms: ShadowTerms,
        watch: AgreementWatch,
        budget: ShadowBudget,
        worklist: Disagreements,
        *,
        placer: Placer,
        targets: Mapping[str, Target],
        manifest_of: ManifestOf,
        ask_builder: AskBuilder,
        draw: Callable[[], float],
        strained: Callable[[], bool],
    ) -> None:
        """Args: strained: whether the gateway has no room for shadows now."""
        self.on_turn: Callable[[AgreementTurn], None] = _untold  # after a source was demoted, suspected or returned
        self.watch = watch
        self.budget = budget
        self.worklist = worklist
        self.outcomes: Counter[tuple[str, Outcome]] = Counter()  # by model
        self._terms = terms
        self._placer = placer
        self._fleet = placer.fleet
        self._targets = targets
        self._manifest_of = manifest_of
        self._ask_builder = ask_builder
        self._draw = draw
        self._strained = strained
        self._pending: deque[_Shadow] = deque()
        self._woken = asyncio.Event()
        self._forgave_at = 0.0
        self._task = OwnedTask(self._run, name="shadowing", crash_means="answers are shadowed no longer")

    async def __aenter__(self) -> Self:
        self._task.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._task.aclose()
        self._pending.clear()

    # on a request's way

    def answered(self, call: Call, reply: Reply) -> None:
        """A caller has been answered; nothing here waits, and nothing is raised."""
        if reply.route is not None and reply.route.served_by.startswith("pool/"):
            self.budget.worked(reply.stages.get("compute", 0.0) / max(1, reply.batch_size))
        if self._draw() >= self._terms.share or len(self._pending) >= PENDING:
            return
        shadow = self._shadow(call, reply, clock.now())
        if shadow is not None:
            self._pending.append(shadow)
            self._woken.set()

    def _shadow(self, call: Call, reply: Reply, now: float) -> _Shadow | None:
        route, request = reply.route, call.request
        if route is None or call.pin != "any" or call.attested or call.deadline is None:
            return None
        if self._terms.forbids(call.tenant) or self._strained():
            return None
        if call.protocol == DEFERRED or (call.path and not call.asker):
            return None  # whether its tenant allows it is known to the device, or the gateway, that sent it
        request = replace(request.pinned(reply.response.model_version or request.model_version), id="")
        try:
            ask = self._ask_builder.ask(replace(call, request=request))
            manifest = self._manifest_of(request.model_name, ask.version)
        except ServeError:  # its version has gone meanwhile
            return None
        if ask.pin != "any" or ask.attested or ask.body_bytes + reply.response.size_bytes > MAX_BYTES:
            return None
        if manifest.sequence is not None:
            return None
        prompt = None
        if manifest.generative is not None:
            prompt = greedy_prompt(request, manifest.generative)
            if prompt is None or route.resumed:  # of several targets' tokens nobody is the source
                return None
            request = under_tenant(request, call.tenant)
        return self._compared(_Shadow(request, ask, manifest, now, prompt), reply, route.served_by)

    def _compared(self, shadow: _Shadow, reply: Reply, served_by: str) -> _Shadow | None:
        """The shadow with what is to be compared; None where there is nothing."""
        ask, route, now = shadow.ask, reply.route, shadow.at
        offers = self._fleet.offers(ask.model, ask.version).all
        variant = reply.variant or (route.variant if route is not None else "")
        answered = offers.get((served_by, variant))
        if answered is None or answered.variant.paced:
            return None
        source = AnswerSource(served_by, ask.model, ask.version, variant)
        known: tuple[tuple[AnswerSource, Offer, InferResponse], ...] = ()
        reference = None
        recheck: list[tuple[AnswerSource, Offer]] = []
        compares_answer = shadow.prompt is None or shadow.prompt.is_own
        if answered.target.spec.tier == "edge":
            if self.watch.is_due(served_by, now):
                if compares_answer:
                    known = ((source, answered, reply.response),)
                else:  # sampled: it is asked for a greedy one
                    recheck.append((source, answered))
                self.watch.asked(served_by, now)
        elif compares_answer and self._is_reference(answered, ask):
            reference = _Reference(f"{served_by}'s {variant}", reply.response, answered.quality)
        recheck += self._rechecked(ask, source, now)
        if not known and not recheck:
            return None
        return dataclass_replace(shadow, known=known, recheck=tuple(recheck), reference=reference)

    def _is_reference(self, answered: Offer, ask: Ask) -> bool:
        best = reference_offers(self._fleet, ask, answered.quality)
        return any(one is answered for one in best if one.quality == best[0].quality)

    def _rechecked(self, ask: Ask, source: AnswerSource, now: float) -> list[tuple[AnswerSource, Offer]]:
        """The drifting source whose turn it is to show that it agrees again, if there is one."""
        if not self.watch.drifting:
            return []
        offers = self._fleet.offers(ask.model, ask.version).all
        for one in self.watch.drifting_among(ask.model, ask.version):
            offer = offers.get((one.target, one.variant))
            if one != source and offer is not None and self.watch.is_due(one.target, now):
                self.watch.asked(one.target, now)
                return [(one, offer)]
        return []

    # behind it

    async def _run(self) -> None:
        while True:
            await self._woken.wait()
            self._woken.clear()
            while self._pending:
                shadow = self._pending.popleft()
                try:
                    if shadow.prompt is not None and shadow.manifest.generative is not None:
                        await self._judge_tokens(shadow, shadow.prompt, shadow.manifest.generative)
                    else:
                        await self._judge(shadow)
                except ServeError as error:
                    self._count(shadow, "unanswered")
                    log.debug("a shadow was not answered", model=shadow.ask.model, reason=error.message)
                except Exception:
                    log.exception("an answer could not be compared", model=shadow.ask.model)

    async def _judge(self, shadow: _Shadow) -> None:
        reference = shadow.reference
        if reference is None:
            best = await self._quiet_reference(shadow)
            if best is None:
                self._count(shadow, "busy")
                return
            reference = _Reference(_name(best), await self._asked(shadow, best), best.quality)
        for source, offer, response in shadow.known:
            await self._told(shadow, source, offer, response, reference)
        for source, offer in shadow.recheck:
            if is_quiet(offer.target, clock.now()):
                await self._told(shadow, source, offer, await self._asked(shadow, offer), reference)
            else:
                self._count(shadow, "busy")

    async def _judge_tokens(self, shadow: _Shadow, prompt: GreedyPrompt, model: Generative) -> None:
        if (reference := shadow.reference) is not None:
            known = known_answer(prompt, reference.response, model)
            for source, offer in shadow.recheck:
                await self._follow(shadow, source, offer, _Following(known, offer, reference.name, reference.quality))
            return
        pool = await self._quiet_reference(shadow)
        if pool is None:
            self._count(shadow, "busy")
            return
        for source, offer, response in shadow.known:
            known = known_answer(prompt, response, model)
            await self._follow(shadow, source, offer, _Following(known, pool, _name(pool), pool.quality))
        for source, offer in shadow.recheck:
            if not is_quiet(offer.target, clock.now()):
                self._count(shadow, "busy")
                continue
            reply = await self._reply(shadow, offer, shadow.generation(prompt.request))
            known = known_answer(prompt, reply.response, model)
            await self._follow(shadow, source, offer, _Following(known, pool, _name(pool), pool.quality))

    async def _follow(self, shadow: _Shadow, source: AnswerSource, offer: Offer, following: _Following) -> None:
        """Compare a device's tokens with the reference's, and tell the watch."""
        terms = self._terms_of(shadow, source, offer, following.quality)
        if following.known is None or terms is None:
            self._count(shadow, "incomparable")
            return
        score = await self._token_score(shadow, following.by, following.known)
        if score is None:
            self._count(shadow, "busy")
            return
        await self._record(shadow, source, terms, AnswerComparison(score, score), following.reference)

    async def _token_score(self, shadow: _Shadow, offer: Offer, known: KnownAnswer) -> float | None:
        """How far the target's variant disagrees with a known answer; None where it was not quiet for long enough."""
        comparison = TokenComparison(known)
        while (asked := comparison.next_request()) is not None:
            if not await self._is_quiet_soon(offer):
                return None
            run = ComparedRun(comparison.expected)
            try:
                ids, stopped = tokens_of(await self._reply(shadow, offer, shadow.generation(asked), run))
            except TextDiffers:
                ids, stopped = tuple(run.ids), False
            comparison.take(ids, stopped=stopped)
        return comparison.score

    async def _quiet_reference(self, shadow: _Shadow) -> Offer | None:
        """The offer of a pool that is quiet and may be asked; None where none is in time."""
        offers = [offer for _, offer, _ in shadow.known] + [offer for _, offer in shadow.recheck]
        quality = max(promised_quality(shadow.manifest, one.variant.name, one.quality) for one in offers)
        while True:
            now = clock.now()
            if self._may_spend(now):
                for one in reference_offers(self._fleet, shadow.ask, quality):
                    if one.target.takes(now) and is_quiet(one.target, now):
                        return one
            if now >= shadow.at + PATIENCE_S:
                return None
            await clock.sleep(LOOK_S)

    async def _is_quiet_soon(self, offer: Offer) -> bool:
        """Whether a target has a quiet moment in `PATIENCE_S`, in which nothing is strained: at once, if it has."""
        began_at = clock.now()
        while True:
            now = clock.now()
            if self._is_calm(now) and offer.target.takes(now) and is_quiet(offer.target, now):
                return True
            if now >= began_at + PATIENCE_S:
                return False
            await clock.sleep(LOOK_S)

    def _may_spend(self, now: float) -> bool:
        if not self._is_calm(now):
            return False
        pools = sum(one.spec.tier == "pool" and one.up for one in self._fleet.targets.values())
        return self.budget.affords(pools, now)

    def _is_calm(self, now: float) -> bool:
        cloud = self._placer.cloud_budget
        return not self._strained() and (cloud is None or cloud.factor(now) <= 1.0)

    async def _asked(self, shadow: _Shadow, offer: Offer) -> InferResponse:
        """The target's answer to the same. Raises ServeError."""
        return (await self._reply(shadow, offer, shadow.request)).response

    async def _reply(
        self, shadow: _Shadow, offer: Offer, request: InferRequest, run: ComparedRun | None = None
    ) -> Reply:
        """The target's reply. Raises ServeError; TextDiffers of a run that was ended at a difference."""
        target = self._targets.get(offer.target.id)
        if target is None:
            raise Unreachable(f"{offer.target.id} has just left")
        began_at = clock.now()
        reply: Reply | None = None
        answer = target.infer(
            request,
            variant=offer.variant.name,
            budget_s=LIMIT_S,
            priority=LAST_LEVEL,
            traceparent="",
            on_accepted=lambda _accepted: None,
            tokens=run,
        )
        try:
            async with asyncio.timeout(LIMIT_S + 1.0):
                reply = await (answer if run is None else run.until_it_differs(answer))
        except TimeoutError as error:
            raise Unreachable(f"{offer.target.id} did not answer a shadow") from error
        finally:
            if offer.target.spec.tier == "pool":
                self._charge(shadow, reply, clock.now() - began_at)
        return reply

    def _charge(self, shadow: _Shadow, reply: Reply | None, took_s: float) -> None:
        """What the pool computed for it; all of its time where that is not known."""
        share = 1.0 if reply is None else shadow.ask.rows / max(reply.batch_size, shadow.ask.rows)
        pool_s = took_s if reply is None else min(reply.stages.get("compute", took_s), took_s) * share
        self.budget.spent(pool_s)
        if self._placer.cloud_budget is not None:
            self._placer.cloud_budget.spent(pool_s)

    async def _told(
        self,
        shadow: _Shadow,
        source: AnswerSource,
        offer: Offer,
        response: InferResponse,
        reference: _Reference,
    ) -> None:
        terms = self._terms_of(shadow, source, offer, reference.quality)
        found = None if terms is None else await self._comparison(terms, response, reference.response)
        if terms is None or found is None:
            self._count(shadow, "incomparable")
            return
        await self._record(shadow, source, terms, found, reference.name)

    def _terms_of(
        self, shadow: _Shadow, source: AnswerSource, offer: Offer, reference_quality: float
    ) -> AgreementTerms | None:
        quality = promised_quality(shadow.manifest, source.variant, offer.quality)
        return agreement_terms(shadow.manifest, source.variant, quality, reference_quality, self._terms.tolerance)

    async def _record(
        self, shadow: _Shadow, source: AnswerSource, terms: AgreementTerms, found: AnswerComparison, reference: str
    ) -> None:
        self._count(shadow, "compared")
        if shadow.prompt is None:
            size = slice_of(shadow.ask.units / max(1, shadow.ask.rows))
        else:
            size = slice_of(len(shadow.prompt.request.prompt))
        feature = shadow.manifest.cost.feature
        answer = ShadowedAnswer(source, reference, found.score, terms, slice=size, feature=feature, apart=found.apart)
        now = clock.now()
        turn = self.watch.record(answer, now)
        if turn is not None:
            self._act(turn, now)
        if now - self._forgave_at > _FORGIVE_S:
            self.watch.forgive(now)
            self._forgave_at = now
        await self.worklist.keep(answer, shadow.request.inputs)

    async def _comparison(
        self, terms: AgreementTerms, answer: InferResponse, reference: InferResponse
    ) -> AnswerComparison | None:
        if answer.size_bytes + reference.size_bytes < 1 << 16:
            return compared(terms, answer.outputs, reference.outputs)
        return await asyncio.to_thread(compared, terms, answer.outputs, reference.outputs)

    def _act(self, turn: AgreementTurn, now: float) -> None:
        self.on_turn(turn)
        source = turn.source
        key = source.model, source.version, source.variant
        if turn.turn == "returned":
            self._fleet.drifts(source.target, key, None, now)
            log.info("a device's answers agree again", target=source.target, model=source.model, evidence=turn.evidence)
            return
        drift = AnswerDrift(turn.evidence, demoted=turn.turn == "demoted")
        self._fleet.drifts(source.target, key, drift, now)
        what = "is demoted" if drift.demoted else "is not demoted, as most devices drift"
        log.warning(f"a device's answers drift, and it {what}", target=source.target, evidence=turn.evidence)

    def _count(self, shadow: _Shadow, outcome: Outcome) -> None:
        self.outcomes[shadow.ask.model, outcome] += 1

    def __repr__(self) -> str:
        return f"<Shadowing {self.watch!r}, {len(self._pending)} pending, {self.budget!r}>"


def _name(offer: Offer) -> str:
    return f"{offer.target.id}'s {offer.variant.name}"


def _untold(_turn: AgreementTurn) -> None:
    """Nothing else is told."""
