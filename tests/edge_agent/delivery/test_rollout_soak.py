"""A new generation soaks under real requests: crashes, memory, disk, removal, and superseding documents."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from edge_agent.app import EdgeApp
from edge_agent.core.rollout_machine import Rollout
from edge_agent.delivery import deployer, model_store, preconditions, steps
from edge_agent.delivery.deployment import Deployment
from edge_agent.delivery.journal import DeploymentJournal
from edge_agent.delivery.model_store import ModelStore
from edge_agent.delivery.verifying import verify
from edge_agent.serving.catalogue import read_entry
from tests.support.bad_block import on_a_bad_block
from tests.support.edge.rollout_edge import AUTHOR, SCOPE, answer, ask, edge, report, settled
from tests.support.edge.rollouts import ArtefactServer, Author, eventually, made
from tidegate import clock
from tidegate.fleet.conditions import DeviceConditions
from tidegate.fleet.reported import RolloutState
from tidegate.models.digest import sha256_of
from tidegate.models.repository import RepositoryError
from tidegate.models.trusted_digests import TrustedDigests
from tidegate.rollout.plan import ModelPlan, Soak
from tidegate.rollout.signing import public_text

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def linked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the fleet can be reached: `linked[0]`."""
    state = [True]

    def deployment(*args: Any, **collaborators: Any) -> Deployment:
        return Deployment(*args, **{**collaborators, "linked": lambda: state[0]})

    monkeypatch.setattr("edge_agent.app.Deployment", deployment)
    return state


@asynccontextmanager
async def traffic(app: EdgeApp, seen: set[tuple[str, float]]) -> AsyncIterator[None]:
    """Send requests all the while; answers are added to `seen`, and a refusal fails the test."""

    async def ask_on() -> None:
        while True:
            seen.add(await answer(app))

    asking = asyncio.create_task(ask_on())
    try:
        yield
        assert not asking.done(), "a request was not answered"
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


def in_state(app: EdgeApp, state: RolloutState, reason: str = "") -> Callable[[], bool]:
    def look() -> bool:
        found = report(app)
        return found is not None and found.state is state and found.reason.startswith(reason)

    return look


async def test_requests_are_answered_all_the_while_and_real_ones_make_the_soak(
    folder: Path, server: ArtefactServer
) -> None:
    seen: set[tuple[str, float]] = set()
    async with edge(folder) as app:
        ask(app, server, 1, made("2", factor=5.0), soak=Soak(0.0, min_requests=50))
        await eventually(in_state(app, RolloutState.ACTIVE), say=lambda: report(app))
        assert [one.state for one in app.host.offers()] == ["soaking"]
        async with traffic(app, seen):
            found = await settled(app, 1)
        assert found.state is RolloutState.COMMITTED
        assert seen <= {("1", 6.0), ("2", 15.0)}
        await eventually(lambda: [one.state for one in app.host.offers()] == ["ready"])


async def test_without_a_link_it_neither_commits_nor_goes_back_not_even_over_orderly_restarts(
    folder: Path, server: ArtefactServer, linked: list[bool]
) -> None:
    linked[0] = False
    soak = Soak(0.001, timeout_s=0.001, min_requests=1, max_exits=1)
    async with edge(folder) as app:
        ask(app, server, 1, made("2", factor=5.0), soak=soak)
        await eventually(in_state(app, RolloutState.ACTIVE), say=lambda: report(app))
    async with edge(folder) as app:
        await eventually(in_state(app, RolloutState.ACTIVE), say=lambda: report(app))
        assert await answer(app) == ("2", 15.0)
        assert in_state(app, RolloutState.ACTIVE)()
        linked[0] = True
        assert (await settled(app, 1)).state is RolloutState.COMMITTED


