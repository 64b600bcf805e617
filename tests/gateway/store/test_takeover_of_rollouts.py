"""Several gateways and one store: one conducts rollouts, another goes on when it dies, and a stale one cannot."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.config.store import SharedStoreConfig
from gateway.core.versions.canary import CanaryState, RolloutPhase
from gateway.delivery.artifacts.store import ArtifactStore
from gateway.delivery.rollouts.conductor_lease import LEASE_S, ConductorLease, NotConducting
from gateway.delivery.rollouts.coordinator import NotRecorded, RolloutConflict, RolloutController
from gateway.delivery.rollouts.order import decode_order
from gateway.store.shared_store import SharedStore, StoreCall, StoreScript, StoreUnavailable
from tests.gateway.delivery.rollouts.test_rollouts import (
    NAMES,
    FakeChannel,
    NothingPreferred,
    fill,
    order_of,
    repository,
    until,
)
from tests.support.stores import REDIS, RedisServer
from tidegate import clock
from tidegate.models.manifest import Manifest
from tidegate.models.repository import Repository

pytestmark = [pytest.mark.slow, pytest.mark.skipif(REDIS is None, reason="redis-server is not installed")]
ROLLOUT = "double-2-a"


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.delivery.rollouts.coordinator.SETTLE_S", 0.0)


@pytest.fixture
def _short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("LEASE_S", 1.5), ("RENEW_S", 0.4), ("TRY_S", 0.2), ("MARGIN_S", 0.2)):
        monkeypatch.setattr(f"gateway.delivery.rollouts.conductor_lease.{name}", seconds)


class CutStore(SharedStore):
    """The way to it can be cut: for everything, for scripts by name, and for the answers of scripts by name."""

    def __init__(self, section: SharedStoreConfig, fleet: str) -> None:
        super().__init__(section, fleet, lambda: 0.5)
        self.is_cut = False
        self.lost: set[str] = set()
        self.unanswered: set[str] = set()

    async def run_each(self, script: StoreScript, calls: Sequence[StoreCall]) -> list[Any]:
        if self.is_cut or script.name in self.lost:
            raise StoreUnavailable("the network is gone")
        answers = await super().run_each(script, calls)
        if script.name in self.unanswered:
            raise StoreUnavailable("no answer within 50 ms")
        return answers


class ConductingGateway:
    """A gateway's rollouts with a disk and a session of its own; it can be cut off, as one that is stopped.

    Args:
        has_files: whether the models' files were brought to it.
    """

    def __init__(
        self, stack: AsyncExitStack, folder: Path, models: Repository, name: str, url: str, *, has_files: bool = True
    ) -> None:
        self._stack = stack
        self.channel = FakeChannel(*NAMES)
        self.store = CutStore(SharedStoreConfig(url=url), "site")
        self.stands_still_at: float | None = None  # its clock
        self.lease = ConductorLease(self.store, name, self._now)
        artefacts = ArtifactStore(folder / name)
        if has_files:
            fill(artefacts, models)
        self.shipped: list[Manifest] = []
        self.preferred = NothingPreferred()
        self.rollouts = RolloutController(
            artefacts, self.channel, self.shipped.extend, self.preferred, lambda _model: {}, self.lease
        )

    async def start(self) -> ConductingGateway:
        for part in (self.store, self.lease, self.rollouts):
            await self._stack.enter_async_context(part)  # type: ignore[arg-type]
        return self

    def _now(self) -> float:
        return clock.now() if self.stands_still_at is None else self.stands_still_at

    async def conducts(self) -> None:
        await until(lambda: self.rollouts.conducts)

    def reports(self, state: str, *names: str) -> None:
        self.channel.report(state, *names)
        self.rollouts.fleet_changed()


async def test_another_gateway_goes_on_with_the_rollout_of_one_that_died(tmp_path: Path) -> None:
    models = repository(tmp_path / "models")
    async with AsyncExitStack() as stack:
        store = stack.enter_context(RedisServer(tmp_path))
        first = await ConductingGateway(stack, tmp_path, models, "a", store.url).start()
        await first.conducts()
        second = await ConductingGateway(stack, tmp_path, models, "b", store.url).start()
        await until(lambda: second.lease.conductor == "a")
        with pytest.raises(RolloutConflict, match="gateway a conducts"):
            await second.rollouts.begin(decode_order(order_of(models)))
        await first.rollouts.begin(decode_order(order_of(models)))
        await until(lambda: set(first.channel.published) == {"edge-1"})
        with pytest.raises(RolloutConflict, match="gateway a conducts"):
            await second.rollouts.command(ROLLOUT, "abort", "")

        first.store.is_cut = True
        died_at = clock.now()
        await until(lambda: set(second.channel.published) == {"edge-1"})  # says again what was said
        print(f"the rollout was taken over {clock.now() - died_at:.1f} s after the last renewal")
        assert clock.now() - died_at < 2.0 * LEASE_S
        second.reports("committed", "edge-1")
        await until(lambda: set(second.channel.published) == set(NAMES))
        second.reports("committed", *NAMES)
        await until(lambda: second.rollouts.all[ROLLOUT].state.phase is RolloutPhase.SUCCEEDED)
        assert set(first.channel.published) == {"edge-1"}
        with pytest.raises(RolloutConflict, match="conducts"):
            await first.rollouts.command(ROLLOUT, "abort", "it believes that it conducts")


async def test_a_conductor_that_still_believes_in_its_lease_records_and_publishes_nothing(tmp_path: Path) -> None:
    models = repository(tmp_path / "models")
    async with AsyncExitStack() as stack:
        store = stack.enter_context(RedisServer(tmp_path))
        first = await ConductingGateway(stack, tmp_path, models, "a", store.url).start()
        await first.conducts()
        await first.rollouts.begin(decode_order(order_of(models)))
        await until(lambda: set(first.channel.published) == {"edge-1"})
        second = await ConductingGateway(stack, tmp_path, models, "b", store.url).start()
        first.store.is_cut, first.stands_still_at = True, clock.now()
        await until(lambda: set(second.channel.published) == {"edge-1"})
        assert first.rollouts.conducts, "it believes so"
        first.store.is_cut = False
        first.reports("committed", "edge-1")  # it would ask the rest now
        await until(lambda: not first.rollouts.conducts)  # the store has told it
        assert set(first.channel.published) == {"edge-1"}
        with pytest.raises(NotConducting):
            await first.lease.record(ROLLOUT, state=b"{}")
        assert (await second.lease.recorded())[ROLLOUT][1] != b"{}"


async def test_a_store_that_is_flushed_or_away_makes_a_rollout_wait_and_lose_nothing(tmp_path: Path) -> None:
    models = repository(tmp_path / "models")
    async with AsyncExitStack() as stack:
        store = stack.enter_context(RedisServer(tmp_path))
        first = await ConductingGateway(stack, tmp_path, models, "a", store.url).start()
        await first.conducts()
        await first.rollouts.begin(decode_order(order_of(models)))
        await until(lambda: set(first.channel.published) == {"edge-1"})
        fence = int(first.lease.fence)
        store.kill()
        first.reports("committed", "edge-1")
        await until(lambda: not first.lease.holds)
        assert set(first.channel.published) == {"edge-1"}, "without the store nobody conducts"
        store.start()  # empty
        await until(lambda: set(first.channel.published) == set(NAMES))
        assert int(first.lease.fence) > fence, "numbers grow also over a flush"
        assert set(await first.lease.recorded()) == {ROLLOUT}, "what it lacks is recorded again"


async def test_a_gateway_that_ends_lets_go_and_the_next_conducts_at_once(tmp_path: Path) -> None:
    models = repository(tmp_path / "models")
    async with AsyncExitStack() as stack:
        store = stack.enter_context(RedisServer(tmp_path))
        async with AsyncExitStack() as life:
            first = await ConductingGateway(life, tmp_path, models, "a", store.url).start()
            await first.conducts()
            second = await ConductingGateway(stack, tmp_path, models, "b", store.url).start()
            await until(lambda: second.lease.conductor == "a")
        ended_at = clock.now()
        await second.conducts()
        assert clock.now() - ended_at < LEASE_S / 2.0


async def test_a_gateway_that_does_not_conduct_knows_how_rollouts_are_and_the_versions_without_their_files(
    tmp_path: Path,
) -> None:
    models = repository(tmp_path / "models")
    async with AsyncExitStack() as stack:
        store = stack.enter_context(RedisServer(tmp_path))
        first = await ConductingGateway(stack, tmp_path, models, "a", store.url).start()
        await first.conducts()
        second = await ConductingGateway(stack, tmp_path, models, "b", store.url, has_files=False).start()
        await until(lambda: second.lease.conductor == "a")
        await first.rollouts.begin(decode_order(order_of(models)))
        await until(lambda: {one.version for one in second.shipped} == {"1", "2"})
        assert second.preferred.heard == [("rolled out", "double", "2")]

        await until(lambda: set(first.channel.published) == {"edge-1"})
        first.reports("committed", "edge-1")
        await until(lambda: set(first.channel.published) == set(NAMES))
        first.reports("committed", *NAMES)
        await until(lambda: second.rollouts.all[ROLLOUT].state.phase is RolloutPhase.SUCCEEDED)
        for name in NAMES:
            assert second.rollouts.document(name) == first.rollouts.document(name) is not None
        assert not second.channel.published, "it only follows"

        await first.rollouts.command(ROLLOUT, "abort", "")
        await until(lambda: second.preferred.heard[1:] == [("recalled", "double", "2")])
        third = await ConductingGateway(stack, tmp_path, models, "c", store.url, has_files=False).start()
        assert {one.version for one in third.shipped} == {"1", "2"}, "known from its start"
        assert third.rollouts.all[ROLLOUT].state.phase is RolloutPhase.RETURNING


async def test_a_gateway_without_the_files_still_knows_the_versions_when_it_takes_over_after_a_restart(
    tmp_path: Path,
) -> None:
    models = repository(tmp_path / "models")
    async with AsyncExitStack() as stack:
        store = stack.enter_context(RedisServer(tmp_path))
        async with AsyncExitStack() as life:
            first = await ConductingGateway(life, tmp_path, models, "a", store.url).start()
            await first.conducts()
            await first.rollouts.begin(decode_order(order_of(models)))
        for _ in range(2):  # the second time its own journal has the order
            async with AsyncExitStack() as life:
                second = await ConductingGateway(life, tmp_path, models, "b", store.url, has_files=False).start()
                await second.conducts()
                assert {one.version for one in second.shipped} == {"1", "2"}


async def test_what_an_older_version_has_recorded_can_be_followed_once_a_newer_one_conducts(tmp_path: Path) -> None:
    models = repository(tmp_path / "models")
    async with AsyncExitStack() as stack:
        store = stack.enter_context(RedisServer(tmp_path))
        async with AsyncExitStack() as life:
            first = await ConductingGateway(life, tmp_path, models, "a", store.url).start()
            await first.conducts()
            await first.rollouts.begin(decode_order(order_of(models)))
            await first.rollouts.command(ROLLOUT, "pause", "")
        store.say("DEL", *(first.store.key("rollouts", kind) for kind in ("manifests", "stamps")))
        again = await ConductingGateway(stack, tmp_path, models, "a", store.url).start()
        await again.conducts()
        second = await ConductingGateway(stack, tmp_path, models, "b", store.url, has_files=False).start()
        await until(lambda: ROLLOUT in second.rollouts.all)
        assert second.rollouts.all[ROLLOUT].state.phase is RolloutPhase.PAUSED
        assert {one.version for one in second.shipped} == {"1", "2"}


async def test_manifests_in_the_store_that_are_not_the_signed_ones_are_not_believed(tmp_path: Path) -> None:
    models = repository(tmp_path / "models")
    async with AsyncExitStack() as stack:
        store = stack.enter_context(RedisServer(tmp_path))
        first = await ConductingGateway(stack, tmp_path, models, "a", store.url).start()
        await first.conducts()
        await first.rollouts.begin(decode_order(order_of(models)))
        told = (await first.lease.manifests())[ROLLOUT]
        assert len(told) == 2
        forged = {digest: text.replace(b"max: 256", b"max: 1") + b"\n" for digest, text in told.items()}
        await first.lease.record(ROLLOUT, manifests=forged)
        second = await ConductingGateway(stack, tmp_path, models, "b", store.url, has_files=False).start()
        await until(lambda: ROLLOUT in second.rollouts.all)
        assert not second.shipped


async def recorded(gateway: ConductingGateway) -> dict[str, RolloutPhase | None]:
    """By rollout: the phase that the store has of it, None before its first state."""
    return {
        id: msgspec.json.decode(state, type=CanaryState).phase if state else None
        for id, (_, state) in (await gateway.lease.recorded()).items()
    }


async def test_an_order_and_a_command_are_in_the_store_when_the_operator_is_told_so(tmp_path: Path) -> None:
    models = repository(tmp_path / "models")
    async with asyncio.timeout(30.0), AsyncExitStack() as stack:
        store = stack.enter_context(RedisServer(tmp_path))
        first = await ConductingGateway(stack, tmp_path, models, "a", store.url).start()
        await first.conducts()
        first.channel.session = 0  # no turn records anything
        await first.rollouts.begin(decode_order(order_of(models)))
        assert await recorded(first) == {ROLLOUT: RolloutPhase.RUNNING}
        await first.rollouts.command(ROLLOUT, "pause", "operator")
        assert await recorded(first) == {ROLLOUT: RolloutPhase.PAUSED}


@pytest.mark.usefixtures("_short_lease")
async def test_an_order_that_the_store_has_too_late_is_removed_there_as_soon_as_it_answers(tmp_path: Path) -> None:
    models = repository(tmp_path / "models")
    async with asyncio.timeout(30.0), AsyncExitStack() as stack:
        store = stack.enter_context(RedisServer(tmp_path))
        first = await ConductingGateway(stack, tmp_path, models, "a", store.url).start()
        await first.conducts()
        await first.lease.record(ROLLOUT, state=b"of an older rollout of that name")
        first.store.unanswered, first.store.lost = {"record"}, {"forget"}
        with pytest.raises(NotRecorded, match="does not begin, since it cannot be recorded"):
            await first.rollouts.begin(decode_order(order_of(models)))
        assert first.rollouts.all == {} and not (tmp_path / "a" / "rollouts" / ROLLOUT).exists()
        assert await recorded(first) == {ROLLOUT: None}, "it came there all the same"

        with pytest.raises(NotRecorded, match="order again in a moment"):
            await first.rollouts.begin(decode_order(order_of(models)))
        fence = first.lease.fence
        first.store.is_cut = True
        await until(lambda: not first.lease.holds)
        first.store.is_cut = False
        await first.conducts()
        assert first.lease.fence != fence and first.rollouts.all == {}, "nor does it begin with the next lease"
        first.store.unanswered, first.store.lost = set(), set()
        while await recorded(first):
            await clock.sleep(0.02)
        await first.rollouts.begin(decode_order(order_of(models)))
        await until(lambda: set(first.channel.published) == {"edge-1"})


@pytest.mark.usefixtures("_short_lease")
async def test_an_order_that_was_refused_and_could_not_be_removed_waits_for_a_person(tmp_path: Path) -> None:
    models = repository(tmp_path / "models")
    async with asyncio.timeout(12.0), AsyncExitStack() as stack:  # a state is saved every 15 s in any case
        store = stack.enter_context(RedisServer(tmp_path))
        first = await ConductingGateway(stack, tmp_path, models, "a", store.url).start()
        await first.conducts()
        first.store.unanswered, first.store.lost = {"record"}, {"forget"}
        with pytest.raises(NotRecorded):
            await first.rollouts.begin(decode_order(order_of(models)))
        first.store.is_cut = True

        second = await ConductingGateway(stack, tmp_path, models, "b", store.url).start()
        await second.conducts()
        while await recorded(second) != {ROLLOUT: RolloutPhase.PAUSED}:  # some turns later
            await clock.sleep(0.02)
        assert second.channel.published == {}
        assert "never confirmed" in second.rollouts.all[ROLLOUT].state.reason
        with pytest.raises(RolloutConflict, match=f"edge-1 is in rollout {ROLLOUT}, which is paused"):
            await second.rollouts.begin(decode_order(order_of(models, id="other")))
        first.store.is_cut = False
        await second.rollouts.command(ROLLOUT, "resume", "")
        await until(lambda: set(second.channel.published) == {"edge-1"})


@pytest.mark.usefixtures("_short_lease")
async def test_an_abort_without_the_store_is_no_success_and_yet_outlives_the_lease(tmp_path: Path) -> None:
    models = repository(tmp_path / "models")
    async with asyncio.timeout(30.0), AsyncExitStack() as stack:
        store = stack.enter_context(RedisServer(tmp_path))
        first = await ConductingGateway(stack, tmp_path, models, "a", store.url).start()
        await first.conducts()
        await first.rollouts.begin(decode_order(order_of(models)))
        await until(lambda: set(first.channel.published) == {"edge-1"})
        fence = first.lease.fence
        first.store.is_cut = True
        for _ in range(2):  # said again it is no conflict either
            with pytest.raises(NotRecorded, match=f"the abort of {ROLLOUT} is not recorded: .*tries again"):
                await first.rollouts.command(ROLLOUT, "abort", "operator")
        kept = (tmp_path / "a" / "rollouts" / ROLLOUT / "state.json").read_bytes()
        assert msgspec.json.decode(kept, type=CanaryState).phase is RolloutPhase.RUNNING, "no newer than the store's"
        await until(lambda: not first.lease.holds)
        first.reports("committed", "edge-1")  # with this it would ask the rest
        first.store.is_cut = False
        await first.conducts()
        assert first.lease.fence != fence
        await until(lambda: first.channel.published["edge-1"].revision == 2)
        assert set(first.channel.published) == {"edge-1"}
        assert await recorded(first) == {ROLLOUT: RolloutPhase.RETURNING}


@pytest.mark.usefixtures("_short_lease")
@pytest.mark.parametrize("asks", [True, False])
async def test_what_was_not_recorded_yields_to_a_gateway_that_has_conducted(tmp_path: Path, asks: bool) -> None:
    """Args: asks: whether it has asked more devices meanwhile."""
    models = repository(tmp_path / "models")
    async with asyncio.timeout(30.0), AsyncExitStack() as stack:
        store = stack.enter_context(RedisServer(tmp_path))
        first = await ConductingGateway(stack, tmp_path, models, "a", store.url).start()
        await first.conducts()
        await first.rollouts.begin(decode_order(order_of(models)))
        await until(lambda: set(first.channel.published) == {"edge-1"})
        first.store.is_cut = True
        with pytest.raises(NotRecorded):
            await first.rollouts.command(ROLLOUT, "abort", "operator")
        async with AsyncExitStack() as life:
            second = await ConductingGateway(life, tmp_path, models, "b", store.url).start()
            await until(lambda: set(second.channel.published) == {"edge-1"})
            first.store.is_cut, first.channel.published = False, {}
            await until(lambda: first.lease.is_anothers)
            first.channel.session = 2
            first.rollouts.fleet_changed()  # instead of ten seconds
            if asks:
                second.reports("committed", "edge-1")
                await until(lambda: set(second.channel.published) == set(NAMES))
            else:
                second.channel.session = 0
        await first.conducts()
        await until(lambda: set(first.channel.published) == set(second.channel.published))
        assert {one.revision for one in first.channel.published.values()} == {1}
        assert first.rollouts.all[ROLLOUT].state.phase is RolloutPhase.RUNNING


@pytest.mark.usefixtures("_short_lease")
async def test_what_cannot_be_read_in_the_store_is_left_alone_and_the_rest_goes_on(tmp_path: Path) -> None:
    models = repository(tmp_path / "models")
    put = StoreScript("put", "redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) return 1")
    no_utf8 = b'{"parts":{},"reason":"\xff"}'
    async with asyncio.timeout(30.0), AsyncExitStack() as stack:
        store = stack.enter_context(RedisServer(tmp_path))
        first = await ConductingGateway(stack, tmp_path, models, "a", store.url).start()
        await first.conducts()
        await first.rollouts.begin(decode_order(order_of(models)))
        await until(lambda: set(first.channel.published) == {"edge-1"})
        orders, states = (first.store.key("rollouts", kind) for kind in ("orders", "states"))
        for id, packed in (
            (b"not-packed", b"not packed"),
            (b"\xff", zlib.compress(order_of(models, id="name"))),
            (b"../elsewhere", zlib.compress(order_of(models, id="elsewhere"))),
            (b"no-state", zlib.compress(order_of(models, id="no-state"))),
        ):
            await first.store.run(put, [orders], [id, packed])
        await first.store.run(put, [states], [b"no-state", no_utf8])
        first.store.is_cut = True

        second = await ConductingGateway(stack, tmp_path, models, "b", store.url).start()
        await until(lambda: set(second.channel.published) == {"edge-1"})
        assert set(second.rollouts.all) == {ROLLOUT}
        assert [one.name for one in (tmp_path / "b" / "rollouts").iterdir()] == [ROLLOUT]
