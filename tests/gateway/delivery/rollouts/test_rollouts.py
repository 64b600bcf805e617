"""A rollout, from the operator's order to the published documents: journalled, then published; signed elsewhere."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace
from structlog.testing import capture_logs

from gateway.core.versions.canary import CanaryRollout, CanaryState, RolloutPhase
from gateway.delivery.artifacts.store import ArtifactStore
from gateway.delivery.rollouts.coordinator import NotRecorded, RolloutConflict, RolloutController
from gateway.delivery.rollouts.journal import RolloutJournal
from gateway.delivery.rollouts.order import DeviceDocuments, InvalidOrder, RolloutOrder, decode_order
from gateway.delivery.rollouts.routes import rollout_routes
from gateway.fleet_sync.freshness import DeviceView, Freshness
from tests.support.models.tiny_models import double_manifest, tiny_repository
from tests.support.mqtt.device_messages import offer as fleet_offer
from tidegate import clock
from tidegate.fleet.reported import ModelReport, Reported, RolloutState
from tidegate.models.manifest import Manifest
from tidegate.models.repository import Repository, save_manifest
from tidegate.rollout.desired import DesiredDocument
from tidegate.rollout.signing import read_unverified, verify_document
from tidegate.servers.http_server import open_http_server
from tidegate.tools.delivery.files import LocalArtefact
from tidegate.tools.delivery.order import ListedDevice, ListedOffer, OrderError, OrderSigning, OrderTerms, make_order
from tidegate.tools.delivery.plan import plan_of, version_files

KEY = Ed25519PrivateKey.generate()
SIGNING = OrderSigning([KEY])
NAMES = ("edge-1", "edge-2", "edge-3", "edge-4")


def repository(root: Path) -> Repository:
    """`double` in versions 1 and 2."""
    tiny_repository(root)
    first = Repository(root).manifest("double")
    folder = root / "double" / "2"
    folder.mkdir()
    (folder / "int8.onnx").write_bytes((root / "double" / "1" / "int8.onnx").read_bytes())
    save_manifest(folder, replace(first, version="2"))
    return Repository(root)


class FakeChannel:
    """A `DeviceChannel` whose devices report when a test calls `report`; `published` keeps the documents."""

    def __init__(self, *names: str) -> None:
        self.session = 1
        self.published: dict[str, DesiredDocument] = {}
        self.room = 100
        self._reports: dict[str, Reported | None] = dict.fromkeys(names)
        self._sequence = 0

    def publish_desired(self, device: str, message: bytes) -> bool:
        if self.room <= 0:
            return False
        self.room -= 1
        self.published[device] = verify_document(message, SIGNING.trusted)[0]
        return True

    def devices(self, now: float) -> tuple[DeviceView, ...]:
        return tuple(
            DeviceView(
                name,
                epoch=1,
                urls=("127.0.0.1:1",),
                offers=(fleet_offer(),),
                load=None,
                freshness=Freshness.FRESH,
                age_s=0.0,
                reason="",
                reported=one,
            )
            for name, one in self._reports.items()
        )

    def report(self, state: str, *names: str, reason: str = "") -> None:
        """What a device says of the newest document that it got."""
        for name in names:
            document, self._sequence = self.published[name], self._sequence + 1
            plan = document.models["double"]
            scope = f"device/{name}"
            model = ModelReport(
                name="double",
                state=RolloutState(state),
                version=plan.version,
                content=plan.content,
                reason=reason,
                scope=scope,
                revision=document.revision,
                running=plan.version,
            )
            accepted = {scope: document.revision}
            self._reports[name] = Reported(name, 1, self._sequence, 0, accepted=accepted, models=(model,))


def order_of(
    models: Repository, *, devices: tuple[str, ...] = NAMES, at: int = 0, before: bool = True, **spec: Any
) -> bytes:
    """Args: before: whether the devices have version 1."""
    _, new = version_files(models, "double", "2")
    _, old = version_files(models, "double", "1")
    given = {
        "id": "double-2-a", "model": "double", "version": "2", "waves": (0.25, 1.0), "success_ratio": 1.0,
        "max_errors": 0, "deadline_s": 600.0, **spec,
    }  # fmt: skip
    offers = (ListedOffer("double", "1"),) if before else ()
    there = [ListedDevice(name, "fresh", at, offers=offers) for name in devices]
    terms = OrderTerms("double", plan_of(new, "2"), ("http://127.0.0.1:8004",), 1)
    return make_order(given, there, terms, lambda version: plan_of(old, version), SIGNING)


def fill(store: ArtifactStore, models: Repository) -> None:
    files: list[LocalArtefact] = [one for version in ("1", "2") for one in version_files(models, "double", version)[1]]
    for one in files:
        if store.size_bytes(one.artefact.sha256) is None:
            store.append(one.artefact.sha256, 0, one.path.read_bytes())
            store.finish(one.artefact.sha256)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60.0):
        while not true():
            await clock.sleep(0.01)


@pytest.fixture
def models(tmp_path: Path) -> Repository:
    return repository(tmp_path / "models")


@pytest.fixture
def store(tmp_path: Path, models: Repository) -> ArtifactStore:
    store = ArtifactStore(tmp_path / "store")
    fill(store, models)
    return store


class NothingPreferred:
    """What the rollouts say of preferred versions, by their own order."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str, str]] = []

    async def rolled_out(self, model: str, version: str) -> None:
        self.heard.append(("rolled out", model, version))

    async def recalled(self, model: str, version: str) -> None:
        self.heard.append(("recalled", model, version))


