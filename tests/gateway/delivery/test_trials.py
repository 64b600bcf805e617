"""Trials of two versions: kept over a restart, counted by version, compared without delaying a caller."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from gateway.catalog import Catalog
from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkUp
from gateway.core.versions.traffic_split import InvalidSplit, TrafficSplit, TrafficSplits
from gateway.default_versions import DefaultVersions
from gateway.delivery import trials as trials_module
from gateway.delivery.trials import COMPARED_AT_ONCE, MAX_FILE_BYTES, SplitRequest, Trials, compare_outputs
from gateway.delivery.uninterrupted import uninterrupted
from gateway.layers.versions import FIRST_FLIGHT, versions
from gateway.operate.trial_report import trial_families, trial_rows
from gateway.operate.trial_routes import trial_routes
from tests.support.gateway.fleets import fleet_of, offer, spec
from tests.support.loop import on_virtual_time, settle
from tests.support.models.generative import TALKER
from tests.support.models.tiny_models import double_manifest
from tidegate import clock
from tidegate.arrays import array_to_tensor
from tidegate.config import ConfigError
from tidegate.outcome import InvalidRequest, Unreachable
from tidegate.servers.http_server import open_http_server
from tidegate.types import Call, Datatype, InferRequest, InferResponse, Reply, Route

ONE = double_manifest()
TWO = replace(ONE, version="2")
ODD = replace(ONE, version="3", outputs=(replace(ONE.outputs[0], name="z"),))


def fleet_serving(*versions: str) -> Fleet:
    """An edge for each version of `double`."""
    fleet = fleet_of()
    for version in versions:
        serve(fleet, f"edge/of-{version}", version)
    return fleet


def serve(fleet: Fleet, target: str, *versions: str) -> None:
    """The target serves these versions from now on, and no other."""
    if target not in fleet.targets:
        fleet.add(spec(target), clock.now())
    offers = tuple(replace(offer(), name="double", version=version) for version in versions)
    fleet.fold(LinkUp(target, target, 1, offers), clock.now())


def trials(
    file: Path | None = None,
    *,
    draw: float = 0.5,
    crowded: Callable[[], bool] = lambda: False,
    fleet: Fleet | None = None,
) -> Trials:
    served = fleet or fleet_serving("1", "2", "3")
    return Trials(file, DefaultVersions(Catalog([ONE, TWO, ODD]), served), lambda: draw, crowded)


def call(**changes: Any) -> Call:
    now = clock.now()
    return replace(Call(InferRequest("double", ()), "oip-http", now, now + 1.0), **changes)


def reply(version: str, *, turned: float = 0.0) -> Reply:
    rows = np.array([[1.0, 2.0], [np.cos(turned), np.sin(turned)]], dtype=np.float32)
    response = InferResponse("double", version, (array_to_tensor("y", rows, Datatype.FP32),))
    return Reply(response, route=Route("edge/a", "cheapest", "int8", provisional=version == "2"))


class Answers:
    """Answers each call with the version that it asks for, or with an error."""

    def __init__(self, **errors: Exception) -> None:
        self.asked: list[Call] = []
        self._errors = errors

    async def __call__(self, call: Call) -> Reply:
        self.asked.append(call)
        await clock.sleep(0.010)
        if error := self._errors.get(f"v{call.request.model_version}"):
            raise error
        return reply(call.request.model_version, turned=0.1 * float(call.request.model_version))


async def served(subject: Trials, inner: Answers, one: Call) -> Reply:
    return await versions(subject.defaults, clock.now, lambda: 0.5, subject)(inner)(one)


def series(subject: Trials) -> dict[tuple[str, ...], float]:
    """Those above zero: model, version, role and ending."""
    requests, _ = trial_families(subject)
    return {tuple(one.labels.values()): one.value for one in requests.samples if one.value}


@on_virtual_time
async def test_a_scrape_and_a_screen_set_both_versions_beside_each_other_for_as_long_as_the_trial_is_on() -> None:
    subject, inner = trials(draw=0.01), Answers(v2=Unreachable("it hung up"))
    async with subject:
        assert series(subject) == {} and trial_rows(subject) == []
        await subject.begin("double", SplitRequest("2", "1", share=0.05, tenants=("acme", "umbrella")))
        for _ in range(3):
            await served(subject, inner, call())

        assert series(subject) == {("double", "2", "candidate", "failed"): 3, ("double", "1", "standing", "in_time"): 3}
        (shown,) = trial_rows(subject)
        assert (shown["model"], shown["standing"], shown["candidate"], shown["tenants"]) == ("double", "1", "2", 2)
        assert (shown["figures"]["2"]["failed"], shown["figures"]["1"]["in_time"]) == (3, 3)

        await subject.call_back("double")
        assert series(subject) == {} and trial_rows(subject) == []


@on_virtual_time
async def test_a_share_goes_to_the_candidate_and_what_it_fails_the_standing_version_answers() -> None:
    subject, inner = trials(draw=0.01), Answers(v2=Unreachable("it hung up"))
    async with subject:
        await subject.begin("double", SplitRequest("2", "1", share=0.05))
        answer = await served(subject, inner, call())
        assert answer.response.model_version == "1"
        first, second = inner.asked
        assert first.deadline is not None
        assert second.deadline is not None
        assert first.deadline - first.arrived_at == pytest.approx(FIRST_FLIGHT)
        figures = subject.watched["double"].figures
        assert (figures["2"].failures, figures["1"].endings) == ({"unreachable": 1}, {"in_time": 1})
        assert figures["1"].quantiles_s[0] == pytest.approx(0.010, rel=0.06), "the candidate's time is not its own"


@on_virtual_time
async def test_a_demanded_candidate_is_answered_by_itself_or_not_at_all() -> None:
    subject, inner = trials(), Answers(v2=Unreachable("it hung up"))
    async with subject:
        await subject.begin("double", SplitRequest("2", "1"))
        with pytest.raises(Unreachable):
            await served(subject, inner, call(headers={"tidegate-version": "candidate"}))
        by_parameter = InferRequest("double", (), parameters={"tidegate-version": "standing"})
        assert (await served(subject, inner, call(request=by_parameter))).response.model_version == "1"
        with pytest.raises(InvalidRequest, match="tidegate-version"):
            await served(subject, inner, call(request=by_parameter, headers={"tidegate-version": "2"}))


@on_virtual_time
async def test_a_tenants_requests_go_to_the_candidate_and_a_named_version_goes_nowhere_else() -> None:
    subject, inner = trials(), Answers()
    async with subject:
        await subject.begin("double", SplitRequest("2", "1", tenants=("acme",)))
        assert (await served(subject, inner, call(tenant="acme"))).response.model_version == "2"
        assert (await served(subject, inner, call())).response.model_version == "1"
        named = call(tenant="acme", request=InferRequest("double", (), "1"))
        assert (await served(subject, inner, named)).response.model_version == "1"
        assert subject.watched["double"].figures["2"].provisional == 1


@on_virtual_time
async def test_a_compared_request_goes_to_both_versions_and_its_caller_does_not_wait_for_it() -> None:
    subject, inner = trials(), Answers()
    subject.ask = inner
    async with subject:
        await subject.begin("double", SplitRequest("2", "1", compare=1.0))
        began_at = clock.now()
        await served(subject, inner, call(tenant="acme", pin="edge"))
        assert clock.now() - began_at == pytest.approx(0.010)
        await clock.sleep(0.1)
        again = inner.asked[1]
        assert (again.request.model_version, again.priority, again.tenant, again.pin) == ("2", 4, "", "edge")
        agreement = subject.watched["double"].agreement
        assert (agreement.rows, agreement.agreeing) == (2, 2)
        assert agreement.cosine_least == pytest.approx(np.cos(0.1), abs=1e-6)


@on_virtual_time
async def test_comparisons_are_few_at_a_time_none_in_a_crowd_and_gone_at_the_end() -> None:
    crowded = False
    subject, inner = trials(crowded=lambda: crowded), Answers(v2=Unreachable("it hung up"))
    subject.ask = inner
    async with subject:
        await subject.begin("double", SplitRequest("2", "1", compare=1.0))
        for _ in range(3 * COMPARED_AT_ONCE):
            subject.answered(call(), "1", reply("1"), 0.01)
        await settle()
        assert len(inner.asked) == COMPARED_AT_ONCE
        await clock.sleep(0.1)
        assert subject.watched["double"].agreement.unanswered == COMPARED_AT_ONCE
        crowded = True
        subject.answered(call(), "1", reply("1"), 0.01)
        await settle()
        assert len(inner.asked) == COMPARED_AT_ONCE
        crowded = False
        subject.answered(call(), "1", reply("1"), 0.01)
    assert repr(subject) == "<Trials double, 0 comparisons>"


@on_virtual_time
async def test_splits_outlive_the_gateway_and_a_promoted_version_is_the_default_one(tmp_path: Path) -> None:
    file = tmp_path / "state" / "trials.json"
    async with trials(file) as first:
        await first.begin("double", SplitRequest("2", "1", share=0.5))
    async with trials(file) as second:
        assert second.splits == TrafficSplits({"double": TrafficSplit("1", "2", share=0.5)}, {"double": "1"})
        await second.promote("double")
        assert (await served(second, Answers(), call())).response.model_version == "2"
    async with trials(file) as third:
        assert third.splits == TrafficSplits({}, {"double": "2"})
        assert (await served(third, Answers(), call())).response.model_version == "2"
        with pytest.raises(InvalidSplit):
            await third.call_back("double")
        await third.begin("double", SplitRequest("1", "2", share=1.0))
        await third.call_back("double")
        assert third.splits.promoted == {"double": "2"}


@on_virtual_time
async def test_versions_that_take_or_give_something_else_are_no_trial() -> None:
    async with trials() as subject:
        with pytest.raises(InvalidSplit, match="differ in "):
            await subject.begin("double", SplitRequest("3", "1"))
        with pytest.raises(InvalidSplit, match="no version '9'"):
            await subject.begin("double", SplitRequest("9", "1"))
        assert subject.splits == TrafficSplits()


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b'{"split": {"m": {"standing": "1", "candidate": "1"}}}',
        b"[]",
        b'{"split": {"\xff": {}}}',
        b'{"other": ' + b"[" * 100_000,
    ],
    ids=["half", "same", "list", "no UTF-8", "deep"],
)
async def test_a_file_that_cannot_be_used_is_an_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "trials.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"trials.json \(key 'trials_file'\)"):
        async with trials(file):
            pass


def test_only_outputs_that_both_have_and_that_are_vectors_are_compared() -> None:
    one, other = reply("1").response, reply("2", turned=np.pi / 2).response
    cosines, same = compare_outputs(one, other)
    assert cosines == pytest.approx([1.0, 0.0], abs=1e-6)
    assert same == [True, False]
    assert compare_outputs(one, InferResponse("double", "2", ())) == ([], [])
    ids = array_to_tensor("y", np.array([[1, 2]]), Datatype.INT64)
    assert compare_outputs(one, InferResponse("double", "2", (ids,))) == ([], [])


@on_virtual_time
async def test_answers_that_are_generated_are_not_compared_and_their_versions_may_be_on_trial() -> None:
    fleet = fleet_of()
    for version in ("1", "2"):
        fleet.add(spec(f"edge/{version}"), clock.now())
        one = replace(offer(), name="talker", version=version)
        fleet.fold(LinkUp(f"edge/{version}", f"edge/{version}", 1, (one,)), clock.now())
    defaults = DefaultVersions(Catalog([TALKER, replace(TALKER, version="2")]), fleet)
    one = Trials(None, defaults, lambda: 0.5, lambda: False)
    with pytest.raises(
        InvalidSplit, match=r"talker generates: .* Leave --compare out; .* `tidegate model golden talker`"
    ):
        await one.begin("talker", SplitRequest("2", standing="1", share=0.2, compare=0.1))
    await one.begin("talker", SplitRequest("2", standing="1", share=0.2))
    assert one.splits.split["talker"].share == 0.2


async def test_an_order_that_comes_in_several_packets_is_read_whole_and_one_that_is_too_long_is_refused() -> None:
    subject = trials()
    order = {"standing": "1", "candidate": "2", "share": 0.1, "tenants": [f"tenant-{number}" for number in range(500)]}
    whole = msgspec.json.encode(order)

    async def packets(body: bytes) -> AsyncIterator[bytes]:
        for at in range(0, len(body), 1000):
            yield body[at : at + 1000]
            await clock.sleep(0.001)

    door = open_http_server(trial_routes(subject), "127.0.0.1", 0, key="x", max_body_bytes=2**20, grace_s=0.1)
    async with subject, door as address, aiohttp.ClientSession() as http:
        url = f"{address}/v1/versions/double/trial"
        async with http.put(url, data=packets(whole)) as answer:
            assert answer.status == 200, await answer.text()
        assert len(subject.splits.split["double"].tenants) == 500
        async with http.put(url, data=whole + b" " * 2**18) as answer:
            assert answer.status == 413


async def test_splits_that_could_not_be_read_again_are_not_begun(tmp_path: Path) -> None:
    file = tmp_path / "trials.json"
    async with trials(file) as subject:
        await subject.begin("double", SplitRequest("2", "1", share=0.1))
        kept = file.read_bytes()
        with pytest.raises(InvalidSplit, match=f"at most {MAX_FILE_BYTES} can be kept"):
            await subject.begin("double", SplitRequest("2", "1", tenants=("t" * MAX_FILE_BYTES,)))
        assert file.read_bytes() == kept and not subject.splits.split["double"].tenants


async def test_a_credential_with_limits_of_its_own_is_of_its_tenant() -> None:
    async with trials() as subject:
        await subject.begin("double", SplitRequest("2", "1", tenants=("acme",)))
        tried = [subject.tried(call(tenant=tenant)) for tenant in ("acme", "acme#key:3f9a", "acmes")]
    assert tried == ["2", "2", ""]


async def test_an_order_whose_sender_leaves_while_it_is_written_holds_whole_and_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, writing, goes_on = tmp_path / "trials.json", threading.Event(), threading.Event()
    write = trials_module._write  # noqa: SLF001  # made slow, as a disk is

    def slowly(path: Path, splits: TrafficSplits) -> None:
        writing.set()
        assert goes_on.wait(10.0)
        write(path, splits)

    async with trials(file) as subject:
        await subject.begin("double", SplitRequest("2", "1", share=0.1))
        monkeypatch.setattr(trials_module, "_write", slowly)
        promoting = asyncio.create_task(uninterrupted(subject.promote("double")))
        assert await asyncio.to_thread(writing.wait, 10.0)
        promoting.cancel()
        again = asyncio.create_task(subject.begin("double", SplitRequest("1", "2", share=0.2)))
        await clock.sleep(0.05)
        goes_on.set()
        await asyncio.wait([promoting, again])
        assert promoting.cancelled() and again.exception() is None
        kept = msgspec.json.decode(file.read_bytes(), type=TrafficSplits)
        assert kept == subject.splits and kept.split["double"].candidate == "1"
