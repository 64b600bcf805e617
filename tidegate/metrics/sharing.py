"""Merges the metrics of several processes: each leaves its snapshot in a folder, and the scraped process adds them up.

Behind one address a scrape reaches any of the gateways, and the next one another: each must answer for all, and no
counter may ever be seen to fall, since Prometheus takes that for a restart and counts everything anew.

    counters, histograms   summed over all processes, also those that have ended: their last snapshot is folded into
                           `departed.json`, once
    gauges                 those of living processes, each with its `pid`

A process is known to live by a lock on a file of its own, which the kernel gives back when a process ends, however it
ends: no pid that was used again and no clock can deceive it. A process writes its snapshot every `EVERY_S` and before
each of its own answers, so that the next answer, of whichever process, is never less than an earlier one; others'
numbers are that old at most.

A crash between writing `departed.json` and removing what was folded into it counts nothing twice: the file names the
processes that it holds. Files appear whole or not at all (written beside, then renamed).

Invariants: for every counter, no answer of any process is less than an earlier answer of any other, as long as the
folder is kept. A file that cannot be read as a snapshot is skipped, with a line in the log.
How it can be wrong: processes must be on one machine, for the lock. A folder that several deployments share adds up
what does not belong together.

Prior art: prometheus-client's multiprocess mode, which maps each value into a file and needs its own counters for it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from math import isfinite
from pathlib import Path
from typing import Final, Self

import msgspec
import structlog
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Exemplar, Sample

from tidegate import clock
from tidegate.runtime.owned_task import OwnedTask
from tidegate.storage.atomic_file import write_atomically
from tidegate.storage.disk_failure import is_disk_failure

EVERY_S: Final = 1.0
MOST_BYTES: Final = 32 * 2**20  # of one snapshot
_DEPARTED: Final = "departed.json"
_LOCK: Final = "folding.lock"
_GAUGE: Final = "gauge"
log = structlog.get_logger(__name__)


class _Exemplar(msgspec.Struct, array_like=True):
    labels: dict[str, str]
    value: float
    utc_s: float | None


class _Sample(msgspec.Struct, array_like=True):
    name: str
    labels: dict[str, str]
    value: float
    exemplar: _Exemplar | None = None


class _Family(msgspec.Struct, array_like=True):
    name: str
    text: str
    kind: str
    samples: list[_Sample]


class MetricsSnapshot(msgspec.Struct):
    families: list[_Family]
    folded: list[str] = []  # of `departed.json`: the processes whose last snapshot is in it


class SharedMetrics:
    """One process's part in it, inside `async with`. `own` makes its families, and must be set before.

    Args:
        folder: the same for all; it is made if it is not there.
        name: this process's files', unique among those that share; its pid by default.
    """

    def __init__(self, folder: Path, *, name: str = "") -> None:
        self.own: Callable[[], Iterable[Metric]] = tuple
        self._folder = folder
        self._name = name or str(os.getpid())
        self._life: int | None = None
        self._task = OwnedTask(self._keep_writing, name="metrics snapshots")

    async def __aenter__(self) -> Self:
        """Raises OSError if the folder cannot be used, and its disk is not the reason."""
        try:
            self._join()
        except OSError as why:
            if not is_disk_failure(why):
                raise
            log.warning("metrics are this process's alone", folder=str(self._folder), error=str(why))
        self._task.start()
        return self

    def _join(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        lock = _locked(self._folder / _LOCK)  # no process with this pid is being folded now
        try:
            self._life = _locked(self._folder / f"{self._name}.life")
            (self._folder / f"{self._name}.json").unlink(missing_ok=True)
        finally:
            os.close(lock)

    async def __aexit__(self, *_: object) -> None:
        await self._task.aclose()
        if self._life is None:
            return
        try:
            self._write(list(self.own()))  # the last snapshot; the next scraped process folds it
        except OSError as why:
            log.warning("the last metrics were not left for others", folder=str(self._folder), error=str(why))
        os.close(self._life)

    def merged(self, own: list[Metric]) -> Iterator[Metric]:
        """All processes' families, this one's being `own`."""
        others: list[tuple[str, list[_Family]]] = []
        try:
            if self._life is not None:
                self._write(own)
                others = self._others()
        except OSError as why:  # a full disk must not end the scrapes
            log.warning("metrics are this process's alone", folder=str(self._folder), error=str(why))
        sums = _Sums()
        for snapshot in others:
            sums.add(snapshot[1], snapshot[0])
        sums.add(_families(own), self._name)
        return sums.metrics()

    async def _keep_writing(self) -> None:
        while True:
            try:
                if self._life is None:
                    self._join()  # its disk took nothing at the start
                self._write(list(self.own()))
            except OSError as why:
                log.warning("metrics are not left for others", folder=str(self._folder), error=str(why))
            await clock.sleep(EVERY_S)

    def _write(self, own: list[Metric]) -> None:
        _put(self._folder / f"{self._name}.json", MetricsSnapshot(_families(own)))

    def _others(self) -> list[tuple[str, list[_Family]]]:
        """(process, its families) of all others; those that have ended together, under no name."""
        lock = _locked(self._folder / _LOCK)
        try:
            departed = _read(self._folder / _DEPARTED) or MetricsSnapshot([])
            living, ended = [], []
            for path in sorted(self._folder.glob("*.json")):
                name = path.stem
                if path.name == _DEPARTED or name == self._name:
                    continue
                if not self._is_over(name):
                    living.append((name, _read(path)))
                elif name in departed.folded:
                    path.unlink()  # another process was interrupted between folding it and this
                else:
                    ended.append(name)
            departed = self._fold(departed, ended)
        finally:
            os.close(lock)
        found = [(name, snapshot.families) for name, snapshot in living if snapshot is not None]
        return [("", departed.families), *found]

    def _fold(self, departed: MetricsSnapshot, ended: list[str]) -> MetricsSnapshot:
        if not ended:
            return departed
        sums = _Sums()
        sums.add(departed.families, "")
        for name in ended:
            last = _read(self._folder / f"{name}.json")
            sums.add([one for one in last.families if one.kind != _GAUGE] if last else [], name)
        departed = MetricsSnapshot(sums.families(), ended)
        _put(self._folder / _DEPARTED, departed)
        for name in ended:
            for left in (f"{name}.json", f"{name}.life"):
                (self._folder / left).unlink(missing_ok=True)
        return departed

    def _is_over(self, name: str) -> bool:
        """Whether the process has ended, so that its lock is free."""
        try:
            held = os.open(self._folder / f"{name}.life", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(held)
        return True

    def __repr__(self) -> str:
        return f"<SharedMetrics {self._folder} as {self._name}>"


class _Sums:
    """Samples of several processes, added up by family, name and labels, in the order in which they first came."""

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}
        self._samples: dict[str, dict[tuple[str, frozenset[tuple[str, str]]], _Sample]] = {}

    def add(self, families: Iterable[_Family], process: str) -> None:
        for family in families:
            self._families.setdefault(family.name, family)
            known = self._samples.setdefault(family.name, {})
            for sample in family.samples:
                labels = {**sample.labels, "pid": process} if family.kind == _GAUGE else sample.labels
                key = sample.name, frozenset(labels.items())
                before = known.get(key)
                if before is None:
                    known[key] = _Sample(sample.name, labels, sample.value, sample.exemplar)
                else:
                    before.value += sample.value
                    before.exemplar = _newest(before.exemplar, sample.exemplar)

    def families(self) -> list[_Family]:
        return [
            _Family(name, one.text, one.kind, list(self._samples[name].values()))
            for name, one in self._families.items()
        ]

    def metrics(self) -> Iterator[Metric]:
        for family in self.families():
            metric = Metric(family.name, family.text, family.kind)
            metric.samples = [
                Sample(one.name, one.labels, one.value, None, _exemplar(one.exemplar)) for one in family.samples
            ]
            yield metric


def _families(metrics: Iterable[Metric]) -> list[_Family]:
    return [
        _Family(
            metric.name,
            metric.documentation,
            metric.type,
            [
                _Sample(one.name, dict(one.labels), float(one.value), _stored_exemplar(one.exemplar))
                for one in metric.samples
                if isfinite(one.value)  # JSON has no other numbers
            ],
        )
        for metric in metrics
    ]


def _stored_exemplar(exemplar: Exemplar | None) -> _Exemplar | None:
    if exemplar is None:
        return None
    return _Exemplar(exemplar.labels, exemplar.value, None if exemplar.timestamp is None else float(exemplar.timestamp))


def _exemplar(kept: _Exemplar | None) -> Exemplar | None:
    return None if kept is None else Exemplar(kept.labels, kept.value, kept.utc_s)


def _newest(one: _Exemplar | None, other: _Exemplar | None) -> _Exemplar | None:
    if one is None or other is None:
        return one or other
    return max(one, other, key=lambda exemplar: exemplar.utc_s or 0.0)


def _locked(path: Path) -> int:
    """The open file, locked for as long as it is open."""
    held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
    except BaseException:
        os.close(held)
        raise
    return held


def _read(path: Path) -> MetricsSnapshot | None:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"over {MOST_BYTES} bytes")
        return msgspec.json.decode(path.read_bytes(), type=MetricsSnapshot)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, ValueError) as why:
        log.warning("a metrics snapshot cannot be read", path=str(path), error=str(why))
        return None


def _put(path: Path, snapshot: MetricsSnapshot) -> None:
    write_atomically(path, msgspec.json.encode(snapshot), durable=False)  # every second, and for living processes only