async def test_a_worker_that_dies_thrice_while_it_soaks_is_a_crash_loop(folder: Path, server: ArtefactServer) -> None:
    async with edge(folder) as app:
        ask(app, server, 1, made("2", factor=5.0), soak=Soak(3600.0))
        for _ in range(3):
            await eventually(in_state(app, RolloutState.ACTIVE), say=lambda: report(app))
            runner = app.host.routed("double")
            assert runner is not None
            await eventually(lambda: runner.state == "ready" or in_state(app, RolloutState.ROLLED_BACK)())  # noqa: B023
            before = runner.exits
            _kill_newest_worker()
            await eventually(lambda: runner.exits > before)  # noqa: B023
        found = await settled(app, 1)
        assert found.state is RolloutState.ROLLED_BACK
        assert found.reason.startswith("crash_loop: 3 exits")
        assert await answer(app) == ("1", 6.0)


async def test_another_wish_ends_a_soak_and_the_old_generation_answers_until_the_next(
    folder: Path, server: ArtefactServer
) -> None:
    async with edge(folder) as app:
        ask(app, server, 1, made("2", factor=5.0), soak=Soak(3600.0))
        await eventually(in_state(app, RolloutState.ACTIVE), say=lambda: report(app))
        ask(app, server, 2, made("3", factor=7.0))
        assert (await settled(app, 2)).state is RolloutState.COMMITTED
        assert await answer(app) == ("3", 21.0)
        assert {one.models["double"].version for one in ModelStore(folder / "state" / "rollout").kept()} == {"3"}


async def test_what_is_removed_falls_back_to_the_static_model_and_leaves_nothing(
    folder: Path, server: ArtefactServer
) -> None:
    async with edge(folder) as app:
        for revision, factor in ((1, 5.0), (2, 7.0), (3, 9.0)):
            ask(app, server, revision, made(str(revision + 1), factor=factor))
            await settled(app, revision)
        root = folder / "state" / "rollout"
        await eventually(lambda: len(list((root / "versions").iterdir())) == 2, say=lambda: "keep is 2")
        app.deployment.take(SCOPE, AUTHOR.message(4, remove=("double",)))
        await eventually(lambda: report(app) is None)
        await eventually(lambda: not any((root / "models" / "sha256").iterdir()))
        assert await answer(app) == ("1", 6.0)


async def test_with_too_little_memory_it_waits_or_stops_the_old_one_first(
    folder: Path, server: ArtefactServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preconditions, "free_memory_bytes", lambda: 1000)
    async with edge(folder) as app:
        one = made("2", factor=5.0)
        ask(app, server, 1, one, ram_bytes=10_000)
        await eventually(in_state(app, RolloutState.DEFERRED, "ram: 13000 bytes"), say=lambda: report(app))
        ask(app, server, 2, one, ram_bytes=10_000, activate="stop_start")
        assert (await settled(app, 2)).state is RolloutState.COMMITTED
        assert await answer(app) == ("2", 15.0)
        bad = made("3", factor=7.0, wrong=1.0)
        ask(app, server, 3, bad, ram_bytes=10_000, activate="stop_start", probe=bad.probe(atol=0.1))
        found = await settled(app, 3)
        assert (found.state, found.running) == (RolloutState.ROLLED_BACK, "2")
        assert await answer(app) == ("2", 15.0)


async def test_a_rollback_that_the_journal_cannot_record_brings_the_old_generation_back_once(
    folder: Path, server: ArtefactServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preconditions, "free_memory_bytes", lambda: 1000)
    failed = failing_journal(monkeypatch, lambda rollout, before: rollout.state is RolloutState.ROLLED_BACK, times=3)
    async with edge(folder) as app:
        bad = made("3", factor=7.0, wrong=1.0)
        ask(app, server, 1, bad, ram_bytes=10_000, activate="stop_start", probe=bad.probe(atol=0.1))
        found = await settled(app, 1)
        assert (found.state, found.running, len(failed)) == (RolloutState.ROLLED_BACK, "1", 3)
        assert app.deployment.serving.runners == (app.host.routed("double"),)
        assert await answer(app) == ("1", 6.0)


