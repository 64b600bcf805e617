"""Trials of two versions: the stored splits, the figures of each version, and the comparison of their answers.

The splits and preferences are one small file, written before they take effect, so that a restarted gateway continues
with them; without a file (`trials_file`) they last as long as the process. Figures begin anew with each split, and with
the process.

A command is refused where it would prefer a version that no target serves while another is served; the refusal names
the versions on offer and the command that does what was wanted. Should such a version be lost later, requests get
another one all the same (`gateway/default_versions.py`).

A comparison sends the request to the candidate too, after the standing version has answered: at the lowest priority,
at most `COMPARED_AT_ONCE` at a time and none while the gateway is crowded, in tasks that this module owns. No caller
waits for them. Answers of models that generate are not compared, and a split that asks for it is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import structlog

from gateway.core.versions.traffic_split import InvalidSplit, TrafficSplit, TrafficSplits
from gateway.core.versions.version_figures import Agreement, AgreementCounts, FigureCounts, VersionFigures
from gateway.core.versions.version_shares import VersionTargets
from gateway.default_versions import DefaultVersions
from gateway.layers.stack import Service
from tidegate import clock
from tidegate.arrays import tensor_to_array
from tidegate.caller import tenant_of
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


class TrialCounts(msgspec.Struct, frozen=True):
    """What one process has counted of one version on trial, and of the agreement of both."""

    model: str
    version: str
    figures: FigureCounts
    agreement: AgreementCounts


class SplitRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A split as an operator asks for it: without `standing`, beside the present default version."""

    candidate: str
    standing: str = ""
    share: float = 0.0
    tenants: tuple[str, ...] = ()
    compare: float = 0.0