def performer(
    store: ArtifactStore,
    channel: FakeChannel,
    shipped: list[Manifest] | None = None,
    *,
    preferred: NothingPreferred | None = None,
    serving: Callable[[str], Mapping[str, Sequence[str]]] | None = None,
) -> RolloutController:
    known = (shipped if shipped is not None else []).extend
    return RolloutController(store, channel, known, preferred or NothingPreferred(), serving or (lambda _model: {}))


@pytest.mark.slow
async def test_a_rollout_asks_its_canary_then_the_rest_and_the_version_is_known(
    store: ArtifactStore, models: Repository
) -> None:
    channel, shipped = FakeChannel(*NAMES), list[Manifest]()
    async with performer(store, channel, shipped) as rollouts:
        await rollouts.begin(decode_order(order_of(models)))
        await until(lambda: set(channel.published) == {"edge-1"})
        assert channel.published["edge-1"].models["double"].version == "2"
        assert {(one.name, one.version) for one in shipped} == {("double", "1"), ("double", "2")}

        channel.report("committed", "edge-1")
        rollouts.fleet_changed()
        await until(lambda: set(channel.published) == set(NAMES))
        channel.report("committed", *NAMES)
        rollouts.fleet_changed()
        await until(lambda: rollouts.all["double-2-a"].state.phase is RolloutPhase.SUCCEEDED)


