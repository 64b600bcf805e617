"""Shadowed generations: whose tokens are followed by whom, what a difference costs, and who is left alone."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.core.agreement.agreement_watch import AgreementWatch
from gateway.core.agreement.shadow_budget import ShadowBudget
from gateway.core.agreement.token_comparison import MOST_DIFFERENCES, MOST_POSITIONS
from gateway.core.fleet.link_events import LinkUp
from gateway.core.placement.placer import Placer
from gateway.layers.shadow import shadow
from gateway.operate.agreement_report import agreement_json
from gateway.serving.disagreements import Disagreements
from gateway.serving.dispatcher import Dispatcher
from gateway.serving.shadowing import PATIENCE_S, Shadowing, ShadowTerms
from tests.support.gateway.conductor import CountingTarget
from tests.support.gateway.fleets import fleet_of, spec, variant
from tests.support.loop import on_virtual_time
from tests.support.models.generative import TALKER
from tidegate import clock
from tidegate.fleet.offers import ModelOffer
from tidegate.generate.request import GenerateRequest, Sampling, generate_request, ids_tensor, infer_request
from tidegate.generate.token_stream import TokenStream
from tidegate.generate.usage import FinishReason, Usage, usage_parameters
from tidegate.models.manifest import Quality
from tidegate.outcome import InvalidRequest, Overloaded
from tidegate.priority import LAST_LEVEL
from tidegate.token_sink import TokenBatch
from tidegate.types import Accepted, Call, InferRequest, InferResponse, Reply

STEP_S = 0.005
PROMPT = tuple(range(20, 60))
INT4 = replace(TALKER.variants[0], name="int4", engine="onnxruntime-genai", quality=Quality("top1", 0.95, 700))
BF16 = replace(TALKER.variants[0], name="bf16", engine="transformers", quality=Quality("top1", 1.0, 700))
MANIFEST = replace(TALKER, variants=(INT4, BF16))


def next_id(context: Sequence[int]) -> int:
    """What intact weights say behind these tokens."""
    return 3 + zlib.crc32(repr(tuple(context)).encode()) % 900


class Talking(CountingTarget):
    """Says a checksum of all tokens before as the next; `says` changes it."""

    def __init__(self, id: str) -> None:
        super().__init__(id)
        self.says: Callable[[Sequence[int]], int] = next_id
        self.ends_with: FinishReason = "length"
        self.error: Exception | None = None
        self.gives_ids = True
        self.seen: list[tuple[GenerateRequest, int]] = []  # and the priority
        self.cancelled = 0

    async def infer(self, request: InferRequest, *, priority: int, **words: Any) -> Reply:
        self.seen.append((generate_request(request, default_max_tokens=16), priority))
        return await super().infer(request, priority=priority, **words)

    async def take(
        self, request: InferRequest, variant: str, budget_s: float, on_accepted: Callable[[Accepted], None]
    ) -> Reply:
        if self.error is not None:
            raise self.error
        asked, sink = self.seen[-1][0], self.tokens
        ids: list[int] = []
        if any(not 0 <= id < 1000 for id in asked.prompt):
            raise InvalidRequest("an id that is none of the vocabulary")
        if sink is not None:
            sink.on_credit(lambda _count: None)
            sink.started(len(asked.prompt), 0)
        try:
            while len(ids) < asked.max_tokens:
                await clock.sleep(STEP_S)
                ids.append(self.says((*asked.prompt, *ids)))
                if sink is not None:
                    sink.put(TokenBatch(len(ids) - 1, (ids[-1],)))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        usage = usage_parameters(Usage(self.ends_with, len(asked.prompt), len(ids)))
        outputs = (ids_tensor("output_ids", tuple(ids)),) if self.gives_ids else ()
        response = InferResponse("talker", "1", outputs, parameters=usage)
        return Reply(response, stages={"queue": 0.0, "compute": STEP_S * len(ids)}, variant=variant)


class Scene:
    """A gateway's line of dispatcher and shadowing, over one edge and one pool."""

    def __init__(self, *, every_s: float = 0.01, strained: Callable[[], bool] = lambda: False) -> None:
        self.edge, self.pool = Talking("edge/a"), Talking("pool/p")
        self.fleet = fleet_of()
        for target_id, one in (
            ("edge/a", variant("int4", compute_s=0.010, quality=0.95)),
            ("pool/p", variant("bf16", compute_s=0.050, quality=1.0)),
        ):
            self.fleet.add(spec(target_id), clock.now())
            self.fleet.fold(LinkUp(target_id, target_id, 1, (ModelOffer("talker", "1", (one,)),)), clock.now())
        targets = {"edge/a": self.edge, "pool/p": self.pool}
        placer = Placer(self.fleet)
        self.dispatcher = Dispatcher(placer, targets, lambda _name, _version: MANIFEST, draw=lambda: 0.5)
        self.budget = ShadowBudget(1.0)
        self.shadowing = Shadowing(
            ShadowTerms(1.0, 2.0),
            AgreementWatch(every_s),
            self.budget,
            Disagreements(100),
            placer=placer,
            targets=targets,
            manifest_of=lambda _name, _version: MANIFEST,
            ask_builder=self.dispatcher.ask_builder,
            draw=lambda: 0.5,
            strained=strained,
        )
        self.service = shadow(self.shadowing)(self.dispatcher.infer)
        self._numbers = count(100)

    async def ask(self, **changes: Any) -> Reply:
        """An answer to another prompt, and the shadow that follows it."""
        self.budget.worked(10.0)  # what pools do for others
        reply = await self.service(self.call(**changes))
        await clock.sleep(2.0)
        return reply

    def call(self, *, pin: Any = "any", streams: bool = True, max_tokens: int = 40, **changes: Any) -> Call:
        now, prompt = clock.now(), (*PROMPT, next(self._numbers) % 900)
        asked = replace(GenerateRequest(prompt, max_tokens), **changes)
        stream = TokenStream(window=4096) if streams else None
        return Call(infer_request("talker", asked), "openai", now, now + 20.0, tokens=stream, pin=pin)

    @property
    def outcomes(self) -> dict[str, int]:
        return {outcome: number for (_, outcome), number in self.shadowing.outcomes.items()}

    @property
    def scores(self) -> list[float]:
        return [score for state in self.shadowing.watch.sources.values() for _, score in state.recent]


