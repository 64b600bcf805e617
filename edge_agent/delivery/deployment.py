"""The deployment combines the static repository's models with the deployed ones, and starts and changes them.

    read()     per model: the generation to serve first, and those to fall back to         (boot.py)
    start()    one model after another is loaded                                           (runner_set.py)
    inside     documents come in and are rolled out, where `rollout` is configured         (deployer.py)

Without `rollout` this is the static repository alone, and a model that cannot be served is a reason not to start. With
it the agent starts whatever the state of its disk and network: a deployed model falls back to the generation before it,
then to the static one, then to none, and the rollout report says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
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
from edge_agent.serving.catalogue import CatalogueEntry, read_catalogue
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
        config = self._config
        entries = self._read_statics()
        for entry in entries:
            config.steps.check(entry.manifest)
        self._statics = {entry.manifest.name: entry for entry in entries}
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
            found = list(self._candidates(model))
            if (runner := self._first(model, found)) is not None:
                self._chosen[model] = _BootChoice(runner, found)

    def _read_statics(self) -> Sequence[CatalogueEntry]:
        config = self._config
        repository = Repository(config.model_repository)
        try:
            return read_catalogue(repository, config.models, config.allowed_engines, or_none=self._may_come)
        except (StartError, RepositoryError) as error:
            # A model that the configuration names, and that is not there, is for its author to mend.
            if config.models is not None or self._store is None or not self._store.committed().models:
                raise
            log.error("no static model is served, only deployed ones", reason=str(error))
            return ()

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
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def start(self, on_progress: Callable[[str], None]) -> None:
        """Load every model, one after another. Raises StartError for one that is not deployed and does not load."""
        serving = self.serving
        for number, (model, chosen) in enumerate(self._chosen.items(), start=1):
            on_progress(f"warming up {chosen.runner.name} ({number} of {len(self._chosen)})")
            runner: Runner | None = chosen.runner
            while runner is not None:
                try:
                    await serving.enter(runner)
                    break
                except StartError as error:
                    if self._store is None or (not chosen.instead and not runner.generation):
                        raise
                    log.error("a deployed model does not load", model=runner.name, reason=str(error))
                runner = await asyncio.to_thread(self._first, model, chosen.instead)
                if runner is None:
                    serving.unroute(model)
                else:
                    serving.route(runner)

    async def begin(self) -> None:
        """Resume rollouts, and take documents in."""
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
        models = [runner.manifest.name for runner in self.serving.runners]
        if self._deployer is None:
            await self.serving.renew(dict.fromkeys(models))
            return True
        async with self._deployer.at_rest() as rests:
            if rests:
                await self.serving.renew(dict.fromkeys(models))
            return rests

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
            static = self._statics[model]
            return [BootCandidate(0, lambda: static)]
        return boot_candidates(model, self._store, self._statics, self._config.allowed_engines)

    def _first(self, model: str, found: list[BootCandidate]) -> Runner | None:
        """A runner of the first candidate that can be read; it and those before it are taken off the list."""
        while found:
            candidate = found.pop(0)
            try:
                return self._make(candidate.read(), candidate.generation)
            except (RepositoryError, StartError) as error:
                log.error("a deployed model cannot be read", model=model, reason=str(error))
        return None

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