class Trials:
    """The splits of a gateway. `async with` reads the file; its end cancels running comparisons.

    Args:
        file: where the splits are stored; None: nowhere.
        defaults: holds what is set, and says what requests get.
        draw: chance, uniform in [0, 1).
        crowded: whether there is no room for comparisons now.
        ask: the service that comparisons are sent to; None: nothing is compared.
    """

    def __init__(
        self,
        file: Path | None,
        defaults: DefaultVersions,
        draw: Callable[[], float],
        crowded: Callable[[], bool],
        ask: Service | None = None,
    ) -> None:
        self.defaults = defaults
        self.watched: dict[str, TrialFigures] = {}
        self.ask = ask
        self._file = file
        self._catalog = defaults.catalog
        self._draw = draw
        self._crowded = crowded
        self.on_change: Callable[[], None] = lambda: None  # after the splits have changed
        self._changing = asyncio.Lock()  # each change is made from the one before it, also while that is being written
        self._comparisons: set[asyncio.Task[None]] = set()

    @property
    def splits(self) -> TrafficSplits:
        return self.defaults.splits

    async def __aenter__(self) -> Trials:
        if self._file is not None:
            self.defaults.splits = await asyncio.to_thread(_read, self._file)
            self.watched = {model: TrialFigures(began_at_utc=clock.utc_s()) for model in self.splits.split}
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_and_wait(*self._comparisons)

    # operators' commands

    async def begin(self, model: str, wanted: SplitRequest) -> None:
        """Begin or change a trial.

        Raises:
            InvalidSplit: the two versions cannot replace each other, or no target serves the standing one.
            ModelNotFound: no such model is known.
        """
        async with self._changing:
            split = self._split(model, wanted)
            before = self.splits.split.get(model)
            await self._store(self.splits.begun(model, split, prefer=bool(wanted.standing)))
            if before is None or (before.standing, before.candidate) != (split.standing, split.candidate):
                self.watched[model] = TrialFigures(began_at_utc=clock.utc_s())
        log.info("a version is on trial", model=model, **msgspec.to_builtins(split))

    async def promote(self, model: str) -> None:
        """Make the candidate the preferred version. Raises InvalidSplit: there is none, or no target serves it."""
        async with self._changing:
            candidate = self.splits.of(model).candidate
            served = self._served(model)
            if served and candidate not in served:
                raise InvalidSplit(
                    f"no target serves {model} {candidate}, so it cannot be promoted; {offered(model, served)}. To "
                    f"give it to devices: `tidegate model rollout {model} --version {candidate} --key KEY`; to end the "
                    f"trial: `tidegate model return {model}`"
                )
            await self._store(self.splits.after_promotion(model))
        log.info("the candidate is promoted", model=model, version=candidate)

    async def call_back(self, model: str) -> None:
        """End the trial; requests get what they got before it. Raises InvalidSplit: nothing is on trial."""
        async with self._changing:
            await self._store(self.splits.after_return(model))
        log.info("the trial is over, and the standing version stays", model=model)

    # what rollouts do to preferences

    async def rolled_out(self, model: str, version: str) -> None:
        """A rollout of the version has begun: requests follow the devices that get it."""
        async with self._changing:
            await self._store(self.splits.after_rollout(model, version))

    async def recalled(self, model: str, version: str) -> None:
        """Devices are called back from the version: it is preferred no longer."""
        async with self._changing:
            before = self.splits
            await self._store(before.after_recall(model, version))
        if self.splits is not before:
            log.warning(
                "the version is called back, so it is the preferred one no longer", model=model, version=version
            )

    def _split(self, model: str, wanted: SplitRequest) -> TrafficSplit:
        """The wanted split, beside the present default where it names no standing version."""
        default = wanted.standing or self._default_beside(model, wanted.candidate)
        split = TrafficSplit(default, wanted.candidate, wanted.share, wanted.tenants, wanted.compare)
        try:
            standing, candidate = (self._catalog.manifest(model, one) for one in (split.standing, split.candidate))
        except ModelNotFound as error:
            raise InvalidSplit(error.message) from error
        if apart := differences(standing, candidate):
            raise InvalidSplit(
                f"{model}: the manifests of versions {split.standing} and {split.candidate} differ in "
                f"{', '.join(apart)}, so that a caller of one could not use the other"
            )
        if split.compare and standing.generative is not None:
            raise InvalidSplit(
                f"{model} generates: two texts that differ in one token differ in most that follow, so answers are not "
                f"compared. Leave --compare out; golden prompts compare versions token by token, before they serve: "
                f"`tidegate model golden {model}`"
            )
        served = self._served(model)
        if served and split.standing not in served:
            other = next((one for one in served if one != split.candidate), "")
            way = (
                f"`tidegate model split {model} {split.candidate} --standing {other}`"
                if other
                else (
                    f"{split.candidate} gets every request without a split; to give {split.standing} to devices first: "
                    f"`tidegate model rollout {model} --version {split.standing} --key KEY`"
                )
            )
            raise InvalidSplit(
                f"no target serves {model} {split.standing}, so it cannot stand beside {split.candidate}; "
                f"{offered(model, served)}. Instead: {way}"
            )
        return split

    def _default_beside(self, model: str, candidate: str) -> str:
        default = self.defaults.default(model, clock.now())
        if candidate != default:
            return default
        served = self._served(model)
        other = next((one for one in served if one != default), "OTHER")
        raise InvalidSplit(
            f"{model} {default} is what requests get already that name no version, so there is nothing to split; "
            f"{offered(model, served)}. To send a part of them to another version: `tidegate model split {model} "
            f"{other} --share 5%`; to make that one the default, and {default} its candidate: `tidegate model "
            f"split {model} {default} --standing {other}`"
        )

    def _served(self, model: str) -> dict[str, VersionTargets]:
        """By version of the model, the highest first: the targets that serve it, where any does."""
        versions = tuple(one.version for one in reversed(self._catalog.manifests) if one.name == model)
        return {
            one: targets for one, targets in self.defaults.count(model, versions, clock.now()).items() if any(targets)
        }

    async def _store(self, splits: TrafficSplits) -> None:
        if splits is self.splits:
            return
        if self._file is not None:
            await asyncio.to_thread(_write, self._file, splits)
        self.defaults.splits = splits
        self.on_change()

    # between the processes of one gateway

    def follow(self, splits: TrafficSplits) -> None:
        """Use what another process of this gateway has set."""
        if splits == self.splits:
            return
        before, self.defaults.splits = self.splits, splits
        for model in self.watched.keys() - splits.split.keys():
            del self.watched[model]
        for model, split in splits.split.items():
            if model not in self.watched or split != before.split.get(model):
                self.watched[model] = TrialFigures(began_at_utc=clock.utc_s())

    def take_counts(self) -> list[TrialCounts]:
        """What was counted since it was last taken."""
        taken = [
            TrialCounts(model, version, figures.counted, watched.agreement.counted)
            for model, watched in self.watched.items()
            for version, figures in watched.figures.items()
        ]
        for watched in self.watched.values():
            watched.figures.clear()
            watched.agreement = Agreement()
        return taken

    def add_counts(self, counts: Sequence[TrialCounts]) -> None:
        """Count what another process has counted, of trials that go on."""
        added: set[str] = set()
        for one in counts:
            split, watched = self.splits.split.get(one.model), self.watched.get(one.model)
            if split is None or watched is None or one.version not in (split.standing, split.candidate):
                continue
            watched.of(one.version).add(one.figures)
            if one.model not in added:  # each version's counts come with those of both together
                watched.agreement.add(one.agreement)
                added.add(one.model)

    # for the layer `gateway/layers/versions.py`

    def demanded(self, call: Call) -> str:
        request = call.request
        wish = version_of(call.headers, request.parameters) if call.headers or request.parameters else ""
        return self.splits.demanded(request.model_name, wish) if wish else ""

    def tried(self, call: Call) -> str:
        model = call.request.model_name
        return self.splits.tried(model, tenant_of(call.tenant), self._draw()) if model in self.splits.split else ""

    def watches(self, call: Call) -> bool:
        return call.request.model_name in self.splits.split

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


def offered(model: str, served: Mapping[str, VersionTargets]) -> str:
    """Return which versions of the model targets serve, in words."""
    if not served:
        return f"no target serves any version of {model}"
    words = [f"{version} ({_by_whom(targets)})" for version, targets in served.items()]
    return f"targets serve {', '.join(words)}"


def _by_whom(targets: VersionTargets) -> str:
    edges = targets.edges + targets.soaking
    counted = [(edges, "edge"), (targets.pools, "pool")]
    return " and ".join(f"{count} {name}{'s' if count != 1 else ''}" for count, name in counted if count)


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
    except (OSError, msgspec.MsgspecError, RecursionError, UnicodeError, InvalidSplit) as error:
        raise ConfigError(f"{file} (key 'trials_file') cannot be used: {error}; move it away to begin anew") from error


def _write(file: Path, splits: TrafficSplits) -> None:
    encoded = msgspec.json.encode(splits)
    if len(encoded) > MAX_FILE_BYTES:
        raise InvalidSplit(f"all splits together take {len(encoded)} bytes: at most {MAX_FILE_BYTES} can be kept")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, encoded, mode=0o600)
