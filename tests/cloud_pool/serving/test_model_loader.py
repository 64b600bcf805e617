"""A pool's model loader: what takes over works, and what ends leaves nothing; with workers that are pretended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from msgspec.structs import replace

from cloud_pool.core.memory.residency import Residency
from cloud_pool.scheduling.scheduler import PoolScheduler
from cloud_pool.serving.coalescing import Coalescer
from cloud_pool.serving.host import PoolHost
from cloud_pool.serving.model_loader import PoolModelLoader
from cloud_pool.serving.on_demand import OnDemand
from cloud_pool.serving.pool_model import PoolModel, VariantRelief
from cloud_pool.serving.sequence_state import Arrays, SequenceStates
from cloud_pool.workers.device_worker import PoolLoadable
from cloud_pool.workers.model_workers import ModelWorkers
from cloud_pool.workers.residents import Resident, Residents
from tests.cloud_pool.models import TEXT
from tests.support.loop import on_virtual_time, settle
from tidegate import clock
from tidegate.models.manifest import Manifest, Stateful, TensorSpec
from tidegate.outcome import InvalidRequest, OutOfMemory, Unreachable
from tidegate.runtime.process import StartError
from tidegate.serving.model_table import ModelTable
from tidegate.types import Datatype

LOAD_S = 2.0


@dataclass
class PretendedResident:
    """One that takes its time to come in, or fails then."""

    loadables: Sequence[PoolLoadable]
    fails: bool = False
    in_memory: bool = False
    entering: asyncio.Event = field(default_factory=asyncio.Event)
    generates: bool = False
    held_bytes: float = 0.0
    steps: None = None
    lanes: dict[str, Any] = field(default_factory=dict)

    @property
    def manifest(self) -> Manifest:
        return self.loadables[0].manifest

    @property
    def name(self) -> str:
        return self.manifest.name

    async def enter(self) -> None:
        self.entering.set()
        await clock.sleep(LOAD_S)
        if self.fails:
            raise StartError(f"{self.name} is broken")
        self.in_memory = True

    async def leave(self, reason: str) -> None:
        self.in_memory = False


class PoolOfPretended:
    """A loader over a repository of versions by name, with one model in memory at a time."""

    def __init__(self, *, resident_models: int | None = 1) -> None:
        self.versions: dict[str, str] = {}
        self.broken: set[tuple[str, str]] = set()
        self.pinned: set[str] = set()
        self.entering = asyncio.Event()  # set when a load begins: files are read in a thread before
        self.residents = Residents()
        self.sequences = SequenceStates()
        self.models = ModelTable[Any]("pool/p")
        self.on_demand = None if resident_models is None else OnDemand(Residency(most_models=resident_models))
        host = SimpleNamespace(models=self.models, sequences=self.sequences, batched_model=self.model)
        self.loader = PoolModelLoader(
            cast(PoolHost, host), self.residents, read=self.read, make=self.resident, on_demand=self.on_demand
        )

    def read(self, name: str, reload: int) -> Sequence[PoolLoadable]:
        warm: Any = {"warm": "always"} if name in self.pinned else {}
        manifest = replace(TEXT, name=name, version=self.versions[name], **warm)
        return [PoolLoadable(manifest, manifest.variants[0], Path("x"), reload=reload)]

    def resident(self, loadables: Sequence[PoolLoadable]) -> Resident:
        manifest = loadables[0].manifest
        fails = (manifest.name, manifest.version) in self.broken
        return cast(Resident, PretendedResident(loadables, fails=fails, entering=self.entering))

    def model(self, loadables: Sequence[PoolLoadable], workers: Any, *_: object, **__: object) -> PoolModel:
        scheduler = PoolScheduler()
        return PoolModel(
            "pool/p",
            loadables,
            scheduler,
            cast(ModelWorkers, workers),
            sequences=self.sequences,
            coalescer=Coalescer(scheduler.submit),
            relief=VariantRelief(),
        )

    async def load(self, name: str, version: str) -> None:
        self.versions[name] = version
        await self.loader.load(name)

    @property
    def in_memory(self) -> list[str]:
        return [f"{one.name}:{one.manifest.version}" for one in self.residents if one.in_memory]


@asynccontextmanager
async def pool_of_one(*, pinned: Sequence[str] = ()) -> AsyncIterator[PoolOfPretended]:
    """`a` and `b` are offered, and `a` is in memory."""
    pool = PoolOfPretended()
    pool.pinned.update(pinned)
    assert pool.on_demand is not None
    async with pool.on_demand:
        await pool.load("a", "1")
        await pool.load("b", "1")
        assert pool.in_memory == ["a:1"]
        yield pool


@on_virtual_time
async def test_a_version_that_cannot_be_loaded_takes_the_place_of_none_that_can() -> None:
    async with pool_of_one() as pool:
        before = pool.models.find("b")
        pool.broken.add(("b", "2"))
        with pytest.raises(StartError, match="b is broken"):
            await pool.load("b", "2")
        assert pool.models.find("b") is before
        assert [(one.name, one.manifest.version) for one in pool.residents] == [("a", "1"), ("b", "1")]
        assert pool.on_demand is not None
        waits = pool.on_demand.hold("b", clock.now() + 60.0)
        assert waits is not None
        await waits
        assert pool.in_memory == ["b:1"]


@on_virtual_time
async def test_a_version_that_takes_over_has_been_in_memory_whatever_went_out_for_it() -> None:
    async with pool_of_one() as pool:
        await pool.load("b", "2")
        assert pool.in_memory == ["b:2"] and pool.models.find("b").manifest.version == "2"
        assert pool.on_demand is not None and pool.on_demand.hold("b", clock.now() + 60.0) is None


@on_virtual_time
async def test_a_version_for_which_there_is_no_room_takes_over_from_none() -> None:
    async with pool_of_one(pinned=["a"]) as pool:
        with pytest.raises(OutOfMemory, match="no room for b:2 beside what stays in memory"):
            await pool.load("b", "2")
        assert pool.models.find("b").manifest.version == "1" and pool.in_memory == ["a:1"]


@on_virtual_time
async def test_a_load_that_is_cancelled_leaves_the_version_that_serves() -> None:
    async with pool_of_one() as pool:
        pool.entering.clear()
        load = asyncio.create_task(pool.load("b", "2"))
        await pool.entering.wait()
        await clock.sleep(LOAD_S / 2)
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
        assert pool.models.find("b").manifest.version == "1"
        assert [(one.name, one.manifest.version) for one in pool.residents] == [("a", "1"), ("b", "1")]
        assert pool.on_demand is not None
        waits = pool.on_demand.hold("a", clock.now() + 60.0)
        assert waits is not None
        await waits


@on_virtual_time
async def test_a_failed_load_of_the_version_before_strands_none_who_wait_for_the_next() -> None:
    pool = PoolOfPretended()
    assert pool.on_demand is not None
    pool.broken.add(("a", "1"))
    async with pool.on_demand as demanded:
        waits: list[asyncio.Future[None]] = []
        for version in ("1", "2"):
            pool.versions["a"] = version
            loadables = pool.read("a", 0)
            resident = pool.resident(loadables)
            await demanded.take(resident, pool.model(loadables, resident))
            held = demanded.hold("a", clock.now() + 60.0)
            assert held is not None
            waits.append(held)
            await settle()  # a load of the first is under way
        with pytest.raises(Unreachable, match="replaced by another version"):
            await waits[0]
        before = clock.now()
        await waits[1]
        assert clock.now() - before == pytest.approx(2 * LOAD_S)  # the one that fails, and its own


COUNTING = replace(
    TEXT,
    inputs=(*TEXT.inputs, TensorSpec("seen", Datatype.INT64, ("batch", 1), optional=True)),
    outputs=(*TEXT.outputs, TensorSpec("next", Datatype.INT64, ("batch", 1))),
    sequence=Stateful({"seen": "next"}, ttl_s=60.0, max_sequences=1),
)


async def count(states: SequenceStates, loaded: object, manifest: Manifest = COUNTING, **flags: bool) -> int:
    async def run(arrays: Arrays) -> Any:
        (name,) = [one for one in arrays if one not in ("ids", "mask")]
        return SimpleNamespace(outputs={"next": arrays[name] + 1, "after": arrays[name] + 1})

    arrays = dict.fromkeys(("ids", "mask"), np.ones((1, 4), np.int64))
    said = {"sequence_id": 7, **{f"sequence_{name}": value for name, value in flags.items()}}
    return int((await states.remembering(loaded, manifest, said, arrays, run)).outputs["next"][0, 0])


@on_virtual_time
async def test_a_sequence_of_one_version_is_not_known_to_another_and_each_has_its_own_limits() -> None:
    states = SequenceStates()
    assert [await count(states, "old", start=True), await count(states, "old")] == [1, 2]
    renamed = replace(
        COUNTING,
        inputs=(*TEXT.inputs, TensorSpec("kept", Datatype.INT64, ("batch", 1), optional=True)),
        outputs=(*TEXT.outputs, TensorSpec("after", Datatype.INT64, ("batch", 1))),
        sequence=Stateful({"kept": "after"}, ttl_s=1.0),
    )
    with pytest.raises(InvalidRequest, match=r"not known here.*begin with sequence_start"):
        await count(states, "new", renamed)
    assert await count(states, "new", renamed, start=True) == 1
    assert await count(states, "old") == 3 and states.live(TEXT.name) == 2
    await clock.sleep(2.0)
    assert states.live(TEXT.name) == 1, "the new one's ttl_s"
    states.drop("old")
    states.drop("new")
    states.drop("none")
    assert states.live(TEXT.name) == 0
    states.close()


@on_virtual_time
async def test_the_sequences_of_a_model_end_with_it() -> None:
    pool = PoolOfPretended(resident_models=None)
    leaves: list[Callable[[], Awaitable[None]]] = [lambda: pool.load("text", "2"), lambda: pool.loader.unload("text")]
    for leave in leaves:
        await pool.load("text", "1")
        await count(pool.sequences, pool.models.find("text"), start=True)
        assert pool.sequences.live("text") == 1
        await leave()
        assert pool.sequences.live("text") == 0
