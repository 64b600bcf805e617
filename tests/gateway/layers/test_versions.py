"""While a version is shipped: what a request without one gets, and that it is answered when the new one fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from gateway.catalog import Catalog
from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkUp
from gateway.core.versions.default_version import KnownVersions
from gateway.default_versions import DefaultVersions
from gateway.layers.stack import Service
from gateway.layers.versions import FIRST_FLIGHT, versions
from tests.gateway.layers.test_layers import REPLY, answers, call
from tests.support.gateway.fleets import fleet_of, offer, spec
from tests.support.loop import on_virtual_time
from tests.support.models.tiny_models import double_manifest
from tidegate import clock
from tidegate.fleet.offers import ModelState
from tidegate.models.manifest import Cost
from tidegate.outcome import InvalidRequest, ModelNotFound, NothingAlive, ServeError, Unreachable
from tidegate.token_sink import TokenBatch
from tidegate.types import Call, InferRequest, Reply

ONE = double_manifest()


class NothingSet:
    """No operator has two versions on trial."""

    def demanded(self, call: Call) -> str:
        return ""

    def tried(self, call: Call) -> str:
        return ""

    def watches(self, call: Call) -> bool:
        return False

    def answered(self, call: Call, version: str, reply: Reply, took_s: float) -> None:
        raise AssertionError

    def failed(self, call: Call, version: str, error: BaseException, took_s: float) -> None:
        raise AssertionError


NOTHING_SET = NothingSet()


def siblings(fleet: Fleet) -> DefaultVersions:
    """Versions 1 and 2 of minilm take and give the same, and 2 was shipped."""
    catalog = Catalog([replace(ONE, name="minilm")])
    catalog.ship([replace(ONE, name="minilm", version="2")])
    return DefaultVersions(catalog, fleet)


def fleet_with(state: ModelState = "ready") -> Fleet:
    """edge/a has version 1, edge/b version 2."""
    fleet = fleet_of()
    for name, version, standing in (("a", "1", "ready"), ("b", "2", state)):
        fleet.add(spec(f"edge/{name}"), clock.now())
        one = replace(offer(state=standing), version=version)
        fleet.fold(LinkUp(f"edge/{name}", f"edge/{name}", 1, (one,)), clock.now())
    return fleet


@on_virtual_time
async def test_a_request_gets_a_version_by_the_share_of_devices_and_a_named_one_is_kept() -> None:
    seen: list[str] = []

    async def inner(call: Call) -> Reply:
        seen.append(call.request.model_version)
        return REPLY

    draws = iter([0.49, 0.51])
    service = versions(siblings(fleet_with()), clock.now, lambda: next(draws), NOTHING_SET)(inner)
    await service(call(clock.now() + 1.0))
    await service(call(clock.now() + 1.0))
    await service(Call(InferRequest("minilm", (), "1"), "oip-http", clock.now(), clock.now() + 1.0))
    await service(Call(InferRequest("other", ()), "oip-http", clock.now(), clock.now() + 1.0))

    assert seen == ["1", "2", "1", ""]


@pytest.mark.parametrize("error", [NothingAlive("nobody"), Unreachable("it hung up")])
def test_when_the_new_version_fails_the_old_one_answers(error: ServeError) -> None:
    @on_virtual_time
    async def scenario() -> None:
        asked: list[tuple[str, float]] = []
        began_at = clock.now()

        async def inner(call: Call) -> Reply:
            assert call.deadline is not None
            asked.append((call.request.model_version, call.deadline - began_at))
            if call.request.model_version == "2":
                raise error
            return REPLY

        service = versions(siblings(fleet_with("soaking")), clock.now, lambda: 0.99, NOTHING_SET)(inner)
        assert await service(call(began_at + 1.0)) is REPLY
        assert asked == [("2", pytest.approx(FIRST_FLIGHT)), ("1", pytest.approx(1.0))]

    scenario()


@on_virtual_time
async def test_a_version_that_no_target_serves_is_not_asked_and_costs_no_budget() -> None:
    asked: list[tuple[str, float]] = []

    async def inner(call: Call) -> Reply:
        assert call.deadline is not None
        asked.append((call.request.model_version, call.deadline))
        raise NothingAlive("nobody")

    at = clock.now() + 1.0
    for fleet, wanted in ((fleet_with("bad"), ("1", at)), (fleet_of(), ("1", at))):
        with pytest.raises(NothingAlive):
            await versions(siblings(fleet), clock.now, lambda: 0.99, NOTHING_SET)(inner)(call(at))
        assert asked.pop() == wanted and asked == []


@on_virtual_time
async def test_devices_that_all_change_their_version_in_one_instant_are_asked_for_what_they_have_now() -> None:
    fleet, asked = fleet_of(), []

    def offers(version: str) -> None:
        fleet.fold(LinkUp("edge/a", "edge/a", 1, (replace(offer(), version=version),)), clock.now())

    async def inner(call: Call) -> Reply:
        asked.append(call.request.model_version)
        if call.request.model_version == "2":
            offers("1")  # in the moment in which the request was on its way
            raise NothingAlive("edge/a does not offer it")
        return REPLY

    fleet.add(spec("edge/a"), clock.now())
    offers("2")
    service = versions(siblings(fleet), clock.now, lambda: 0.0, NOTHING_SET)(inner)
    assert await service(call(clock.now() + 1.0)) is REPLY
    assert asked == ["2", "1"]

    fleet.fold(LinkUp("edge/a", "edge/a", 1, ()), clock.now())
    await clock.sleep(1.0)
    with pytest.raises(NothingAlive):
        await versions(siblings(fleet), clock.now, lambda: 0.0, NOTHING_SET)(nobody_serves)(call(clock.now() + 1.0))


async def nobody_serves(call: Call) -> Reply:
    raise NothingAlive("nobody offers it")


@on_virtual_time
async def test_a_version_that_is_committed_somewhere_gets_all_the_time_there_is() -> None:
    asked: list[tuple[str, float]] = []

    async def inner(call: Call) -> Reply:
        assert call.deadline is not None
        asked.append((call.request.model_version, call.deadline))
        return REPLY

    at = clock.now() + 1.0
    await versions(siblings(fleet_with("ready")), clock.now, lambda: 0.99, NOTHING_SET)(inner)(call(at))

    assert asked == [("2", at)]


@on_virtual_time
async def test_what_is_the_callers_fault_is_not_asked_twice() -> None:
    asked: list[str] = []

    async def inner(call: Call) -> Reply:
        asked.append(call.request.model_version)
        raise InvalidRequest("no such input")

    with pytest.raises(InvalidRequest):
        await versions(siblings(fleet_with()), clock.now, lambda: 0.0, NOTHING_SET)(inner)(call(clock.now() + 1.0))

    assert asked == ["1"]


@on_virtual_time
async def test_a_model_that_was_never_shipped_costs_nothing() -> None:
    def nobody() -> float:
        raise AssertionError("chance was asked")

    assert (
        await versions(
            DefaultVersions(Catalog([replace(ONE, name="minilm")]), fleet_with()), clock.now, nobody, NOTHING_SET
        )(answers)(call(clock.now() + 1.0))
        is REPLY
    )


def test_a_shipped_version_is_known_by_name_and_is_not_the_latest() -> None:
    catalog = Catalog([ONE])
    assert catalog.several("double") is None

    catalog.ship([replace(ONE, version="2"), replace(ONE, version="3", cost=Cost("bytes", "x"))])

    assert catalog.manifest("double").version == "1"
    assert catalog.manifest("double", "3").version == "3"
    known = catalog.several("double")
    assert known == KnownVersions(("1",), ("3", "2"), {"1": {"1", "2"}, "2": {"1", "2"}, "3": {"3"}}, rolled_out=True)
    assert DefaultVersions(catalog, fleet_of()).names("double") == ("1", "2")
    catalog.ship([replace(ONE, name="new", version="7")])
    assert catalog.manifest("new").version == "7"
    assert catalog.several("double") is known, "what is derived from it stays good"


class Collected:
    """A caller's sink."""

    def __init__(self) -> None:
        self.window = 64
        self.ids: list[int] = []

    def started(self, prompt_tokens: int, cached_tokens: int) -> None:
        assert not self.ids

    def put(self, batch: TokenBatch) -> None:
        assert batch.first == len(self.ids), "the text of another version"
        self.ids += batch.ids

    def on_credit(self, credit: Callable[[int], None]) -> None:
        credit(1)


