"""Repository control keeps what a target serves in step with requests to load and unload, or with a followed folder.

    none       what was there at the start is served, and nothing changes (there is no repository control)
    explicit   models are loaded and unloaded by name (`load`, `unload`)
    poll       the repository is looked at every `poll_s`: what is new there or has changed is loaded, what is gone is
               unloaded; `load` and `unload` are refused, since the folder would undo them

The names are Triton's. How a model comes and goes is its process's business (`ModelLoader`); here is what all share:

* One change at a time. Loading takes a device's time and memory, and two at once would each see room for one.
* A change goes on where its caller leaves: half a load is no state that a server should stay in.
* A load that fails changes nothing: what served before serves on, and the index has the reason.
* What is as it is wanted is no failure: a model that is not served may be unloaded, and is tried no more then.
* The version of a model that is served is chosen by `served_version.py`. One whose manifest cannot be read is passed
  over, and in the index; one that has nothing for this target is passed over, and in the log. But what serves is not
  replaced by a lower one because its own manifest was damaged since.
* What is the same as what is served (manifest, sizes and times of its files) is not loaded again.
* At the start all that the repository has is loaded, as if it had just come there (`begin`): a model that is wrong is
  not served then either, and a process of which none is right does not start. A loader may serve a lower version then,
  of a model whose highest has wrong files; that one is told of by `failed_before`, and comes as any new one does.
* A followed folder that cannot be read at all is no empty one: a share that is not mounted takes no model away. A model
  that cannot be read or loaded is tried again when its files have changed.

Source: Triton Inference Server, "Model Management" and the model repository extension.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Protocol, Self

import structlog

from tidegate import clock
from tidegate.models.manifest import Manifest, Where
from tidegate.models.repository import Damaged, ReadManifests, RepositoryError
from tidegate.oip.repository.model_control import ModelStatus, Statuses
from tidegate.outcome import InternalError, InvalidRequest, ModelNotFound, NotSupported, ServeError
from tidegate.runtime.owned_task import cancel_and_wait
from tidegate.runtime.process import StartError
from tidegate.serving.served_version import versions_for

FIRST_AGAIN_S: Final = 60.0  # until a load that failed, and not by its files, is tried again; twice as long each time
LATEST_AGAIN_S: Final = 900.0
ControlMode = Literal["none", "explicit", "poll"]

_POLLED: Final = (
    "models are not loaded and unloaded by request here: key 'model_control' is poll, and the folder decides"
)
_UNLOADED: Final = "unloaded"
log = structlog.get_logger("model control")


class FoundModel(NamedTuple):
    """One version in the repository: its manifest, and the size and time of each of its artefacts' files."""

    manifest: Manifest
    files: tuple[tuple[str, int, int], ...]


class ModelLoader(Protocol):
    """What a target does to serve a model, and to serve it no longer.

    Attributes:
        where: the place whose variants it serves; None: it takes any model.
    """

    where: Where | None

    def served(self) -> Mapping[str, Manifest]:
        """The models that are served, by name."""
        ...

    async def load(self, name: str) -> Manifest:
        """Serve the highest version of a model, instead of another one; at the start it may be a lower one where that
        one's files are wrong. Returns what serves. Raises what `ModelControl.load` says, or StartError and
        RepositoryError."""
        ...

    async def restore(self, name: str) -> bool:
        """Serve again a model that was unloaded and is not in the repository; False if it is none."""
        ...

    async def unload(self, name: str) -> None:
        """Answer what was accepted of a model, and serve it no longer."""
        ...


class _FailedLoad(NamedTuple):
    found: FoundModel
    again_at: float
    wait_s: float  # since the time before