@pytest.mark.slow
async def test_the_idle_time_before_a_rollout_began_does_not_count_as_its_time(
    store: ArtifactStore, models: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first turn counts, and the next comes with the rollout.
    monkeypatch.setattr("gateway.delivery.rollouts.coordinator.SETTLE_S", 0.0)
    channel = FakeChannel(*NAMES)
    loop, rested_s = asyncio.get_running_loop(), 0.0
    with clock.reading(lambda: loop.time() + rested_s):
        async with performer(store, channel) as rollouts:
            await until(lambda: repr(rollouts).endswith(f"session {channel.session}>"))
            rested_s = 7200.0
            await rollouts.begin(decode_order(order_of(models)))
            await until(lambda: set(channel.published) == {"edge-1"})

            assert rollouts.all["double-2-a"].state.elapsed_s < 3600.0


@pytest.mark.slow
async def test_what_fails_comes_back_by_itself_with_documents_that_the_operator_signed_before(
    store: ArtifactStore, models: Repository
) -> None:
    channel = FakeChannel(*NAMES)
    async with performer(store, channel) as rollouts:
        await rollouts.begin(decode_order(order_of(models, waves=(0.5, 1.0))))
        await until(lambda: len(channel.published) == 2)
        channel.report("committed", "edge-1")
        channel.report("rolled_back", "edge-2", reason="probe_accuracy: 0.1")
        rollouts.fleet_changed()
        await until(lambda: [one.revision for one in channel.published.values()] == [2, 2])

        assert [one.models["double"].version for one in channel.published.values()] == ["1", "1"]
        assert "probe_accuracy" in rollouts.all["double-2-a"].state.reason
        channel.report("committed", "edge-1", "edge-2")
        rollouts.fleet_changed()
        await until(lambda: rollouts.all["double-2-a"].state.phase is RolloutPhase.RETURNED)
        assert set(channel.published) == {"edge-1", "edge-2"}


@pytest.mark.slow
async def test_preferred_versions_hear_of_what_begins_and_of_what_is_called_back_also_after_a_kill(
    store: ArtifactStore, models: Repository
) -> None:
    channel, preferred = FakeChannel(*NAMES), NothingPreferred()
    async with performer(store, channel, preferred=preferred) as rollouts:
        await rollouts.begin(decode_order(order_of(models, waves=(1.0,))))
        await until(lambda: len(channel.published) == 4)
        assert preferred.heard == [("rolled out", "double", "2")]
        channel.report("committed", *NAMES)
        rollouts.fleet_changed()
        await until(lambda: rollouts.all["double-2-a"].state.phase is RolloutPhase.SUCCEEDED)
        await rollouts.command("double-2-a", "abort", "only a test")
        await until(lambda: len(preferred.heard) == 2)
    assert preferred.heard[1:] == [("recalled", "double", "2")]

    again, told = FakeChannel(*NAMES), NothingPreferred()
    async with performer(store, again, preferred=told) as rollouts:
        await until(lambda: len(again.published) == 4)
        assert told.heard == [("recalled", "double", "2")], "the kill may have come between the journal and this"
        again.report("committed", *NAMES)
        rollouts.fleet_changed()
        await until(lambda: rollouts.all["double-2-a"].state.phase is RolloutPhase.RETURNED)
        assert len(told.heard) == 1


@pytest.mark.slow
async def test_a_rollback_that_would_leave_no_version_is_refused_with_the_way_out(
    store: ArtifactStore, models: Repository
) -> None:
    channel = FakeChannel(*NAMES)
    serving: dict[str, list[str]] = {}
    async with performer(store, channel, serving=lambda _model: serving) as rollouts:
        await rollouts.begin(decode_order(order_of(models, waves=(1.0,), before=False)))
        await until(lambda: len(channel.published) == 4)
        serving |= {"2": [f"edge/{name}" for name in NAMES]}
        with pytest.raises(RolloutConflict, match=r"edge-1.*before 2.*OTHER.*double-2-a --leave-none"):
            await rollouts.command("double-2-a", "abort", "")
        assert rollouts.all["double-2-a"].state.phase is RolloutPhase.RUNNING

        serving |= {"1": ["pool/main"]}
        assert (await rollouts.command("double-2-a", "abort", "")).state.phase is RolloutPhase.RETURNING


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False])
async def test_a_rollback_to_an_older_version_or_one_that_is_meant_to_leave_none_goes_on(
    store: ArtifactStore, models: Repository, before: bool
) -> None:
    channel = FakeChannel(*NAMES)
    everywhere = {"2": [f"edge/{name}" for name in NAMES]}
    async with performer(store, channel, serving=lambda _model: everywhere) as rollouts:
        await rollouts.begin(decode_order(order_of(models, waves=(1.0,), before=before)))
        await until(lambda: len(channel.published) == 4)
        aborted = await rollouts.command("double-2-a", "abort", "", leave_none=not before)
        assert aborted.state.phase is RolloutPhase.RETURNING


