"""The steps of a sequence go to the target that keeps its state, once each. On virtual time."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from gateway.core.access.sequence_home import SequenceHomes
from gateway.core.request.affinity import Affinity
from tests.support.gateway.conductor import FP32, FakeTarget, Scene, target
from tests.support.loop import on_virtual_time
from tests.support.serving.host import minilm
from tidegate import clock
from tidegate.models.manifest import Manifest, Stateful
from tidegate.oip.sequence import SequenceStep
from tidegate.outcome import Disconnected, InvalidRequest, NothingAlive, Overloaded, Unreachable
from tidegate.types import Call, LoadReport, Reply

TTL_S = 30.0


class Remembering(Scene):
    """Two pools that are alike, and a model that remembers."""

    def __init__(self, homes: SequenceHomes | None = None, **takes_s: float) -> None:
        pools = {key: target(key, takes_s=takes_s.get(key, 0.010)) for key in ("pool_a", "pool_b")}
        super().__init__({key: (one, FP32) for key, one in pools.items()}, homes)
        self.a, self.b = pools["pool_a"], pools["pool_b"]

    def _manifest(self, name: str, version: str) -> Manifest:
        return msgspec.structs.replace(minilm(), sequence=Stateful({"h": "next_h"}, ttl_s=TTL_S))

    def step(self, id: int | str = 7, *, start: bool = False, end: bool = False, budget_s: float = 1.0) -> Call:
        call = self.call(budget_s=budget_s)
        parameters = {"sequence_id": id, "sequence_start": start, "sequence_end": end}
        return msgspec.structs.replace(call, request=msgspec.structs.replace(call.request, parameters=parameters))

    async def take(self, **how: bool | int | str) -> Reply:
        return await self.dispatcher.infer(self.step(**how))  # type: ignore[arg-type]

    def other(self, reply: Reply) -> FakeTarget:
        assert reply.route is not None
        return self.b if reply.route.served_by == "pool/a" else self.a


@on_virtual_time
async def test_all_steps_go_where_the_first_was_answered() -> None:
    scene = Remembering()
    first = await scene.take(start=True)
    home, other = (scene.a, scene.b) if scene.other(first) is scene.b else (scene.b, scene.a)
    # By itself placement would turn away from a target that is so busy.
    scene.fleet.targets[home.id].queue_estimate.report(LoadReport(1, 1, 40, 1, 0.4), "link", clock.now())
    elsewhere = await scene.dispatcher.infer(scene.call())
    assert elsewhere.route is not None
    assert elsewhere.route.served_by == other.id
    other.seen.clear()
    replies = [await scene.take() for _ in range(3)]
    assert {reply.route.reason for reply in replies if reply.route is not None} == {"bound"}
    assert len(home.seen) == 4
    assert other.seen == []
    await scene.take(end=True)
    assert len(scene.dispatcher.affinity) == 0


@on_virtual_time
async def test_a_silent_step_is_neither_hedged_nor_moved() -> None:
    scene = Remembering(pool_a=0.9, pool_b=0.9)
    await scene.take(start=True)
    await scene.take()
    assert len(scene.a.seen) + len(scene.b.seen) == 2
    assert scene.a.cancelled + scene.b.cancelled == 0


@on_virtual_time
@pytest.mark.parametrize("error", [Overloaded("full"), Unreachable("gone"), Disconnected("cut off")])
async def test_a_step_that_fails_is_not_tried_elsewhere(error: Exception) -> None:
    scene = Remembering()
    first = await scene.take(start=True)
    other = scene.other(first)
    home = scene.b if other is scene.a else scene.a
    home.error = error
    with pytest.raises((Overloaded, Unreachable, NothingAlive)):
        await scene.take()
    assert other.seen == []
    assert len(home.seen) == 2, "once for the start, once for the step"


@on_virtual_time
async def test_a_step_whose_target_is_gone_says_so() -> None:
    scene = Remembering()
    first = await scene.take(start=True)
    assert first.route is not None
    scene.fleet.remove(first.route.served_by)
    with pytest.raises(NothingAlive, match="remembers this sequence and cannot be asked now; begin it anew"):
        await scene.take()
    assert scene.other(first).seen == []


@on_virtual_time
async def test_a_new_start_goes_anywhere_and_another_sequence_too() -> None:
    scene = Remembering()
    await scene.take(start=True)
    await asyncio.gather(*[scene.take(id=f"s{n}", start=True) for n in range(8)])
    assert scene.a.seen and scene.b.seen
    assert len(scene.dispatcher.affinity) == 9


@on_virtual_time
async def test_tenants_with_the_same_number_have_sequences_of_their_own() -> None:
    scene = Remembering()
    for tenant in ("acme", "rival", "acme#key:3f9a"):
        await scene.dispatcher.infer(msgspec.structs.replace(scene.step(start=True), tenant=tenant))
    seen = [request.parameters["sequence_id"] for one in (scene.a, scene.b) for request, *_ in one.seen]
    assert sorted(map(str, seen)) == ["acme/7", "acme/7", "rival/7"]
    assert len(scene.dispatcher.affinity) == 2


@on_virtual_time
async def test_what_is_no_sequence_is_placed_as_ever_and_a_wrong_one_refused() -> None:
    scene = Remembering()
    await scene.dispatcher.infer(scene.step(id=0))
    assert len(scene.dispatcher.affinity) == 0
    with pytest.raises(InvalidRequest, match="sequence_id"):
        await scene.dispatcher.infer(scene.step(id=-3))


def test_what_is_remembered_is_bounded_in_time_and_number() -> None:
    affinity = Affinity(most=2)
    for n in (1, 2, 3):
        affinity.answered("m", SequenceStep(n, True, False), f"pool/{n}", until=10.0)
    assert [affinity.home("m", n, 5.0) for n in (1, 2, 3)] == [None, "pool/2", "pool/3"]
    affinity.answered("m", SequenceStep(2, False, False), "pool/2", until=20.0)
    affinity.answered("m", SequenceStep(4, True, False), "pool/4", until=20.0)
    assert [affinity.home("m", n, 5.0) for n in (2, 3, 4)] == ["pool/2", None, "pool/4"]
    assert affinity.home("m", 2, 20.0) is None
    assert affinity.home("other", 4, 5.0) is None
    assert repr(affinity) == "<Affinity of 2 sequences>"


KEY = "tidegate-sequence-home"


def echoed(call: Call, token: str, *, by: str = "header") -> Call:
    """A step with the token that its client got."""
    if by == "header":
        return msgspec.structs.replace(call, headers={KEY: token})
    parameters = {**call.request.parameters, KEY: token}
    return msgspec.structs.replace(call, request=msgspec.structs.replace(call.request, parameters=parameters))


@pytest.mark.parametrize("by", ["header", "parameter"])
@pytest.mark.parametrize("busy", ["a", "b"])
@on_virtual_time
async def test_a_step_that_comes_to_another_gateway_goes_to_the_home_that_its_client_brings(busy: str, by: str) -> None:
    first, second = (Remembering(SequenceHomes([b"k" * 32])) for _ in range(2))
    first.fleet.targets[f"pool/{busy}"].queue_estimate.report(LoadReport(1, 1, 40, 1, 0.4), "link", clock.now())
    reply = await first.take(start=True)
    assert reply.route is not None and reply.route.served_by != f"pool/{busy}"
    step = echoed(second.step(), reply.sequence_home, by=by)
    answer = await second.dispatcher.infer(step)
    assert answer.route is not None
    assert (answer.route.served_by, answer.route.reason) == (reply.route.served_by, "bound")
    assert answer.sequence_home, "each answer has one, with the time that the state is kept from now"
    last = await second.dispatcher.infer(echoed(second.step(end=True), answer.sequence_home, by=by))
    assert last.sequence_home == ""


@on_virtual_time
async def test_a_home_that_is_gone_is_named_and_one_of_another_sequence_is_refused() -> None:
    first, second = (Remembering(SequenceHomes([b"k" * 32])) for _ in range(2))
    reply = await first.take(start=True)
    assert reply.route is not None
    home = second.a if reply.route.served_by == "pool/a" else second.b
    with pytest.raises(InvalidRequest, match="not signed for this sequence"):
        await second.dispatcher.infer(echoed(second.step(8), reply.sequence_home))
    second.fleet.remove(home.id)
    with pytest.raises(NothingAlive, match=f"{home.id} remembers this sequence"):
        await second.dispatcher.infer(echoed(second.step(), reply.sequence_home))


@on_virtual_time
async def test_without_a_key_a_token_is_neither_given_nor_passed_on() -> None:
    scene = Remembering()
    assert (await scene.take(start=True)).sequence_home == ""
    await scene.dispatcher.infer(echoed(scene.step(), "anything", by="parameter"))
    seen = [*scene.a.seen, *scene.b.seen]
    assert len(seen) == 2
