"""Versions that were rolled out are known to every worker of a gateway, to those that come later too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from gateway.catalog import Catalog
from gateway.core.versions.traffic_split import TrafficSplits
from gateway.default_versions import DefaultVersions
from gateway.delivery.trials import Trials
from gateway.workers.keeper_side import KeeperSide
from gateway.workers.process_part import ProcessPart
from gateway.workers.worker_side import WorkerSide
from tests.support.gateway.fleets import fleet_of
from tests.support.loop import on_virtual_time
from tests.support.models.tiny_models import double_manifest
from tidegate import clock

ONE = double_manifest()
TWO = msgspec.structs.replace(ONE, version="2")


class Beside(ProcessPart):
    """One process's part, whose words go to the others at once, as bytes."""

    def __init__(self, name: str) -> None:
        self.others: list[Beside] = []
        self.called = name
        self.hearers: dict[str, Callable[[str, bytes], None]] = {}
        self.listeners: list[Callable[[], None]] = []

    @property
    def name(self) -> str:
        return self.called

    def tell(self, to: Any, kind: str, said: msgspec.Struct) -> None:
        for other in self.others:
            if (hearer := other.hearers.get(kind)) is not None:
                hearer(self.called, msgspec.msgpack.encode(said))

    def hear(self, kind: Any, hearer: Any) -> None:
        decoder = msgspec.msgpack.Decoder(kind)
        self.hearers[kind.__name__] = lambda by, payload: hearer(by, decoder.decode(payload))

    def on_members(self, listener: Callable[[], None]) -> None:
        self.listeners.append(listener)

    def changed(self) -> None:
        for listener in self.listeners:
            listener()

    def __repr__(self) -> str:
        return f"<Beside {self.called}>"


def trials_of(catalog: Catalog) -> Trials:
    return Trials(None, DefaultVersions(catalog, fleet_of()), lambda: 0.5, lambda: False)


@on_virtual_time
async def test_what_was_shipped_is_told_once_and_again_to_those_that_come_later() -> None:
    keepers, taken = Catalog([ONE]), list[str]()
    keeper, first, later = Beside("keeper"), Beside("worker-1"), Beside("worker-2")
    keeper.others = [first]

    def worker(part: Beside) -> WorkerSide:
        return WorkerSide(part, trials_of(Catalog([ONE])), None, TrafficSplits,  # type: ignore[arg-type,return-value]
                          lambda manifest: taken.append(f"{part.called}: {manifest.version}"))  # fmt: skip

    sides = KeeperSide(
        keeper, trials_of(keepers), None, None, keepers.manifest, lambda: keepers.shipped, max_message_bytes=2**20
    )
    async with worker(first), sides, worker(later):
        await clock.sleep(2.0)
        assert taken == []
        keepers.ship((TWO,))
        await clock.sleep(5.0)
        assert taken == ["worker-1: 2"]
        keeper.others.append(later)
        keeper.changed()
        assert taken[1:] == ["worker-1: 2", "worker-2: 2"]
