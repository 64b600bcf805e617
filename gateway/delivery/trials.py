"""Trials of two versions: the stored splits, the figures of each version, and the comparison of their answers.

The splits are one small file, written before they take effect, so that a restarted gateway continues with them; without
a file (`trials_file`) they last as long as the process. Figures begin anew with each split, and with the process.

A comparison sends the request to the candidate too, after the standing version has answered: at the lowest priority,
at most `COMPARED_AT_ONCE` at a time and none while the gateway is crowded, in tasks that this module owns. No caller
waits for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import structlog

from gateway.catalog import Catalog
from gateway.core.versions.traffic_split import InvalidSplit, TrafficSplit, TrafficSplits
from gateway.core.versions.version_figures import Agreement, VersionFigures
from gateway.layers.stack import Service
from tidegate import clock
from tidegate.arrays import tensor_to_array
from tidegate.config import ConfigError
from tidegate.models.alike import differences
from tidegate.oip.request_constraints import version_of
from tidegate.outcome import ModelNotFound, ServeError
from tidegate.priority import LAST_LEVEL
from tidegate.runtime.owned_task import cancel_and_wait
from tidegate.storage.atomic_file import write_atomically
from tidegate.types import Call, InferResponse, Reply

COMPARED_AT_ONCE: Final = 2
MAX_FILE_BYTES: Final = 1 << 20

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class TrialFigures:
    """One split's figures."""

    figures: dict[str, VersionFigures] = field(default_factory=dict)
    agreement: Agreement = field(default_factory=Agreement)
    began_at_utc: float = 0.0

    def of(self, version: str) -> VersionFigures:
        return self.figures.setdefault(version, VersionFigures())


class Trials:
    """The splits of a gateway. `async with` reads the file; its end cancels running comparisons.

    Args:
        file: where the splits are stored; None: nowhere.
        draw: chance, uniform in [0, 1).
        crowded: whether there is no room for comparisons now.
        ask: the service that comparisons are sent to; None: nothing is compared.
    """

    def __init__(
        self,
        file: Path | None,
        catalog: Catalog,
        draw: Callable[[], float],
        crowded: Callable[[], bool],
        ask: Service | None = None,
    ) -> None:
        self.splits = TrafficSplits()
        self.watched: dict[str, TrialFigures] = {}
        self.ask = ask
        self._file = file
        self._catalog = catalog
        self._draw = draw
        self._crowded = crowded
        self._comparisons: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Trials:
        if self._file is not None:
            self.splits = await asyncio.to_thread(_read, self._file)
            self.watched = {model: TrialFigures(began_at_utc=clock.utc_s()) for model in self.splits.split}
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_and_wait(*self._comparisons)

    # operators' commands

    async def begin(self, model: str, split: TrafficSplit) -> None:
        """Begin or change a trial. Raises InvalidSplit: the two versions cannot replace each other."""
        try:
            standing, candidate = (self._catalog.manifest(model, one) for one in (split.standing, split.candidate))
        except ModelNotFound as error:
            raise InvalidSplit(error.message) from error
        if apart := differences(standing, candidate):
            raise InvalidSplit(
                f"{model}: the manifests of versions {split.standing} and {split.candidate} differ in "
                f"{', '.join(apart)}, so that a caller of one could not use the other"
            )
        before = self.splits.split.get(model)
        await self._store(self.splits.begun(model, split))
        if before is None or (before.standing, before.candidate) != (split.standing, split.candidate):
            self.watched[model] = TrialFigures(began_at_utc=clock.utc_s())
        log.info("a version is on trial", model=model, **msgspec.to_builtins(split))

    async def promote(self, model: str) -> None:
        """Make the candidate the default version. Raises InvalidSplit: nothing is on trial."""
        await self._store(self.splits.after_promotion(model))
        log.info("the candidate is promoted", model=model, version=self.splits.promoted[model])

    async def call_back(self, model: str) -> None:
        """End the trial and keep the standing version. Raises InvalidSplit: nothing is on trial."""
        await self._store(self.splits.after_return(model))
        log.info("the trial is over, and the standing version stays", model=model)

    async def _store(self, splits: TrafficSplits) -> None:
        if self._file is not None:
            await asyncio.to_thread(_write, self._file, splits)
        self.splits = splits

    # for the layer `gateway/layers/versions.py`

    def turn(self, call: Call) -> Sequence[str]:
        request = call.request
        wish = version_of(call.headers, request.parameters) if call.headers or request.parameters else ""
        model = request.model_name
        if not wish and model not in self.splits.split and model not in self.splits.promoted:
            return ()
        return self.splits.turn(model, wish, call.tenant, self._draw())

    def answered(self, call: Call, version: str, reply: Reply, took_s: float) -> None:
        model = call.request.model_name
        split, watched = self.splits.split.get(model), self.watched.get(model)
        if split is None or watched is None:
            return
        figures, route = watched.of(version), reply.route
        in_time = call.deadline is None or clock.now() <= call.deadline
        figures.record("in_time" if in_time else "late", took_s)
        if route is not None:
            figures.provisional += route.provisional
            figures.escalated += route.reason == "escalated"
            figures.degraded += route.degraded
        if version == split.standing and split.compare and self._draw() < split.compare:
            self._compare(call, reply.response, split.candidate, watched.agreement)

    def failed(self, call: Call, version: str, error: BaseException, took_s: float) -> None:
        watched = self.watched.get(call.request.model_name)
        if watched is not None and call.request.model_name in self.splits.split:
            code = error.code if isinstance(error, ServeError) else "internal"
            watched.of(version).record("failed", took_s, code)

    # comparisons

    def _compare(self, call: Call, answer: InferResponse, candidate: str, agreement: Agreement) -> None:
        if self.ask is None or len(self._comparisons) >= COMPARED_AT_ONCE or self._crowded():
            return
        comparison = self._compared(self.ask, call, answer, candidate, agreement)
        task = asyncio.create_task(comparison, name=f"compare {call.request.model_name}:{candidate}")
        self._comparisons.add(task)
        task.add_done_callback(self._comparisons.discard)

    async def _compared(
        self, ask: Service, call: Call, answer: InferResponse, candidate: str, agreement: Agreement
    ) -> None:
        now = clock.now()
        budget_s = call.deadline - call.arrived_at if call.deadline is not None else 1.0
        try:
            again = msgspec.structs.replace(
                call,
                request=call.request.pinned(candidate),
                arrived_at=now,
                deadline=now + budget_s,
                priority=LAST_LEVEL,
                variant="",
                tenant="",  # counts against no quota, as no caller requested it
                identity=None,
                on_accepted=None,
            )
            other = (await ask(again)).response
            classes = self._catalog.manifest(call.request.model_name, candidate).confidence is not None
            agreement.record(*compare_outputs(answer, other), classes=classes)
        except ServeError:
            agreement.unanswered += 1
        except Exception:
            log.exception("two versions' answers could not be compared", model=call.request.model_name)

    def __repr__(self) -> str:
        return f"<Trials {', '.join(self.splits.split) or 'none'}, {len(self._comparisons)} comparisons>"