async def test_a_rollback_before_the_old_generation_was_stopped_leaves_it_as_it_is(
    folder: Path, server: ArtefactServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_: Any) -> Any:
        raise RepositoryError("it is gone")

    monkeypatch.setattr(preconditions, "free_memory_bytes", lambda: 1000)
    monkeypatch.setattr(steps, "read_entry", unreadable)
    async with edge(folder) as app:
        before = app.host.routed("double")
        ask(app, server, 1, made("2", factor=5.0), ram_bytes=10_000, activate="stop_start")
        assert (await settled(app, 1)).reason == "load: it is gone"
        assert app.deployment.serving.runners == (before,)
        assert await answer(app) == ("1", 6.0)


async def test_an_exit_that_the_journal_has_is_not_counted_again_when_the_soak_begins_anew(
    folder: Path, server: ArtefactServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = DeploymentJournal(folder / "state" / "rollout" / "journal.json")

    def recorded() -> Rollout:
        journal.open()
        return journal.records["double"]

    one = made("2", factor=5.0)
    failed = failing_journal(monkeypatch, lambda rollout, before: rollout.revision == 2 != before, times=2)
    async with edge(folder) as app:
        ask(app, server, 1, one, soak=Soak(3600.0))
        await eventually(in_state(app, RolloutState.ACTIVE), say=lambda: report(app))
        _kill_newest_worker()
        await eventually(lambda: recorded().exits == 1)
        ask(app, server, 2, one, soak=Soak(0.0, min_requests=1))
        await eventually(lambda: recorded().revision == 2)
        runner = app.host.routed("double")
        assert runner is not None
        await eventually(lambda: runner.state == "ready")
        assert await answer(app) == ("2", 15.0)
        assert (await settled(app, 2)).state is RolloutState.COMMITTED
        assert (len(failed), recorded().exits) == (2, 1)


async def test_a_full_disk_and_a_paid_link_are_waited_out_and_the_deadline_ends_it(
    folder: Path, server: ArtefactServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelStore, "free_bytes", lambda _: 100)
    async with edge(folder) as app:
        one = made("2", factor=5.0)
        ask(app, server, 1, one)
        await eventually(in_state(app, RolloutState.DEFERRED, "disk: "), say=lambda: report(app))
        monkeypatch.undo()
        monkeypatch.setattr(app.deployment, "_conditions", lambda: DeviceConditions(metered=True))
        await eventually(in_state(app, RolloutState.DEFERRED, "metered: "), say=lambda: report(app))
        assert server.sent_bytes == 0
        ask(app, server, 2, one, net=replace(one.plan().net, deadline_s=0.0))
        found = await settled(app, 2)
        assert found.reason.startswith("timeout: deferred took longer than it may, last: metered")
        assert await answer(app) == ("1", 6.0)


async def test_keys_are_handed_over_for_good_by_a_document_that_both_have_signed(
    folder: Path, server: ArtefactServer
) -> None:
    heir = Author(9)
    new_key = public_text(heir.key.public_key().public_bytes_raw())
    async with edge(folder) as app:
        app.deployment.take(SCOPE, AUTHOR.message(1, keys=(new_key,), signers=(AUTHOR.key, heir.key)))
        await eventually(lambda: _accepted(app) == 1)
    async with edge(folder) as app:
        ask(app, server, 2, made("2", factor=5.0))
        await eventually(lambda: bool(app.deployment.rollouts and app.deployment.rollouts.refused))
        ask(app, server, 2, made("2", factor=5.0), heir)
        assert (await settled(app, 2)).state is RolloutState.COMMITTED


async def test_a_committed_model_whose_files_rotted_falls_back_to_the_one_before_until_they_are_fetched_again(
    folder: Path, server: ArtefactServer
) -> None:
    newest = made("3", factor=7.0)
    async with edge(folder) as app:
        ask(app, server, 1, made("2", factor=5.0))
        await settled(app, 1)
        ask(app, server, 2, newest)
        await settled(app, 2)
    (artefact,) = (folder / "state" / "rollout" / "versions").glob("*/double/3/int8.onnx")
    with artefact.open("r+b") as rotten:  # and so is the file under its digest: it is the same one
        rotten.write(b"rot")
    server.status[newest.files[1].sha256] = 503
    async with edge(folder) as app:
        await eventually(in_state(app, RolloutState.DOWNLOADING), say=lambda: report(app))
        assert await answer(app) == ("2", 15.0)
        server.status.clear()
        found = await settled(app, 2)
        assert (found.state, found.running) == (RolloutState.COMMITTED, "3")
        assert found.fetched_bytes == newest.files[1].size_bytes
        assert await answer(app) == ("3", 21.0)
    async with edge(folder) as app:
        assert await answer(app) == ("3", 21.0)


async def test_a_committed_generation_on_a_bad_block_falls_back_to_the_one_before_until_it_is_rolled_out_again(
    folder: Path, server: ArtefactServer
) -> None:
    async with edge(folder) as app:
        ask(app, server, 1, made("2", factor=5.0))
        await settled(app, 1)
        ask(app, server, 2, made("3", factor=7.0))
        await settled(app, 2)
    sent_bytes = server.sent_bytes
    on_a_bad_block(folder / "state" / "rollout" / "generations" / "2.json")
    async with edge(folder) as app:
        assert [runner.manifest.version for runner in app.deployment.runners] == ["2"], "what answers first"
        await eventually(lambda: (found := report(app)) is not None and found.generation == 3, say=lambda: report(app))
        assert (await settled(app, 2)).state is RolloutState.COMMITTED
        assert await answer(app) == ("3", 21.0)
    assert server.sent_bytes == sent_bytes, "its files were here all the while"
    async with edge(folder) as app:
        assert await answer(app) == ("3", 21.0)


@pytest.mark.parametrize("at", [0, 20_000])  # where it is no model any more, and among its unused weights
async def test_files_of_an_earlier_rollout_that_rotted_are_fetched_again(
    folder: Path, server: ArtefactServer, at: int
) -> None:
    one = made("2", factor=5.0, padding_bytes=50_000)
    async with edge(folder) as app:
        ask(app, server, 1, one)
        await settled(app, 1)
        ask(app, server, 2, made("3", factor=7.0))
        await settled(app, 2)
        with ModelStore(folder / "state" / "rollout").path(one.files[1].sha256).open("r+b") as rotten:
            rotten.seek(at)
            rotten.write(b"rotten")
        ask(app, server, 3, one)
        found = await settled(app, 3)
        assert (found.state, found.fetched_bytes) == (RolloutState.COMMITTED, one.files[1].size_bytes)
        assert await answer(app) == ("2", 15.0)


async def test_what_rots_while_a_rollout_waits_is_fetched_again_after_a_restart(
    folder: Path, server: ArtefactServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made("2", factor=5.0, padding_bytes=50_000)
    with monkeypatch.context() as patch:
        patch.setattr(preconditions, "free_memory_bytes", lambda: 1000)
        async with edge(folder) as app:
            ask(app, server, 1, one, probe=one.probe(atol=1e-3), ram_bytes=10_000)
            await eventually(in_state(app, RolloutState.DEFERRED, "ram: "), say=lambda: report(app))
    sent_bytes = server.sent_bytes
    with ModelStore(folder / "state" / "rollout").path(one.files[1].sha256).open("r+b") as rotten:
        rotten.seek(20_000)  # among its unused weights
        rotten.write(b"rot")
    async with edge(folder) as app:
        assert (await settled(app, 1)).state is RolloutState.COMMITTED
        assert server.sent_bytes - sent_bytes == one.files[1].size_bytes
        assert await answer(app) == ("2", 15.0)


async def test_what_a_rollout_has_fetched_itself_is_not_read_back_again_however_often_it_waits(
    folder: Path, server: ArtefactServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def recorded(path: Path, **keys: Any) -> str:
        read.append(path.name)
        return sha256_of(path, **keys)

    monkeypatch.setattr(model_store, "sha256_of", recorded)
    async with edge(folder) as app:
        with monkeypatch.context() as patch:
            patch.setattr(preconditions, "free_memory_bytes", lambda: 1000)
            ask(app, server, 1, made("2", factor=5.0), ram_bytes=10_000)
            await eventually(in_state(app, RolloutState.DEFERRED, "ram: "), say=lambda: report(app))
        assert (await settled(app, 1)).state is RolloutState.COMMITTED
    assert read == []


async def test_a_file_that_cannot_be_read_where_it_is_verified_is_fetched_again(
    folder: Path, server: ArtefactServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, failed = made("2", factor=5.0), list[str]()
    (manifest,) = (file for file in one.files if file.path == "model.yaml")

    async def verified(model: str, plan: ModelPlan, store: ModelStore, *rest: Any) -> None:
        if not failed:
            failed.append(model)
            store.path(manifest.sha256).write_bytes(b"rot")
            raise OSError(errno.EIO, "Input/output error")
        await verify(model, plan, store, *rest)

    monkeypatch.setattr(steps, "verify", verified)
    async with edge(folder) as app:
        ask(app, server, 1, one)
        found = await settled(app, 1)
        assert (found.state, found.reason) == (RolloutState.COMMITTED, "")
        assert found.fetched_bytes == one.plan().size_bytes + manifest.size_bytes


class FailingDisk:
    """Does what a function does, after its first calls have failed as a disk does."""

    def __init__(self, function: Callable[..., Any], *, as_repository: bool = False, times: int = 2) -> None:
        self.failed = 0
        self._function = function
        self._as_repository = as_repository
        self._times = times

    def __call__(self, *arguments: Any, **keys: Any) -> Any:
        if self.failed == self._times:
            return self._function(*arguments, **keys)
        self.failed += 1
        error = OSError(errno.EIO, "Input/output error")
        if self._as_repository:
            raise RepositoryError(f"int8.onnx: {error.strerror}") from error
        raise error

    def __get__(self, instance: object, owner: type) -> Callable[..., Any]:
        return partial(self, instance)  # as a method, it is called with its object


@pytest.mark.parametrize("activate", ["", "stop_start"])
async def test_a_disk_that_fails_for_a_moment_ends_no_rollout_wherever_it_fails(
    folder: Path, server: ArtefactServer, monkeypatch: pytest.MonkeyPatch, activate: str
) -> None:
    one = made("2", factor=5.0)
    probe = one.probe(atol=1e-3, p95_max_s=30.0)
    assert probe.golden is not None
    stage = FailingDisk(ModelStore.stage)
    read = FailingDisk(read_entry, as_repository=True)
    commit = FailingDisk(ModelStore.commit)
    golden = FailingDisk(Path.read_bytes)
    monkeypatch.setattr(ModelStore, "stage", stage)
    monkeypatch.setattr(steps, "read_entry", read)
    monkeypatch.setattr(ModelStore, "commit", commit)
    read_bytes, digest = Path.read_bytes, probe.golden.sha256
    monkeypatch.setattr(Path, "read_bytes", lambda path: (golden if path.name == digest else read_bytes)(path))
    async with edge(folder) as app:
        ask(app, server, 1, one, probe=probe, **({"activate": activate} if activate else {}))
        found = await settled(app, 1)
        assert (found.state, found.reason, found.running) == (RolloutState.COMMITTED, "", "2")
        assert await answer(app) == ("2", 15.0)
    assert [disk.failed for disk in (stage, read, golden, commit)] == [2, 2, 2, 2]
    assert found.fetched_bytes == server.sent_bytes  # nothing was damaged


async def test_what_the_disk_damages_just_before_it_is_loaded_is_fetched_again(
    folder: Path, server: ArtefactServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, damaged = made("2", factor=5.0), list[str]()
    (file,) = (file for file in one.files if file.path == "int8.onnx")

    def rotten(root: Path, *rest: Any) -> Any:
        if not damaged:
            damaged.append(file.path)
            with (root / "double" / "2" / file.path).open("r+b") as artefact:
                artefact.write(b"rot")
        return read_entry(root, *rest)

    monkeypatch.setattr(steps, "read_entry", rotten)
    async with edge(folder) as app:
        ask(app, server, 1, one)
        found = await settled(app, 1)
        assert (found.state, found.reason) == (RolloutState.COMMITTED, "")
        assert found.fetched_bytes == one.plan().size_bytes + file.size_bytes
        assert await answer(app) == ("2", 15.0)


async def test_a_committed_model_whose_folder_has_lost_it_is_staged_anew(folder: Path, server: ArtefactServer) -> None:
    async with edge(folder) as app:
        ask(app, server, 1, made("2", factor=5.0))
        await settled(app, 1)
    (lost,) = (folder / "state" / "rollout" / "versions").glob("*/double")
    shutil.rmtree(lost)
    async with edge(folder) as app:
        await eventually(lambda: (found := report(app)) is not None and found.running == "2", say=lambda: report(app))
        assert await answer(app) == ("2", 15.0)


async def test_a_rollout_that_is_superseded_does_not_wait_until_large_files_are_read_back(
    folder: Path, server: ArtefactServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, pause = threading.Event(), threading.Event()

    def slow(path: Path, *, on_bytes: Callable[[int], None]) -> str:
        reading.set()
        for _ in range(3000):
            pause.wait(0.01)
            on_bytes(1)
        raise AssertionError("it was not stopped")

    async with edge(folder) as app:
        one, other = made("2", factor=5.0), made("3", factor=7.0)
        for revision, model in enumerate((one, other), start=1):
            ask(app, server, revision, model)
            await settled(app, revision)
        with monkeypatch.context() as patch:
            patch.setattr(model_store, "sha256_of", slow)
            ask(app, server, 3, one)
            await eventually(reading.is_set)
            began_at = clock.now()
            ask(app, server, 4, other)
            await settled(app, 4)
        assert clock.now() - began_at < 15.0


async def test_a_committed_model_whose_trust_list_is_damaged_is_staged_anew_and_nothing_is_fetched(
    folder: Path, server: ArtefactServer
) -> None:
    async with edge(folder) as app:
        ask(app, server, 1, made("2", factor=5.0))
        await settled(app, 1)
        ask(app, server, 2, made("3", factor=7.0))
        await settled(app, 2)
    (version,) = (folder / "state" / "rollout" / "versions").glob("*/double/3")
    trusted = TrustedDigests(version.parent.parent)
    trusted.path.write_bytes(bytes(range(256)))
    sent_bytes = server.sent_bytes

    def runs(version: str) -> bool:
        runner = app.host.routed("double")
        return runner is not None and runner.manifest.version == version

    async with edge(folder) as app:
        await eventually(lambda: runs("3"), say=lambda: report(app))
        found = await settled(app, 2)
        assert (found.state, server.sent_bytes) == (RolloutState.COMMITTED, sent_bytes)
        assert len(trusted.entries()) == 2


async def test_a_device_without_any_model_starts_and_gets_its_first_one(folder: Path, server: ArtefactServer) -> None:
    async with edge(folder / "empty", models=None, keys=[folder / "trusted"]) as app:
        assert app.host.offers() == ()
        ask(app, server, 1, made("2", factor=5.0))
        assert (await settled(app, 1)).state is RolloutState.COMMITTED
        assert await answer(app) == ("2", 15.0)


def failing_journal(
    monkeypatch: pytest.MonkeyPatch, fails: Callable[[Rollout, int], bool], *, times: int
) -> list[Rollout]:
    """What the journal could not write: the first `times` rollouts of which `fails`, with the revision before, says so.

    The deployer rests for a moment only.
    """
    failed: list[Rollout] = []
    write = DeploymentJournal.write

    def failing(journal: DeploymentJournal, rollout: Rollout) -> None:
        before = journal.records.get(rollout.model)
        if len(failed) < times and fails(rollout, before.revision if before else 0):
            failed.append(rollout)
            raise OSError(errno.EROFS, "Read-only file system")
        write(journal, rollout)

    monkeypatch.setattr(DeploymentJournal, "write", failing)
    monkeypatch.setattr(deployer, "REST_S", 0.02)
    return failed


def _accepted(app: EdgeApp) -> int:
    rollouts = app.deployment.rollouts
    return dict(rollouts.accepted).get(SCOPE, 0) if rollouts else 0


def _kill_newest_worker() -> None:
    """The new generation's: the old one's has lived for longer."""
    workers = [one for one in psutil.Process().children() if "tidegate.workers.child" in one.cmdline()]
    os.kill(max(workers, key=lambda one: one.create_time()).pid, signal.SIGKILL)
