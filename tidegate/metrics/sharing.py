"""Merges the metrics of several processes: each leaves its snapshot in a folder, and the scraped process adds them up.

Behind one address a scrape reaches any of the gateways, and the next one another: each must answer for all, and no
counter may ever be seen to fall, since Prometheus takes that for a restart and counts everything anew.

    counters, histograms   summed over all processes, also those that have ended: their last snapshot is folded into
                           `departed.json`, once
    gauges                 those of living processes, each with its name as its `pid`

A process is known to live by a lock on a file of its own, which the kernel gives back when a process ends, however it
ends: no pid that was used again and no clock can deceive it. Its files have its pid and a random word for a name, since
each container has a process 1, the next one after a restart as well. A process writes its snapshot every `EVERY_S` and
before each of its own answers, so that the next answer, of whichever process, is never less than an earlier one;
others' numbers are that old at most.

One process at a time folds, whichever is asked while there is something to fold. It holds a lock for which no other
one waits, as the loop that serves requests would wait with it: the others read what they find (`_beside_a_fold`).

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
import secrets
from collections.abc import Callable, Iterable, Iterator
from math import inf, isfinite
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
_QUIET_S: Final = 60.0
MOST_BYTES: Final = 32 * 2**20  # of one snapshot
_DEPARTED: Final = "departed.json"
_LOCK: Final = "folding.lock"
_GAUGE: Final = "gauge"
_TRIES: Final = 10  # to read between two folds
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
        name: this process's files', unique among all that ever shared; its pid and a random word by default.
    """

    def __init__(self, folder: Path, *, name: str = "") -> None:
        self.own: Callable[[], Iterable[Metric]] = tuple
        self._folder = folder
        self._name = name or f"{os.getpid()}-{secrets.token_hex(4)}"
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
        hidden = self._folder / f".{self._name}.life"
        held = _locked(hidden)
        try:
            hidden.rename(self._folder / f"{self._name}.life")  # locked when it appears: no other one finds it free
        except OSError:
            os.close(held)
            raise
        self._life = held

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
        quiet_until = -inf  # a full disk, or too few files, may last: a line each second says no more
        while True:
            try:
                if self._life is None:
                    self._join()  # its disk took nothing at the start
                self._write(list(self.own()))
            except OSError as why:
                if (now := clock.now()) >= quiet_until:
                    log.warning("metrics are not left for others", folder=str(self._folder), error=str(why))
                    quiet_until = now + _QUIET_S
            await clock.sleep(EVERY_S)

    def _write(self, own: list[Metric]) -> None:
        _put(self._folder / f"{self._name}.json", MetricsSnapshot(_families(own)))

    def _others(self) -> list[tuple[str, list[_Family]]]:
        """(process, its families) of all others; those that have ended together, under no name."""
        try:
            lock = _locked(self._folder / _LOCK)
        except BlockingIOError:
            return self._beside_a_fold()
        try:
            departed = self._departed()
            living, ended = [], []
            for name in self._left():
                if not self._is_over(name):
                    living.append((name, self._snapshot(name)))
                elif name in departed.folded:
                    self._remove(name)  # another process was interrupted between folding it and this
                else:
                    ended.append(name)
            departed = self._fold(departed, ended)
            self._remove_lifeless()
        finally:
            os.close(lock)
        found = [(name, snapshot.families) for name, snapshot in living if snapshot is not None]
        return [("", departed.families), *found]

    def _beside_a_fold(self) -> list[tuple[str, list[_Family]]]:
        """The same while another process folds.

        That one writes `departed.json` before it removes what is in it. So what was read while that file said the same
        is all that was left, and nothing of it twice.
        """
        for _ in range(_TRIES):
            departed = self._departed()
            found = [("", departed.families)]
            for name in self._left():
                if name in departed.folded or (snapshot := self._snapshot(name)) is None:
                    continue
                is_over = self._is_over(name)
                found.append(("", _counts(snapshot)) if is_over else (name, snapshot.families))
            if self._departed().folded == departed.folded:
                break
        return found

    def _left(self) -> list[str]:
        """The names of the others that have left a snapshot."""
        names = [path.stem for path in sorted(self._folder.glob("*.json")) if path.name != _DEPARTED]
        return [name for name in names if name != self._name]

    def _departed(self) -> MetricsSnapshot:
        return _read(self._folder / _DEPARTED) or MetricsSnapshot([])

    def _snapshot(self, name: str) -> MetricsSnapshot | None:
        return _read(self._folder / f"{name}.json")

    def _remove(self, name: str) -> None:
        for left in (f"{name}.json", f"{name}.life"):
            (self._folder / left).unlink(missing_ok=True)

    def _remove_lifeless(self) -> None:
        """Processes that ended before they had written anything."""
        for path in self._folder.glob("[!.]*.life"):  # one that is hidden is being made
            if not path.with_suffix(".json").exists() and self._is_over(path.stem):
                path.unlink(missing_ok=True)

    def _fold(self, departed: MetricsSnapshot, ended: list[str]) -> MetricsSnapshot:
        if not ended:
            return departed
        sums = _Sums()
        sums.add(departed.families, "")
        for name in ended:
            last = self._snapshot(name)
            sums.add(_counts(last) if last else [], name)
        departed = MetricsSnapshot(sums.families(), ended)
        _put(self._folder / _DEPARTED, departed)
        for name in ended:
            self._remove(name)
        return departed

    def _is_over(self, name: str) -> bool:
        """Whether the process has ended, so that its lock is free."""
        try:
            held = os.open(self._folder / f"{name}.life", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two that look at once both find it free
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


def _counts(snapshot: MetricsSnapshot) -> list[_Family]:
    """What outlives its process."""
    return [one for one in snapshot.families if one.kind != _GAUGE]


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
    """The open file, locked for as long as it is open. Raises BlockingIOError where another one has it locked."""
    held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