def differs_at(*places: int) -> Callable[[Sequence[int]], int]:
    """Says another token at these places of an answer to one of `Scene`'s prompts."""
    return lambda context: next_id(context) + (len(context) - len(PROMPT) - 1 in places)


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "in one piece"])
@on_virtual_time
async def test_the_pool_follows_the_beginning_of_a_devices_answer_after_its_caller_has_it(streams: bool) -> None:
    scene = Scene()
    async with scene.shadowing:
        reply = await scene.service(call := scene.call(streams=streams))
        assert reply.route is not None and reply.route.served_by == "edge/a"
        assert scene.pool.seen == []
        await clock.sleep(2.0)
        ((asked, priority),) = scene.pool.seen
        (prompt,) = call.request.inputs
        assert asked.prompt == generate_request(call.request, default_max_tokens=1).prompt and prompt.elements == 41
        assert (asked.max_tokens, asked.sampling, priority) == (MOST_POSITIONS, Sampling(), LAST_LEVEL)
        assert scene.outcomes == {"compared": 1} and scene.scores == [0.0]
        assert scene.budget.spent_s == pytest.approx(MOST_POSITIONS * STEP_S)
        assert len(scene.edge.seen) == 1, "its answer is there"


@on_virtual_time
async def test_a_difference_ends_a_run_and_the_next_goes_on_behind_the_devices_token() -> None:
    scene = Scene()
    scene.edge.says = differs_at(3, 20)
    async with scene.shadowing:
        await scene.ask()
        first, second, third = [asked for asked, _ in scene.pool.seen]
        assert (len(first.prompt), len(second.prompt), len(third.prompt)) == (41, 41 + 4, 41 + 21)
        assert (first.max_tokens, second.max_tokens, third.max_tokens) == (32, 28, 11)
        assert scene.pool.cancelled == 2 and scene.pool.under_way == 0
        assert scene.scores == [pytest.approx(2 / 32)]
        steps = 4 + 17 + 11
        assert scene.budget.spent_s == pytest.approx(steps * STEP_S)


@on_virtual_time
async def test_broken_weights_cost_a_few_runs_and_differ_altogether() -> None:
    scene = Scene()
    scene.edge.says = lambda context: 7
    async with scene.shadowing:
        await scene.ask()
        assert len(scene.pool.seen) == MOST_DIFFERENCES and scene.scores == [1.0]
        (kept,) = scene.shadowing.worklist
        assert (kept.metric, kept.score, kept.reference) == ("tokens", 1.0, "pool/p's bf16")


@on_virtual_time
async def test_ids_that_are_none_of_the_vocabulary_accuse_their_device_and_are_not_sent_on() -> None:
    scene = Scene()
    scene.edge.says = lambda context: 5_000_000
    async with scene.shadowing:
        await scene.ask()
        assert scene.outcomes == {"compared": 1} and scene.scores == [1.0]
        assert len(scene.pool.seen) == 1


@pytest.mark.parametrize(
    "changes",
    [{"sampling": Sampling(0.8, seed=3)}, {"stop_tokens": (9,)}, {"ignore_stop": True}],
    ids=lambda one: next(iter(one)),
)
@on_virtual_time
async def test_where_the_answer_itself_cannot_be_compared_the_device_is_asked_for_a_greedy_one(
    changes: dict[str, Any],
) -> None:
    scene = Scene()
    async with scene.shadowing:
        await scene.ask(**changes)
        _, (copy, priority) = scene.edge.seen
        assert copy.sampling == Sampling() and not (copy.stop_tokens or copy.ignore_stop)
        assert (copy.max_tokens, priority) == (MOST_POSITIONS, LAST_LEVEL)
        assert len(scene.pool.seen) == 1 and scene.scores == [0.0]