@pytest.mark.slow
async def test_a_gateway_that_comes_back_goes_on_where_it_was_and_says_everything_again(
    store: ArtifactStore, models: Repository
) -> None:
    channel = FakeChannel(*NAMES)
    async with performer(store, channel) as rollouts:
        await rollouts.begin(decode_order(order_of(models)))
        await until(lambda: "edge-1" in channel.published)
        channel.report("committed", "edge-1")
        rollouts.fleet_changed()
        await until(lambda: len(channel.published) == 4)
        raw = (store.root / "rollouts" / "double-2-a" / "state.json").read_bytes()
    (store.root / "rollouts" / "double-2-a" / "state.json").write_bytes(raw)  # as a kill leaves it, without a goodbye
    (store.root / "rollouts" / "broken").mkdir()

    again, shipped = FakeChannel(*NAMES), list[Manifest]()
    async with performer(store, again, shipped) as rollouts:
        await until(lambda: len(again.published) == 4)
        assert {one.revision for one in again.published.values()} == {1}
        assert {one.version for one in shipped} == {"1", "2"}
        again.report("committed", *NAMES)
        rollouts.fleet_changed()
        await until(lambda: rollouts.all["double-2-a"].state.phase is RolloutPhase.SUCCEEDED)


@pytest.mark.slow
async def test_a_broker_that_lost_everything_is_told_again_as_fast_as_it_takes(
    store: ArtifactStore, models: Repository
) -> None:
    channel = FakeChannel(*NAMES)
    async with performer(store, channel) as rollouts:
        await rollouts.begin(decode_order(order_of(models, waves=(1.0,))))
        await until(lambda: len(channel.published) == 4)
        channel.session = 0
        rollouts.fleet_changed()
        channel.published, channel.room, channel.session = {}, 3, 2
        rollouts.fleet_changed()
        await until(lambda: len(channel.published) == 3)
        channel.room = 10
        await until(lambda: len(channel.published) == 4)