def compare_outputs(one: InferResponse, other: InferResponse) -> tuple[list[float], list[bool]]:
    """Return, for each row of the float outputs that both have, the cosine and whether the largest column agrees."""
    cosines: list[float] = []
    same: list[bool] = []
    theirs = {tensor.name: tensor for tensor in other.outputs}
    for tensor in one.outputs:
        match = theirs.get(tensor.name)
        if match is None or match.shape != tensor.shape or not tensor.datatype.value.startswith("FP"):
            continue
        # only rows of a vector: a single column has neither a direction nor a largest column
        if len(tensor.shape) < 2 or tensor.shape[-1] < 2:
            continue
        a, b = (tensor_to_array(each).reshape(-1, tensor.shape[-1]).astype(np.float64) for each in (tensor, match))
        # cosine of each row: dot product over the product of lengths; `tiny` keeps rows of zeros from dividing by zero
        lengths = np.maximum(np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1), np.finfo(np.float64).tiny)
        cosines += [float(value) for value in (a * b).sum(axis=1) / lengths]
        same += [bool(value) for value in a.argmax(axis=1) == b.argmax(axis=1)]
    return cosines, same


def _read(file: Path) -> TrafficSplits:
    try:
        with file.open("rb") as opened:
            raw = opened.read(MAX_FILE_BYTES)
        return msgspec.json.decode(raw, type=TrafficSplits)
    except FileNotFoundError:
        return TrafficSplits()
    except (OSError, msgspec.MsgspecError, InvalidSplit) as error:
        raise ConfigError(f"{file} (key 'trials_file') cannot be used: {error}; move it away to begin anew") from error


def _write(file: Path, splits: TrafficSplits) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, msgspec.json.encode(splits), mode=0o600)