class RepositoryControl:
    """A `ModelControl`, at work inside `async with`.

    Args:
        wanted: whether a model of this name may be served, where only some of the repository are.
        poll_s: from one look at the folder to the next, with `poll`.
    """

    def __init__(
        self,
        server_name: str,
        root: Path,
        loader: ModelLoader,
        *,
        mode: ControlMode,
        wanted: Callable[[str], bool] = lambda _name: True,
        poll_s: float = 15.0,
    ) -> None:
        self._server_name = server_name
        self._root = root
        self._manifests = ReadManifests(root)
        self._loader = loader
        self._mode = mode
        self._wanted = wanted
        self._poll_s = poll_s
        self._turn = asyncio.Lock()
        self._changes: set[asyncio.Task[None]] = set()
        self._polling: asyncio.Task[None] | None = None
        self._loaded: dict[str, FoundModel] = {}  # what was found when it was loaded
        self._tried: dict[str, _FailedLoad] = {}  # what could not be loaded when nobody asked for it
        self._trying: asyncio.Task[None] | None = None
        self._under_way: dict[str, ModelStatus] = {}
        self._failed: dict[str, str] = {}
        self._damaged: Damaged = {}  # of models that can be served in other versions
        self._unfit: Damaged = {}  # of models that are served in lower versions: they have nothing for this target
        self._failed_before: Mapping[str, str] = {}

    def failed_before(self, reasons: Mapping[str, str]) -> None:
        """Models that its process could not load before this began, and why: tried again as those of `begin` are."""
        self._failed_before = reasons

    @property
    def failed(self) -> Mapping[str, str]:
        """Why each model is not served that could not be loaded the last time."""
        served = self._loader.served()
        return {name: reason for name, reason in self._failed.items() if name not in served}

    async def __aenter__(self) -> Self:
        found = await asyncio.to_thread(self._look)
        served = self._loader.served()
        self._loaded = {name: found[name] for name in served if name in found and found[name].manifest == served[name]}
        for name, reason in self._failed_before.items():
            self._failed.setdefault(name, reason)
            if name in found and self._mode != "poll":
                self._tried[name] = _FailedLoad(found[name], clock.now() + FIRST_AGAIN_S, FIRST_AGAIN_S)
        if self._mode == "poll":
            self._polling = asyncio.create_task(self._follow(), name="followed model repository")
        elif self._tried:
            self._trying = asyncio.create_task(self._try_again(), name="models that could not be loaded at the start")
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_and_wait(*(one for one in (self._polling, self._trying) if one is not None), *self._changes)

    async def begin(self) -> None:
        """Load all that the repository has, before the first request: what is wrong with one keeps no other away.

        What its files are not the reason of (a device whose memory another process still holds) is tried again later.

        Raises:
            RepositoryError: the folder cannot be read.
            StartError: it has models, and none of them could be loaded.
        """
        await self.poll()
        for name, reason in self._failed.items():
            log.error("a model is not served", model=name, reason=reason)
        if self._failed and not self._loader.served():
            reasons = "".join(f"\n{name}: {reason}" for name, reason in sorted(self._failed.items()))
            raise StartError(f"no model of {self._root} could be loaded:{reasons}")

    async def load(self, name: str) -> None:
        self._check_mode()
        await self._change(name, self._load(name))

    async def unload(self, name: str) -> None:
        self._check_mode()
        await self._change(name, self._unload_or_leave_out(name))

    async def statuses(self) -> Statuses:
        """Of the models in the repository that this target could serve and does not, and of those that change now."""
        found = await asyncio.to_thread(self._look)
        served = self._loader.served()
        manifests = {name: one.manifest for name, one in found.items()} | dict(served)
        missing = {(name, ""): reason for name, reason in self._failed.items() if name not in manifests} | {
            (name, version): reason
            for (name, version), reason in sorted(self._damaged.items())
            if name not in served or served[name].version != version
        }
        missing |= self._not_in_its_highest(found, served)
        return {
            (name, one.version): self._under_way.get(name) or self._absent(name)
            for name, one in sorted(manifests.items())
            if name not in served or name in self._under_way
        } | {of: ModelStatus("UNAVAILABLE", reason) for of, reason in missing.items()}

    def _not_in_its_highest(
        self, found: Mapping[str, FoundModel], served: Mapping[str, Manifest]
    ) -> dict[tuple[str, str], str]:
        """Versions that could not be loaded of models that a lower one serves, and why."""
        if self._loader.where is None:  # what serves in any number of versions at once
            return {}
        highest = {name: found[name].manifest.version for name in self._failed if name in found and name in served}
        return {
            (name, version): self._failed[name] for name, version in highest.items() if served[name].version != version
        }

    async def _change(self, name: str, work: Any) -> None:
        task = asyncio.create_task(work, name=f"model control of {name}")
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        task.add_done_callback(_seen)
        await asyncio.shield(task)

    async def _load(self, name: str) -> None:
        async with self._turn:
            found = (await asyncio.to_thread(self._look)).get(name)
            if found is None and await self._loader.restore(name):
                return
            if found is None:
                raise ModelNotFound(self._nothing_to_load(name))
            if self._loaded.get(name) == found and name in self._loader.served():
                return
            if why := self._why_kept(name):
                raise InvalidRequest(f"model {name!r} could not be loaded, and what serves is kept: {why}")
            await self._bring(name, found)

    async def _bring(self, name: str, found: FoundModel) -> None:
        """Raises ServeError."""
        self._under_way[name] = ModelStatus("LOADING")
        began_at = clock.now()
        try:
            serves = await self._loader.load(name)
        except (StartError, RepositoryError, ServeError) as error:
            words = error.message if isinstance(error, ServeError) else str(error)
            self._failed[name] = words
            log.warning("a model could not be loaded", model=name, version=found.manifest.version, reason=words)
            if isinstance(error, ServeError):
                raise
            raise InvalidRequest(f"model {name!r} could not be loaded: {words}") from error
        except Exception as error:  # a defect at one model must not keep the others away
            self._failed[name] = words = f"{type(error).__name__}: {error}"
            log.exception("a model could not be loaded, by a defect", model=name, version=found.manifest.version)
            raise InternalError(f"model {name!r} could not be loaded: {words}") from error
        finally:
            self._under_way.pop(name, None)
        self._failed.pop(name, None)
        self._loaded[name] = found
        took_s = round(clock.now() - began_at, 3)
        log.info("model loaded", model=name, version=serves.version, took_s=took_s)

    async def _unload_or_leave_out(self, name: str) -> None:
        """Unload a model; one that is not served is tried no more. Raises ModelNotFound: it is none of this target."""
        async with self._turn:
            if name in self._loader.served():
                await self._leave(name)
                return
            if name not in await asyncio.to_thread(self._look) and name not in self._failed:
                raise ModelNotFound(f"there is no model {name!r} on {self._server_name} to unload")
            self._tried.pop(name, None)
            self._failed.pop(name, None)

    async def _unload(self, name: str) -> None:
        async with self._turn:
            await self._leave(name)

    async def _leave(self, name: str) -> None:
        """Called in its turn."""
        self._under_way[name] = ModelStatus("UNLOADING")
        try:
            await self._loader.unload(name)
        finally:
            self._under_way.pop(name, None)
        self._loaded.pop(name, None)
        self._failed.pop(name, None)  # of an attempt to replace it: what is wanted now is that it is absent
        log.info("model unloaded", model=name)

    async def _follow(self) -> None:
        while True:
            await clock.sleep(self._poll_s)
            try:
                await self.poll()
            except RepositoryError as error:
                log.warning("the model repository cannot be read: everything stays as it is", reason=str(error))
            except Exception:  # a defect here must not end the following
                log.exception("the model repository could not be followed")

    async def poll(self) -> None:
        """Look at the folder once, and bring what is served in step. Raises RepositoryError where it is unreadable."""
        found = await asyncio.to_thread(self._look)
        for name in set(self._loaded) - set(found):
            if name not in self._failed:  # a folder whose manifest is broken is no model that was taken away
                await self._unload(name)
        for name, one in found.items():
            tried = self._tried.get(name)
            is_tried = tried is not None and tried.found == one and clock.now() < tried.again_at
            if is_tried or self._loaded.get(name) == one or self._why_kept(name):
                continue
            await self._try(name, one)

    async def _try(self, name: str, found: FoundModel) -> None:
        """Bring a model in that nobody asked for. Where that fails it is logged, in the index, and tried again."""
        before = self._tried.pop(name, None)
        try:
            async with self._turn:
                await self._bring(name, found)
        except ServeError as error:
            if isinstance(error.__cause__, RepositoryError):
                again_at, wait_s = inf, FIRST_AGAIN_S  # once its files are others
            else:
                wait_s = FIRST_AGAIN_S if before is None else min(2.0 * before.wait_s, LATEST_AGAIN_S)
                again_at = clock.now() + wait_s
            self._tried[name] = _FailedLoad(found, again_at, wait_s)

    async def _try_again(self) -> None:
        """Without `poll`: what could not be loaded at the start, until it is loaded or its files are the reason."""
        while due := {name: one for name, one in self._tried.items() if one.again_at < inf}:
            await clock.sleep(max(0.0, min(one.again_at for one in due.values()) - clock.now()))
            try:
                found = await asyncio.to_thread(self._look)
                for name, one in due.items():
                    if clock.now() < one.again_at or self._tried.get(name) is not one:
                        continue
                    if name in found and name not in self._loader.served():
                        await self._try(name, found[name])
                    else:  # somebody has loaded it, or taken it away
                        del self._tried[name]
            except Exception:  # a defect, or a folder that cannot be read just now
                log.exception("models that could not be loaded at the start could not be tried again")
                await clock.sleep(FIRST_AGAIN_S)

    def _look(self) -> dict[str, FoundModel]:
        """The highest version that this target could serve of each model. Blocks. Raises RepositoryError."""
        versions, problems = self._manifests.look()
        found, unfit = dict[str, FoundModel](), dict[tuple[str, str], str]()
        for name, ones in versions.items():
            fitting, higher = versions_for(self._loader.where, ones)
            if fitting and self._wanted(name):
                found[name] = _found(self._root, fitting[0])
                unfit |= {(name, version): why for version, why in higher.items()}
        damaged = {of: why for of, why in self._manifests.damaged.items() if of[0] in found}
        for (name, version), why in _news(damaged, self._damaged):
            log.error("a version cannot be read, and others stand in", model=name, version=version, reason=why)
        for (name, version), why in _news(unfit, self._unfit):
            log.warning("a version is passed over, and a lower one serves", model=name, version=version, reason=why)
        self._damaged, self._unfit = damaged, unfit
        for name in set(problems) - set(found):
            if self._wanted(name):
                self._failed[name] = problems[name]
        for name in [name for name in self._failed if name not in versions and name not in problems]:
            del self._failed[name]
        return found

    def _why_kept(self, name: str) -> str:
        """Why the version that serves is not to be replaced by what can be read; "" where it may be."""
        served = self._loader.served().get(name)
        return "" if served is None else self._damaged.get((name, served.version), "")

    def _absent(self, name: str) -> ModelStatus:
        return ModelStatus("UNAVAILABLE", self._failed.get(name, _UNLOADED))

    def _check_mode(self) -> None:
        if self._mode == "poll":
            raise NotSupported(_POLLED)

    def _nothing_to_load(self, name: str) -> str:
        because = f": {self._failed[name]}" if name in self._failed else ""
        return f"the repository of {self._server_name} has no model {name!r} that it could serve{because}"

    def __repr__(self) -> str:
        return f"<RepositoryControl {self._mode} of {self._server_name}, {len(self._loaded)} loaded>"


def _news(reasons: Damaged, known: Damaged) -> list[tuple[tuple[str, str], str]]:
    return [(of, why) for of, why in reasons.items() if known.get(of) != why]


def _found(root: Path, manifest: Manifest) -> FoundModel:
    folder = root / manifest.name / manifest.version
    names = sorted(
        {one.artefact for one in manifest.variants}
        | {f.name for one in manifest.variants for f in one.files}
        | {f.name for f in manifest.step_files}
    )
    files = []
    for name in names:
        try:
            about = (folder / name).stat()
            files.append((name, about.st_size, about.st_mtime_ns))
        except OSError:
            files.append((name, -1, 0))
    return FoundModel(manifest, tuple(files))


def _seen(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()  # its caller may have left