def streaming(*, first_s: float, rest_s: float, fails: ServeError | None = None) -> tuple[Service, list[str]]:
    """Version 2 says a token after `first_s`, and its end comes `rest_s` later; version 1 answers at once."""
    asked: list[str] = []

    async def inner(call: Call) -> Reply:
        asked.append(call.request.model_version)
        assert call.deadline is not None and call.deadline - call.arrived_at == pytest.approx(1.0)
        assert call.tokens is not None and call.tokens.window == 64
        call.tokens.on_credit(lambda _: None)
        if call.request.model_version == "2":
            await clock.sleep(first_s)
        call.tokens.started(3, 0)
        call.tokens.put(TokenBatch(0, (7,)))
        if call.request.model_version == "2":
            await clock.sleep(rest_s)
            if fails is not None:
                raise fails
        call.tokens.put(TokenBatch(1, (8,)))
        return REPLY

    return inner, asked


@on_virtual_time
async def test_a_stream_that_has_begun_has_the_whole_time_also_of_a_version_that_soaks() -> None:
    inner, asked = streaming(first_s=0.1, rest_s=0.8)
    service = versions(siblings(fleet_with("soaking")), clock.now, lambda: 0.99, NOTHING_SET)(inner)
    sink = Collected()
    assert await service(replace(call(clock.now() + 1.0), tokens=sink)) is REPLY
    assert (asked, sink.ids) == (["2"], [7, 8])


