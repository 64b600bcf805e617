"""The deployment combines the static repository's models with the deployed ones, and starts and changes them.

    read()     per model: the generation to serve first, and those to fall back to         (boot.py)
    start()    one model after another is loaded                                           (runner_set.py)
    inside     documents come in and are rolled out, where `rollout` is configured         (deployer.py)
               models that could not be served are tried again        (tidegate/serving/absent_models.py)

Without `rollout` this is the static repository alone. A model that cannot be served keeps no other away; only where
none can be served is that a reason not to start. With `rollout` the agent starts whatever the state of its disk and
network: a deployed model falls back to the generation before it, then to the static one, then to none, and the rollout
report says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from ssl import SSLContext
from typing import Protocol, Self

import structlog

from edge_agent.config import EdgeConfig, RolloutConfig
from edge_agent.core.reporting import RolloutReport
from edge_agent.delivery import preconditions
from edge_agent.delivery.boot import BootCandidate, boot_candidates
from edge_agent.delivery.deployer import Deployer
from edge_agent.delivery.documents import TrustedDocuments
from edge_agent.delivery.journal import DeploymentJournal
from edge_agent.delivery.model_store import ModelStore
from edge_agent.delivery.steps import RolloutSteps
from edge_agent.fleet.epoch import SANE_UTC_S
from edge_agent.serving.catalogue import CatalogueEntry, EdgeCatalogue, read_catalogue, read_entry
from edge_agent.serving.host import EdgeHost
from edge_agent.serving.runner import Runner
from edge_agent.serving.runner_set import MakeRunner, RunnerSet
from tidegate import clock
from tidegate.config import ConfigError
from tidegate.fleet.conditions import DeviceConditions
from tidegate.fleet.messages import GatewayState
from tidegate.models.manifest import Manifest
from tidegate.models.repository import Repository, RepositoryError
from tidegate.rollout.desired import DesiredConfiguration
from tidegate.runtime.process import StartError
from tidegate.security.attestation.keys import read_allowed
from tidegate.serving.absent_models import AbsentModels
from tidegate.storage.disk_failure import is_disk_failure

log = structlog.get_logger(__name__)


class DocumentListener(Protocol):
    """Is told of documents, for what they say beside models."""

    def heard(self, documents: TrustedDocuments) -> None:
        """Documents were read or came in."""
        ...

    def why_not(self, configuration: DesiredConfiguration) -> str:
        """Why the device cannot have this configuration; "" where it can."""
        ...


@dataclass(slots=True)
class _BootChoice:
    """The runner to start first for a model, and the candidates to fall back to."""

    runner: Runner
    instead: list[BootCandidate]


class Deployment:
    """Owns every runner inside `async with`. `read`, then make the host, then enter, `start`, and `begin`.

    Args:
        make: makes a runner of an entry and the number of its generation.
        conditions: the device's conditions now.
        gateways: the last state of each gateway, for the time where this device has no clock.
        linked: whether the fleet can be reached.
        draw: chance, uniform in [0, 1).
        tls: for servers of artefacts with https.
        documents: told of the documents of this device, and judges what they desire of its configuration.
        on_routed: another runner answers for a model. on_change: there is something new to report.
    """

    def __init__(
        self,
        config: EdgeConfig,
        make: MakeRunner,
        *,
        conditions: Callable[[], DeviceConditions],
        gateways: Callable[[], Mapping[str, GatewayState]],
        linked: Callable[[], bool],
        draw: Callable[[], float],
        tls: Callable[[], SSLContext] | None,
        on_routed: Callable[[], None],
        on_change: Callable[[], None],
        documents: DocumentListener | None = None,
    ) -> None:
        self._documents = documents
        self._config = config
        self._make = make
        self._conditions = conditions
        self._gateways = gateways
        self._linked = linked
        self._draw = draw
        self._tls = tls
        self._on_routed = on_routed
        self._on_change = on_change
        self._stack = AsyncExitStack()
        self._store = ModelStore(config.state_dir / "rollout") if config.rollout else None
        self._statics: dict[str, CatalogueEntry] = {}
        self._chosen: dict[str, _BootChoice] = {}
        self._serving: RunnerSet | None = None
        self._works: RolloutSteps | None = None
        self._deployer: Deployer | None = None
        self._turn = asyncio.Lock()  # one change of what is served at a time, beside the deployer's
        self._wanted: dict[str, str] = {}  # by name, as the configuration names the models of the static repository
        self._absent = AbsentModels(
            config.model_repository,
            bring=self._bring,
            is_served=lambda model: self._serving is not None and self._serving.routed(model) is not None,
            on_change=on_change,
        )

    @property
    def absent(self) -> Mapping[str, str]:
        """Why each model is not served that is to be."""
        return self._absent.reasons

    @property
    def runners(self) -> tuple[Runner, ...]:
        """The runners that are started first."""
        return tuple(chosen.runner for chosen in self._chosen.values())

    @property
    def rollouts(self) -> RolloutReport | None:
        """The report of rollouts; None where models are not rolled out to this device."""
        return self._deployer.rollouts if self._deployer is not None else None

    def read(self) -> None:
        """Choose what to serve first. Blocks on the disk. Raises StartError, RepositoryError."""
        found = self._read_statics()
        self._statics = {entry.manifest.name: entry for entry in found.entries}
        for model, version, why in found.unfit:
            log.warning("a version is passed over, and a lower one serves", model=model, version=version, reason=why)
        problems = dict(found.problems)
        named = {one.partition(":")[0]: one for one in self._config.models or ()}
        self._wanted = {name: named.get(name, name) for name in (*self._statics, *problems)}
        deployed: Sequence[str] = ()
        if self._store is not None:
            try:
                self._store.prepare()
            except OSError as error:
                if not is_disk_failure(error):
                    raise StartError(f"cannot write {self._store.root} (key 'state_dir'): {error.strerror}") from error
                # What was deployed before can be read, and the static models need no disk: the deployer tries again.
                log.warning("the store of models takes nothing", path=str(self._store.root), reason=error.strerror)
            deployed = tuple(self._store.committed().models)
        for model in dict.fromkeys((*self._statics, *deployed)):
            candidates = list(self._candidates(model))
            runner, why_not = self._first(model, candidates)
            if runner is not None:
                self._chosen[model] = _BootChoice(runner, candidates)
            else:
                problems.setdefault(model, why_not)
        self._check_some(problems, served=self._chosen)
        lower = {model: entry.instead for model, entry in self._statics.items() if entry.instead}
        for model, why_not in sorted({**lower, **problems}.items()):
            self._absent.note(model, why_not, stood_in=model in self._chosen)

    def _check_some(self, problems: Mapping[str, str], *, served: Collection[str]) -> None:
        """Raise StartError where nothing can be served of what is to be, and nothing of it is fetched again."""
        if problems and not served and not (self._store is not None and self._store.committed().models):
            raise EdgeCatalogue(problems=problems).no_model(self._config.model_repository)

    def _read_statics(self) -> EdgeCatalogue:
        config = self._config
        repository = Repository(config.model_repository)
        try:
            return read_catalogue(repository, config.models, config.allowed_engines, or_none=self._may_come)
        except (StartError, RepositoryError) as error:
            # A model that the configuration names, and that is not there, is for its author to mend.
            if config.models is not None or self._store is None or not self._store.committed().models:
                raise
            log.error("no static model is served, only deployed ones", reason=str(error))
            return EdgeCatalogue()

    @property
    def _may_come(self) -> bool:
        """Whether models may come later, so that there need be none at first."""
        return self._config.rollout is not None or self._config.model_control != "none"

    @property
    def disk_trouble(self) -> str:
        """Why rollouts cannot be written to the disk; "" while they can."""
        return self._deployer.disk_trouble if self._deployer is not None else ""

    async def enter(self, host: EdgeHost) -> Self:
        """The runners live until this object's `async with` ends."""
        self._serving = await self._stack.enter_async_context(RunnerSet(host, self._make, on_routed=self._on_routed))
        self._stack.push_async_callback(self._absent.aclose)
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def start(self, on_progress: Callable[[str], None]) -> None:
        """Load every model, one after another. Raises StartError where none loads."""
        serving, problems = self.serving, dict[str, str]()
        for number, (model, chosen) in enumerate(self._chosen.items(), start=1):
            on_progress(f"warming up {chosen.runner.name} ({number} of {len(self._chosen)})")
            if why_not := await self._serve_first(model, chosen.runner, chosen.instead):
                serving.unroute(model)
                problems[model] = why_not
        self._check_some(problems, served=problems.keys() ^ self._chosen.keys())
        for model, why_not in problems.items():
            await asyncio.to_thread(self._absent.note, model, why_not)

    async def _serve_first(self, model: str, runner: Runner | None, instead: list[BootCandidate]) -> str:
        """Serve the first of these that loads; why none does, "" where one does."""
        why_not = ""
        while runner is not None:
            try:
                self.serving.route(await self.serving.enter(runner))
            except StartError as error:
                why_not = str(error)
                log.error("a model does not load", model=runner.name, reason=why_not)
            else:
                return ""
            runner, unread = await asyncio.to_thread(self._first, model, instead)
            why_not = unread or why_not
        return why_not

    async def begin(self) -> None:
        """Resume rollouts, take documents in, and try absent models again."""
        await self._begin_rollouts()
        if self._config.model_control == "none":  # else it is its `RepositoryControl` that does
            self._absent.begin()

    async def _begin_rollouts(self) -> None:
        config, store, serving = self._config.rollout, self._store, self.serving
        if config is None or store is None:
            return
        scopes = (f"device/{self._config.name}", *(f"group/{group}" for group in config.groups))
        self._works = RolloutSteps(
            store,
            serving,
            statics=self._statics,
            servers=config.servers,
            allowed_engines=self._config.allowed_engines,
            device=self._device,
            linked=self._linked,
            draw=self._draw,
            on_change=self._progress,
            tls=self._tls,
            recheck_s=config.recheck_s,
        )
        self._deployer = Deployer(
            store,
            DeploymentJournal(store.root / "journal.json"),
            TrustedDocuments(
                store.root,
                scopes=scopes,
                pinned=_pinned(config),
                why_not=self._documents.why_not if self._documents is not None else lambda _: "",
            ),
            self._works,
            routed=serving.routed,
            on_change=self._on_change,
            on_documents=self._documents.heard if self._documents is not None else lambda _: None,
        )
        await self._stack.enter_async_context(self._deployer)

    @property
    def busy(self) -> str:
        """Which rollout is under way; "" for none."""
        return self._deployer.busy if self._deployer is not None else ""

    async def renew(self) -> bool:
        """Give each model another worker, as workers are started now; False: a rollout is under way, and none has.

        Raises:
            StartError: as `RunnerSet.renew`.
        """
        async with self._at_rest() as rests:
            if rests:
                await self.serving.renew(dict.fromkeys(runner.manifest.name for runner in self.serving.runners))
            return rests

    @asynccontextmanager
    async def _at_rest(self) -> AsyncIterator[bool]:
        """Keep others from changing what is served; whether no rollout is doing so."""
        async with self._turn:
            if self._deployer is None:
                yield True
                return
            async with self._deployer.at_rest() as rests:
                yield rests

    async def _bring(self, model: str) -> bool:
        """Serve an absent model; False while a rollout is under way. Raises as `AbsentModels` says."""
        async with self._at_rest() as rests:
            if not rests:
                return False
            if self.serving.routed(model) is not None:
                return True
            unread = await asyncio.to_thread(self._read_static, model)
            candidates = list(await asyncio.to_thread(self._candidates, model))
            runner, why_not = await asyncio.to_thread(self._first, model, candidates)
            why_not = await self._serve_first(model, runner, candidates) or why_not
            if runner is None or why_not:
                raise StartError(unread or why_not or "no file of it is here")
            return True

    def _read_static(self, model: str) -> str:
        """Read a model of the static repository anew; why that is not possible, "" where it is, or it has none."""
        config = self._config
        if (wanted := self._wanted.get(model)) is None:
            return ""
        try:
            self._statics[model] = read_entry(config.model_repository, wanted, config.allowed_engines)
        except (StartError, RepositoryError) as error:
            self._statics.pop(model, None)
            return str(error)
        return ""

    def folder(self, manifest: Manifest) -> Path:
        """The folder with the files of a served model, static or deployed."""
        runner = self._serving.routed(manifest.name) if self._serving else self._chosen[manifest.name].runner
        return runner.folder if runner is not None else self._config.model_repository / manifest.name / manifest.version

    async def failed(self) -> None:
        """Wait for a defect that ends the supervision of a model, and raise it."""
        await self.serving.failed()

    def take(self, scope: str, message: bytes) -> None:
        """Take in a document for a scope of this device."""
        if self._deployer is not None:
            self._deployer.take(scope, message)

    def answered(self, runner: Runner, compute_s: float | None) -> None:
        """Record a runner's request: its compute time, or None if it failed by its own fault."""
        if self._works is not None:
            self._works.answered(runner, compute_s)

    @property
    def serving(self) -> RunnerSet:
        assert self._serving is not None, "enter it first"
        return self._serving

    def _candidates(self, model: str) -> Sequence[BootCandidate]:
        if self._store is None:
            static = self._statics.get(model)
            return [] if static is None else [BootCandidate(0, lambda: static)]
        return boot_candidates(model, self._store, self._statics, self._config.allowed_engines)

    def _first(self, model: str, found: list[BootCandidate]) -> tuple[Runner | None, str]:
        """A runner of the first candidate that can be read; it and those before it are taken off the list.

        Where there is none, the last reason.
        """
        why_not = ""
        while found:
            candidate = found.pop(0)
            try:
                return self._make(candidate.read(), candidate.generation), ""
            except (RepositoryError, StartError, OSError) as error:
                why_not = str(error)
                log.error("a generation of a model cannot be read", model=model, reason=why_not)
        return None, why_not

    def _progress(self) -> None:
        if self._deployer is not None:
            self._deployer.changed()

    def _device(self) -> preconditions.DeviceResources:
        assert self._store is not None
        return preconditions.DeviceResources(
            self._conditions(), self._utc_s(), self._store.free_bytes(), preconditions.free_memory_bytes()
        )

    def _utc_s(self) -> float | None:
        """The time by this device's clock where that can be right, else by the gateways' last states."""
        own = clock.utc_s()
        if SANE_UTC_S[0] <= own <= SANE_UTC_S[1]:
            return own
        told = max((state.utc_ms for state in self._gateways().values()), default=0)
        return told / 1000.0 if told > 0 else None

    def __repr__(self) -> str:
        return f"<Deployment {self._serving!r} {self._deployer!r}>"


def _pinned(config: RolloutConfig) -> dict[str, bytes]:
    keys: dict[str, bytes] = {}
    for path in config.keys:
        try:
            keys |= read_allowed(path, what="keys that sign rollouts")
        except ConfigError as error:
            raise StartError(f"key 'rollout.keys': {error}") from error
    return keys