@on_virtual_time
async def test_a_busy_device_is_not_asked_for_a_greedy_answer() -> None:
    scene = Scene()
    async with scene.shadowing:
        await scene.service(scene.call(sampling=Sampling(0.8)))
        scene.fleet.targets["edge/a"].queue_estimate.launch(1, 1.0, clock.now())
        await clock.sleep(2.0)
        assert len(scene.edge.seen) == 1 and scene.outcomes == {"busy": 1}


@pytest.mark.slow
@on_virtual_time
async def test_a_device_that_drifts_is_left_out_and_comes_back_by_following_the_pools_answers() -> None:
    scene = Scene()
    scene.edge.says = lambda context: next_id(context[:-1])
    async with scene.shadowing:
        asked = 0
        target = scene.fleet.targets["edge/a"]
        while "answer_drift" not in target.degradation.active:
            await scene.ask()
            asked += 1
            assert asked < 60
        assert "tokens of output_ids" in target.degradation.active["answer_drift"].evidence
        (source,) = agreement_json(scene.shadowing, clock.now())["sources"]
        assert (source["metric"], source["recorded"], source["demoted"]) == ("tokens", pytest.approx(0.05), True)
        assert source["recent_mean"] == 1.0

        reply = await scene.ask()
        assert reply.route is not None and reply.route.served_by == "pool/p"
        scene.edge.says = next_id
        before, asked = len(scene.pool.seen), 0
        while "answer_drift" in target.degradation.active:
            await scene.ask(sampling=Sampling(0.9 if asked % 2 else 0.0))
            asked += 1
            assert asked < 100
        follows = [one for one, priority in scene.pool.seen[before:] if priority == LAST_LEVEL]
        assert len(follows) == asked // 2, "of a greedy answer of its own the pool computes nothing again"


@on_virtual_time
async def test_an_answer_of_several_targets_a_pinned_one_and_one_without_ids_are_not_compared() -> None:
    scene = Scene()
    async with scene.shadowing:
        await scene.ask(pin="edge")
        reply = await scene.dispatcher.infer(call := scene.call())
        assert reply.route is not None
        resumed: Any = (object(),)
        scene.shadowing.answered(call, replace(reply, route=replace(reply.route, resumed=resumed)))
        words = replace(call.request, inputs=())
        scene.shadowing.answered(replace(call, request=words), reply)
        assert "0 pending" in repr(scene.shadowing)
        scene.shadowing.answered(call, replace(reply, response=InferResponse("talker", "1", ())))
        await clock.sleep(2.0)
        assert scene.pool.seen == [] and scene.outcomes == {"incomparable": 1}


@on_virtual_time
async def test_a_reference_that_fails_or_says_no_ids_accuses_nobody() -> None:
    scene = Scene()
    async with scene.shadowing:
        scene.pool.error = Overloaded("full")
        await scene.ask()
        assert scene.outcomes == {"unanswered": 1}
        scene.pool.error, scene.pool.gives_ids = None, False
        await scene.ask()
        assert scene.outcomes == {"unanswered": 2} and not scene.shadowing.watch.sources


@on_virtual_time
async def test_a_pool_that_becomes_busy_between_two_runs_is_waited_for_and_then_left_alone() -> None:
    scene = Scene()
    scene.edge.says = differs_at(3)
    queue = scene.fleet.targets["pool/p"].queue_estimate
    async with scene.shadowing:
        await scene.service(scene.call())
        await clock.sleep(2 * STEP_S)
        queue.launch(1, 1.0, clock.now())
        await clock.sleep(1.0)
        assert len(scene.pool.seen) == 1
        queue.finish(1, clock.now())
        await clock.sleep(2.0)
        assert len(scene.pool.seen) == 2 and scene.outcomes == {"compared": 1}
        scene.budget.worked(10.0)
        await scene.service(scene.call())
        await clock.sleep(2 * STEP_S)
        queue.launch(2, 1.0, clock.now())
        await clock.sleep(PATIENCE_S + 1.0)
        assert len(scene.pool.seen) == 3 and scene.outcomes == {"compared": 1, "busy": 1}


@on_virtual_time
async def test_what_an_answer_cost_beyond_the_budget_is_paid_off_before_the_next() -> None:
    scene = Scene()
    scene.edge.says = differs_at(2, 20)
    scene.budget.affords(1, clock.now())
    scene.budget.spent(0.099)  # a millisecond is left
    async with scene.shadowing:
        await scene.service(scene.call())
        await clock.sleep(2.0)
        assert scene.outcomes == {"compared": 1}, "an answer that was begun is compared to its end"
        before = len(scene.pool.seen)
        await scene.service(scene.call())
        await clock.sleep(PATIENCE_S + 2.0)
        assert len(scene.pool.seen) == before and scene.outcomes == {"compared": 1, "busy": 1}


@on_virtual_time
async def test_the_end_cancels_the_run_that_is_under_way() -> None:
    scene = Scene()
    async with scene.shadowing:
        await scene.service(scene.call())
        await clock.sleep(3 * STEP_S)
        assert scene.pool.under_way == 1
    assert (scene.pool.cancelled, scene.pool.under_way) == (1, 0)