@pytest.mark.slow
async def test_what_cannot_be_remembered_is_not_said(
    store: ArtifactStore, models: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, tried = FakeChannel(*NAMES), asyncio.Event()
    loop = asyncio.get_running_loop()

    def full(_self: RolloutJournal, _id: str, _state: bytes) -> None:
        loop.call_soon_threadsafe(tried.set)
        raise OSError(errno.ENOSPC, "No space left on device")

    async with performer(store, channel) as rollouts:
        with monkeypatch.context() as patched:
            patched.setattr(RolloutJournal, "save", full)
            await rollouts.begin(decode_order(order_of(models)))
            await asyncio.wait_for(tried.wait(), 60.0)
            tried.clear()
            await asyncio.wait_for(tried.wait(), 60.0)  # a whole turn later
            assert channel.published == {}
        await until(lambda: set(channel.published) == {"edge-1"})


@pytest.mark.slow
async def test_a_disk_that_takes_no_rollout_is_told_once_and_when_it_does_again(
    store: ArtifactStore, models: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, tries = FakeChannel(*NAMES), []

    def full(_self: RolloutJournal, _id: str, _state: bytes) -> None:
        tries.append(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    with capture_logs() as logs:
        async with performer(store, channel) as rollouts:
            with monkeypatch.context() as patched:
                patched.setattr(RolloutJournal, "save", full)
                await rollouts.begin(decode_order(order_of(models)))
                await until(lambda: len(tries) >= 4)
            await until(lambda: set(channel.published) == {"edge-1"})
    told = [one["event"] for one in logs if "remembered" in one["event"]]
    assert told == ["a rollout cannot be remembered and stands still", "a rollout is remembered again and goes on"]


@pytest.mark.slow
async def test_a_rollback_after_success_needs_no_key(store: ArtifactStore, models: Repository) -> None:
    channel = FakeChannel(*NAMES)
    async with performer(store, channel) as rollouts:
        await rollouts.begin(decode_order(order_of(models, waves=(1.0,))))
        await until(lambda: len(channel.published) == 4)
        channel.report("committed", *NAMES)
        rollouts.fleet_changed()
        await until(lambda: rollouts.all["double-2-a"].state.phase is RolloutPhase.SUCCEEDED)
        await rollouts.command("double-2-a", "abort", "operator: it says odd things")
        await until(lambda: {one.revision for one in channel.published.values()} == {2})

        assert {one.models["double"].version for one in channel.published.values()} == {"1"}
        with pytest.raises(RolloutConflict, match="nothing to abort"):
            await rollouts.command("double-2-a", "abort", "again")


@pytest.mark.slow
async def test_what_is_in_the_way_is_said(store: ArtifactStore, models: Repository, tmp_path: Path) -> None:
    channel = FakeChannel(*NAMES)
    async with performer(store, channel) as rollouts:
        with pytest.raises(RolloutConflict, match="no device 'nobody'"):
            await rollouts.begin(decode_order(order_of(models, devices=("nobody",))))
        await rollouts.begin(decode_order(order_of(models)))
        with pytest.raises(RolloutConflict, match="a rollout 'double-2-a' already"):
            await rollouts.begin(decode_order(order_of(models)))
        with pytest.raises(RolloutConflict, match="edge-1 is in rollout double-2-a"):
            await rollouts.begin(decode_order(order_of(models, id="b")))
        await rollouts.command("double-2-a", "abort", "operator")
    empty = ArtifactStore(tmp_path / "empty")
    async with performer(empty, FakeChannel(*NAMES)) as rollouts:
        with pytest.raises(RolloutConflict, match=r"files are not here: .*tidegate model push"):
            await rollouts.begin(decode_order(order_of(models)))
        assert not (empty.root / "rollouts").exists()


@pytest.mark.slow
async def test_an_order_of_yesterday_is_refused_once_a_device_has_had_a_newer_document(
    store: ArtifactStore, models: Repository
) -> None:
    channel = FakeChannel(*NAMES)
    async with performer(store, channel) as rollouts:
        stale = decode_order(order_of(models, id="stale"))
        await rollouts.begin(decode_order(order_of(models, waves=(1.0,))))
        await until(lambda: len(channel.published) == 4)
        channel.report("committed", *NAMES)
        rollouts.fleet_changed()
        await until(lambda: rollouts.all["double-2-a"].state.phase is RolloutPhase.SUCCEEDED)

        with pytest.raises(RolloutConflict, match="has had revision 2 meanwhile"):
            await rollouts.begin(stale)
        await rollouts.begin(decode_order(order_of(models, id="next", at=2)))
        await until(lambda: channel.published["edge-1"].revision == 3)
        with pytest.raises(RolloutConflict, match="newer document since"):
            await rollouts.command("double-2-a", "abort", "operator")


def forged(order: RolloutOrder, device: str, message: bytes) -> RolloutOrder:
    """The order with another message forward."""
    documents = DeviceDocuments(msgspec.Raw(message), order.documents[device].back)
    return replace(order, documents={**order.documents, device: documents})


async def test_an_order_with_documents_of_others_is_refused(store: ArtifactStore, models: Repository) -> None:
    order = decode_order(order_of(models, devices=("edge-1", "edge-2")))
    others, later = order.documents["edge-2"].message(back=False), order.documents["edge-1"].message(back=True)
    rollouts = performer(store, FakeChannel(*NAMES))

    with pytest.raises(InvalidOrder, match="device/edge-2"):
        await rollouts.begin(forged(order, "edge-1", others))
    with pytest.raises(InvalidOrder, match="revision 2, stands where"):
        await rollouts.begin(forged(order, "edge-1", later))


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"spec":{},"documents":{}}', b"[" * 100_000, b"\xff"])
def test_what_is_no_order_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidOrder):
        decode_order(raw)


# what an operator is told holds


def disk_is_full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def phase_on_disk(store: ArtifactStore) -> RolloutPhase:
    raw = (store.root / "rollouts" / "double-2-a" / "state.json").read_bytes()
    return msgspec.json.decode(raw, type=CanaryState).phase


class Gate:
    """Holds a method of the journal up after its work, in its thread, until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch, method: str) -> None:
        self.reached, self._opened = threading.Event(), threading.Event()
        work = getattr(RolloutJournal, method)

        def held_up(*arguments: Any) -> None:
            work(*arguments)
            self.reached.set()
            assert self._opened.wait(60.0)

        patch.setattr(RolloutJournal, method, held_up)

    def open(self) -> None:
        self._opened.set()


@pytest.mark.slow
async def test_an_order_that_cannot_be_remembered_leaves_nothing_behind(
    store: ArtifactStore, models: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, order = FakeChannel(*NAMES), decode_order(order_of(models))
    async with performer(store, channel) as rollouts:
        with monkeypatch.context() as patched:
            patched.setattr("gateway.delivery.rollouts.journal.sync_folder", disk_is_full)  # its last step
            with pytest.raises(NotRecorded, match=r"double-2-a does not begin.*No space left"):
                await rollouts.begin(order)
        assert rollouts.all == {} and list((store.root / "rollouts").iterdir()) == []
        await rollouts.begin(order)
        await until(lambda: set(channel.published) == {"edge-1"})


@pytest.mark.slow
async def test_an_order_whose_operator_leaves_meanwhile_begins_all_the_same(
    store: ArtifactStore, models: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = FakeChannel(*NAMES)
    async with performer(store, channel) as rollouts:
        gate = Gate(monkeypatch, "begin")
        ordering = asyncio.create_task(rollouts.begin(decode_order(order_of(models))))
        await until(gate.reached.is_set)
        for _ in range(2):
            ordering.cancel()
            await asyncio.wait([ordering], timeout=0.05)
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await ordering
        with pytest.raises(RolloutConflict, match="edge-1 is in rollout double-2-a"):
            await rollouts.begin(decode_order(order_of(models, id="b")))
        await until(lambda: set(channel.published) == {"edge-1"})


@pytest.mark.slow
async def test_a_command_is_on_the_disk_when_its_operator_is_told_or_has_left(
    store: ArtifactStore, models: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = FakeChannel(*NAMES)
    async with performer(store, channel) as rollouts:
        await rollouts.begin(decode_order(order_of(models)))
        await until(lambda: set(channel.published) == {"edge-1"})
        await rollouts.command("double-2-a", "pause", "operator")
        assert phase_on_disk(store) is RolloutPhase.PAUSED

        with monkeypatch.context() as patched:
            gate = Gate(patched, "save")
            aborting = asyncio.create_task(rollouts.command("double-2-a", "abort", "operator"))
            await until(gate.reached.is_set)
            aborting.cancel()
            await asyncio.wait([aborting], timeout=0.05)
            assert not aborting.done()
            gate.open()
            with pytest.raises(asyncio.CancelledError):
                await aborting
        assert phase_on_disk(store) is RolloutPhase.RETURNING
        await until(lambda: channel.published["edge-1"].revision == 2)


@pytest.mark.slow
async def test_a_command_that_cannot_be_remembered_is_no_success_and_is_tried_again(
    store: ArtifactStore, models: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = FakeChannel(*NAMES)
    async with performer(store, channel) as rollouts:
        await rollouts.begin(decode_order(order_of(models)))
        await until(lambda: set(channel.published) == {"edge-1"})
        with monkeypatch.context() as patched:
            patched.setattr(RolloutJournal, "save", disk_is_full)
            with pytest.raises(NotRecorded, match=r"abort of double-2-a is not recorded.*No space left"):
                await rollouts.command("double-2-a", "abort", "operator")
            assert channel.published["edge-1"].revision == 1
        await until(lambda: channel.published["edge-1"].revision == 2)


@pytest.mark.slow
async def test_an_order_that_nobody_confirmed_waits_for_a_person_after_a_restart(
    store: ArtifactStore, models: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.delivery.rollouts.coordinator.SETTLE_S", 0.0)
    RolloutJournal(store.root / "rollouts").begin(decode_order(order_of(models)))  # and then the process was killed
    channel, preferred = FakeChannel(*NAMES), NothingPreferred()
    async with performer(store, channel, preferred=preferred) as rollouts:
        waves = rollouts.all["double-2-a"]
        await until(lambda: waves.state.elapsed_s > 0.0)  # a whole turn
        assert waves.state.phase is RolloutPhase.PAUSED and "never confirmed" in waves.state.reason
        assert channel.published == {} and preferred.heard == []
        assert {rollouts.newest_revision(view) for view in channel.devices(0.0)} == {2}

        await rollouts.command("double-2-a", "resume", "")
        await until(lambda: set(channel.published) == {"edge-1"})
        assert preferred.heard == [("rolled out", "double", "2")]


# what cannot be read


def test_a_state_that_cannot_be_read_keeps_no_other_rollout_from_loading(tmp_path: Path, models: Repository) -> None:
    journal = RolloutJournal(tmp_path / "rollouts")
    states = {"no-utf8": b'{"parts":{},"reason":"\xff"}', "deep": b'{"other":' + b"[" * 100_000, "empty": b""}
    for id in (*states, "good"):
        journal.begin(decode_order(order_of(models, id=id)))
    for id, state in states.items():
        journal.save(id, state)

    assert [order.spec.id for order, _ in journal.load()] == ["good"]
    assert len(list(journal.folder.iterdir())) == 4


def test_an_order_does_not_begin_in_the_state_of_an_older_one_of_its_name(tmp_path: Path, models: Repository) -> None:
    journal = RolloutJournal(tmp_path / "rollouts")
    journal.save("double-2-a", b"what is left of it")
    journal.begin(decode_order(order_of(models)))

    assert [waves.state.phase for _, waves in journal.load()] == [RolloutPhase.PAUSED]


def test_a_rollout_that_is_half_forgotten_is_no_rollout(
    tmp_path: Path, models: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = RolloutJournal(tmp_path / "rollouts")
    journal.begin(decode_order(order_of(models)))
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)  # a kill comes before it
    journal.forget("double-2-a")

    assert journal.load() == []


async def test_a_document_that_a_disk_has_damaged_does_not_stop_the_gateway(
    store: ArtifactStore, models: Repository
) -> None:
    order = forged(decode_order(order_of(models)), "edge-1", b'{"document":"\xff"}')
    waves = CanaryRollout(order.spec)
    waves.advance(0.0)
    journal = RolloutJournal(store.root / "rollouts")
    journal.begin(order)
    journal.save("double-2-a", msgspec.json.encode(waves.state))
    channel = FakeChannel(*NAMES)
    channel.session = 0
    async with performer(store, channel) as rollouts:
        assert rollouts.document("edge-1") == (1, b'{"document":"\xff"}')


@pytest.mark.parametrize("body", [b"{", b'{"why":"\xff"}'])
async def test_a_command_that_is_no_json_is_a_bad_request(
    store: ArtifactStore, models: Repository, body: bytes
) -> None:
    channel = FakeChannel(*NAMES)
    rollouts = performer(store, channel)
    routes = rollout_routes(rollouts, channel, ())
    served = open_http_server(routes, "127.0.0.1", 0, key="admin", max_body_bytes=2**20, grace_s=0.1)
    async with (
        served as url,
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/rollouts/double-2-a/abort", data=body) as answer,
    ):
        assert answer.status == 400


async def test_an_order_to_a_gateway_that_cannot_read_its_folder_of_files_is_refused_with_the_folder(
    models: Repository, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    broken = ArtifactStore(tmp_path / "file" / "artifacts")
    async with performer(broken, FakeChannel(*NAMES)) as rollouts:
        with pytest.raises(NotRecorded, match=r"Not a directory \(key 'artifacts.folder'\)"):
            await rollouts.begin(decode_order(order_of(models)))
        assert not rollouts.all


async def test_what_cannot_be_recorded_is_said_to_operators_as_a_passing_failure(
    store: ArtifactStore, models: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = FakeChannel(*NAMES)
    rollouts = performer(store, channel)
    routes = rollout_routes(rollouts, channel, ())
    served = open_http_server(routes, "127.0.0.1", 0, key="admin", max_body_bytes=2**20, grace_s=0.1)
    async with served as url, aiohttp.ClientSession() as http:
        with monkeypatch.context() as patched:
            patched.setattr(RolloutJournal, "begin", disk_is_full)
            async with http.post(f"{url}/v1/rollouts", data=order_of(models)) as answer:
                assert answer.status == 503 and "No space left" in await answer.text()
        async with http.post(f"{url}/v1/rollouts", data=order_of(models)) as answer:
            assert answer.status == 201
        monkeypatch.setattr(RolloutJournal, "save", disk_is_full)
        async with http.post(f"{url}/v1/rollouts/double-2-a/abort", data=b"{}") as answer:
            assert answer.status == 503 and "No space left" in await answer.text()


# the operator's side


def test_other_models_of_a_device_are_carried_over_if_one_of_our_keys_has_signed_them(models: Repository) -> None:
    order = decode_order(order_of(models, devices=("edge-1",)))
    standing = bytes(order.documents["edge-1"].forward).decode()
    _, rounds = version_files(models, "rounds", "1")
    terms = OrderTerms("rounds", plan_of(rounds, "1"), ("http://127.0.0.1:1",), 1)
    device = ListedDevice("edge-1", "fresh", 2, document=standing)

    def nobody(version: str) -> Any:
        raise AssertionError(version)

    spec = {"id": "r", "model": "rounds", "version": "1"}
    made = decode_order(make_order(spec, [device], terms, nobody, SIGNING))
    forward, back = (read_unverified(made.documents["edge-1"].message(back=back)) for back in (False, True))

    assert (forward.revision, back.revision) == (3, 4)
    assert set(forward.models) == {"double", "rounds"} and forward.models["double"].version == "2"
    assert set(back.models) == {"double"} and back.remove == ("rounds",)
    stranger = OrderSigning([Ed25519PrivateKey.generate()])
    with pytest.raises(OrderError, match="not by your key"):
        make_order(spec, [device], terms, nobody, stranger)
    replaced = replace_unsigned(terms)
    made = decode_order(make_order(spec, [device], replaced, nobody, stranger))
    assert set(read_unverified(bytes(made.documents["edge-1"].forward)).models) == {"rounds"}


def replace_unsigned(terms: OrderTerms) -> OrderTerms:
    return OrderTerms(terms.model, terms.plan, terms.urls, terms.issued_s, replace_unsigned=True)


def test_a_rotation_is_signed_by_the_old_key_and_the_new_and_names_the_new(models: Repository) -> None:
    new = Ed25519PrivateKey.generate()
    both = OrderSigning([KEY, new], rotate=True)
    _, files = version_files(models, "double", "2")
    terms = OrderTerms("double", plan_of(files, "2"), (), 1)
    spec = {"id": "r", "model": "double", "version": "2"}
    made = decode_order(make_order(spec, [ListedDevice("edge-1", "fresh", 0)], terms, lambda _: terms.plan, both))

    desired = verify_document(bytes(made.documents["edge-1"].forward), SIGNING.trusted)[0]
    assert desired.keys == both.successors and len(desired.keys) == 1


def test_only_what_edges_need_is_shipped(models: Repository) -> None:
    manifest, files = version_files(models, "double", "2")

    assert [one.artefact.path for one in files] == ["model.yaml", "int8.onnx"]
    assert double_manifest().inputs == manifest.inputs
