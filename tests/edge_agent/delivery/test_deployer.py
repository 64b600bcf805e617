"""The deployer's own clock: real files and steps, on virtual time, where nothing is loaded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from edge_agent.core.edge_queue import EdgeQueue
from edge_agent.core.rollout_machine import Rollout
from edge_agent.delivery.deployer import Deployer
from edge_agent.delivery.documents import TrustedDocuments
from edge_agent.delivery.journal import DeploymentJournal
from edge_agent.delivery.model_store import ModelStore
from edge_agent.delivery.preconditions import DeviceResources
from edge_agent.delivery.steps import RolloutSteps
from edge_agent.serving.host import EdgeHost
from edge_agent.serving.runner_set import RunnerSet
from edge_agent.serving.scheduler import EdgeScheduler
from tests.support.bad_block import on_a_bad_block
from tests.support.edge.rollout_edge import AUTHOR, SCOPE
from tests.support.edge.rollouts import made
from tests.support.loop import on_virtual_time
from tidegate import clock
from tidegate.fleet.conditions import DeviceConditions
from tidegate.fleet.reported import RolloutState
from tidegate.rollout.desired import DesiredConfiguration
from tidegate.rollout.plan import Net
from tidegate.security.attestation.keys import read_allowed

GROUP = "group/kiosks"


class AtOnce(ThreadPoolExecutor):
    """Does disk work on the spot, since virtual time does not wait for a thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


def no_answer(_: DesiredConfiguration) -> str:
    raise LookupError("nobody knows")


def no_runner(*_: Any) -> Any:
    raise AssertionError("nothing is loaded in these tests")


@asynccontextmanager
async def steps_on_a_paid_link(store: ModelStore) -> AsyncIterator[tuple[RolloutSteps, RunnerSet]]:
    asyncio.get_running_loop().set_default_executor(AtOnce())
    async with EdgeScheduler(EdgeQueue(max_size=1)) as scheduler:
        host = EdgeHost("kiosk-1", [], scheduler, epoch=lambda: 1)
        async with RunnerSet(host, no_runner) as serving:
            works = RolloutSteps(
                store,
                serving,
                statics={},
                allowed_engines=("onnx",),
                device=lambda: DeviceResources(DeviceConditions(metered=True), None, 1 << 40, 1 << 40),
                linked=lambda: True,
                draw=lambda: 0.5,
                on_change=lambda: None,
            )
            yield works, serving


@asynccontextmanager
async def on_a_paid_link(
    folder: Path, *, why_not: Callable[[DesiredConfiguration], str] = lambda _: ""
) -> AsyncIterator[Deployer]:
    store = ModelStore(folder / "rollout")
    async with steps_on_a_paid_link(store) as (works, serving):
        keys = read_allowed(AUTHOR.trust_file(folder / "trusted"), what="keys")
        documents = TrustedDocuments(store.root, scopes=(SCOPE, GROUP), pinned=keys, why_not=why_not)
        journal = DeploymentJournal(store.root / "journal.json")
        async with Deployer(store, journal, documents, works, routed=serving.routed) as deployer:
            yield deployer


@pytest.mark.slow
@on_virtual_time
async def test_a_rollout_that_waits_is_given_up_at_its_deadline_and_not_before(tmp_path: Path) -> None:
    plan = made("2").plan(net=Net(deadline_s=7200.0))
    async with on_a_paid_link(tmp_path) as deployer:
        deployer.take(SCOPE, AUTHOR.message(1, plan, urls=["http://artefacts.invalid"]))
        began_at = clock.now()
        await clock.sleep(7000.0)
        assert [found.state for found in deployer.rollouts.models] == [RolloutState.DEFERRED]
        while deployer.busy:
            await clock.sleep(10.0)
        assert 7190.0 <= clock.now() - began_at <= 7220.0
        (found,) = deployer.rollouts.models
        assert found.reason.startswith("timeout: deferred took longer than it may, last: metered")


@pytest.mark.parametrize("place", ["desired/device+kiosk-1.json", "journal.json"])
@on_virtual_time
async def test_one_bad_block_keeps_no_later_document_away(tmp_path: Path, place: str) -> None:
    async with on_a_paid_link(tmp_path) as deployer:
        deployer.take(SCOPE, AUTHOR.message(1, made("2").plan(), urls=["http://artefacts.invalid"]))
        deployer.take(GROUP, AUTHOR.message(1, group="kiosks"))
        await clock.sleep(1.0)
        assert dict(deployer.rollouts.accepted) == {SCOPE: 1, GROUP: 1}
    on_a_bad_block(tmp_path / "rollout" / place)
    async with on_a_paid_link(tmp_path) as deployer:
        deployer.take(SCOPE, AUTHOR.message(2, made("3", factor=3.0).plan(), urls=["http://artefacts.invalid"]))
        await clock.sleep(60.0)
        assert deployer.disk_trouble == ""
        assert dict(deployer.rollouts.accepted) == {SCOPE: 2, GROUP: 1}
        assert [(found.version, found.state) for found in deployer.rollouts.models] == [("3", RolloutState.DEFERRED)]


@on_virtual_time
async def test_a_content_that_was_committed_while_its_soak_ended_otherwise_counts_as_healed(tmp_path: Path) -> None:
    store, one = ModelStore(tmp_path / "rollout"), made("2")
    store.prepare()
    content, files = one.plan().content, [file.sha256 for file in one.files]
    for file in files:
        store.path(file).write_bytes(b"rot")
    assert store.discard_damaged(content, files)
    for file in files:
        store.path(file).write_bytes(one.contents[file])
    store.stage("double", one.plan())
    rollout = Rollout("double", one.plan(), SCOPE, revision=1, generation=1, previous=0, state=RolloutState.ROLLED_BACK)
    async with steps_on_a_paid_link(store) as (works, _):
        await works.settle(rollout)
        assert not store.holds(content)
        await works.settle(replace(rollout, state=RolloutState.COMMITTED))
        assert store.holds(content)


@on_virtual_time
async def test_a_document_that_meets_a_defect_is_reported_and_takes_no_other_with_it(tmp_path: Path) -> None:
    async with on_a_paid_link(tmp_path, why_not=no_answer) as deployer:
        deployer.take(SCOPE, AUTHOR.message(4, configuration=DesiredConfiguration()))
        deployer.take(GROUP, AUTHOR.message(2, group="kiosks"))
        await clock.sleep(1.0)
        (refused,) = deployer.rollouts.refused
        assert (refused.scope, refused.revision) == (SCOPE, 4)
        assert refused.reason == "internal: LookupError('nobody knows')"
        assert dict(deployer.rollouts.accepted) == {GROUP: 2}
