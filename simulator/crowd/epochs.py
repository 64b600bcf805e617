"""Session numbers of a simulated device, in memory: ten thousand on disk would be a test of this machine's disk."""

from __future__ import annotations

from pathlib import Path

from edge_agent.fleet.epoch import EpochStore


class InMemoryEpochs(EpochStore):
    """An `EpochStore` that lasts as long as its device is simulated."""

    def __init__(self) -> None:
        super().__init__(Path("nowhere"))
        self._number = 0

    def _read(self) -> int:
        return self._number

    def _write(self, epoch: int) -> None:
        self._number = epoch
