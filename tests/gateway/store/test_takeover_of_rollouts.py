"""Several gateways and one store: one conducts rollouts, another goes on when it dies, and a stale one cannot."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from gateway.config.store import SharedStoreConfig
from gateway.core.versions.canary import RolloutPhase
from gateway.delivery.artifacts.store import ArtifactStore
from gateway.delivery.rollouts.conductor_lease import LEASE_S, ConductorLease, NotConducting
from gateway.delivery.rollouts.coordinator import RolloutConflict, RolloutController
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
from tidegate.models.repository import Repository

pytestmark = [pytest.mark.slow, pytest.mark.skipif(REDIS is None, reason="redis-server is not installed")]
ROLLOUT = "double-2-a"


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.delivery.rollouts.coordinator.SETTLE_S", 0.0)


class CutStore(SharedStore):
    """The way to it can be cut."""

    is_cut = False

    async def run_each(self, script: StoreScript, calls: Sequence[StoreCall]) -> list[Any]:
        if self.is_cut:
            raise StoreUnavailable("the network is gone")
        return await super().run_each(script, calls)


class ConductingGateway:
    """A gateway's rollouts with a disk and a session of its own; it can be cut off, as one that is stopped."""

    def __init__(self, stack: AsyncExitStack, folder: Path, models: Repository, name: str, url: str) -> None:
        self._stack = stack
        self.channel = FakeChannel(*NAMES)
        self.store = CutStore(SharedStoreConfig(url=url), "site", lambda: 0.5)
        self.stands_still_at: float | None = None  # its clock
        self.lease = ConductorLease(self.store, name, self._now)
        artefacts = ArtifactStore(folder / name)
        fill(artefacts, models)
        ships: Any = lambda _manifests: None  # noqa: E731
        self.rollouts = RolloutController(
            artefacts, self.channel, ships, NothingPreferred(), lambda _model: {}, self.lease
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
            second.rollouts.command(ROLLOUT, "abort", "")

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
            first.rollouts.command(ROLLOUT, "abort", "it believes that it conducts")


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