@on_virtual_time
async def test_a_version_that_soaks_and_says_nothing_for_long_is_left_for_the_other() -> None:
    inner, asked = streaming(first_s=0.9, rest_s=0.0)
    service = versions(siblings(fleet_with("soaking")), clock.now, lambda: 0.99, NOTHING_SET)(inner)
    sink, began_at = Collected(), clock.now()
    assert await service(replace(call(clock.now() + 1.0), tokens=sink)) is REPLY
    assert (asked, sink.ids) == (["2", "1"], [7, 8])
    assert clock.now() - began_at == pytest.approx(FIRST_FLIGHT)


@pytest.mark.parametrize("error", [NothingAlive("nobody"), Unreachable("it hung up"), ModelNotFound("gone")])
def test_no_other_version_goes_on_with_a_text_that_has_begun(error: ServeError) -> None:
    @on_virtual_time
    async def scenario() -> None:
        inner, asked = streaming(first_s=0.1, rest_s=0.2, fails=error)
        service = versions(siblings(fleet_with("soaking")), clock.now, lambda: 0.99, NOTHING_SET)(inner)
        sink = Collected()
        with pytest.raises(type(error), match=error.message):
            await service(replace(call(clock.now() + 1.0), tokens=sink))
        assert (asked, sink.ids) == (["2"], [7])

    scenario()


@on_virtual_time
async def test_a_trial_is_told_of_a_candidate_that_says_nothing() -> None:
    told: list[tuple[str, str]] = []

    class Watching(NothingSet):
        def tried(self, call: Call) -> str:
            return "2"

        def watches(self, call: Call) -> bool:
            return True

        def answered(self, call: Call, version: str, reply: Reply, took_s: float) -> None:
            told.append((version, "answered"))

        def failed(self, call: Call, version: str, error: BaseException, took_s: float) -> None:
            assert isinstance(error, ServeError)
            told.append((version, error.message))

    inner, _ = streaming(first_s=0.9, rest_s=0.0)
    service = versions(siblings(fleet_with()), clock.now, lambda: 0.0, Watching())(inner)
    await service(replace(call(clock.now() + 1.0), tokens=Collected()))
    assert told == [("2", "no token came within 0.6 s"), ("1", "answered")]
