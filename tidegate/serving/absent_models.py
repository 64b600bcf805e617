"""The absent models of a device or a pool are wanted here and cannot be served: each has a reason, and is tried again.

A model whose file was cut, whose digest is wrong or whose worker does not start must not take the others with it, so
the process starts without it. Its requests are refused, and its operators hear the reason: of a device in its state
(`DeviceConditions.absent`), of a pool in the index of models. It is brought in once that is possible: at once when its
files have changed (somebody has copied it again), else after waits that double, since memory that another program holds
or a medium that is read only at times heals by itself.

The files are looked at by their names, sizes and times, which costs nothing. A try reads all of them.

How it can be wrong: a model that another master serves meanwhile (a rollout) is left alone, and tried again once that
one serves it no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from tidegate import clock
from tidegate.models.repository import RepositoryError
from tidegate.runtime.owned_task import OwnedTask
from tidegate.runtime.process import StartError

LOOK_S: Final = 5.0  # between two looks at the files of absent models
FIRST_AGAIN_S: Final = 30.0  # until a model is tried again whose files are the same; twice as long each time
LATEST_AGAIN_S: Final = 900.0
log = structlog.get_logger(__name__)

Files = frozenset[tuple[str, int, int, int]]  # of each: its path, size, time and inode


@dataclass(slots=True)
class _Absence:
    reason: str
    files: Files
    again_at: float
    wait_s: float


class AbsentModels:
    """Mutable: why each model is absent. Tries them again between `begin` and `aclose`.

    Args:
        root: of the repository, with a folder for each model.
        bring: serves a model; False: not now, for a reason that is not the model's. Raises StartError, RepositoryError
            or OSError.
        is_served: whether a model is served by now.
        on_change: called when a model has come.
    """

    def __init__(
        self,
        root: Path,
        *,
        bring: Callable[[str], Awaitable[bool]],
        is_served: Callable[[str], bool],
        on_change: Callable[[], None],
    ) -> None:
        self._root = root
        self._bring = bring
        self._is_served = is_served
        self._on_change = on_change
        self._absent: dict[str, _Absence] = {}
        self._some = asyncio.Event()  # are absent
        self._task = OwnedTask(self._run, name="absent models", crash_means="absent models are tried no more")

    def note(self, model: str, reason: str, *, stood_in: bool = False) -> None:
        """A model cannot be served. Looks at the disk, shortly.

        Args:
            stood_in: whether another generation of it, one that was rolled out, is served.
        """
        self._note(model, reason, self._files(model), stood_in=stood_in)

    def _note(self, model: str, reason: str, files: Files, *, stood_in: bool = False) -> None:
        """Args: files: as they were before they were read, so that what has changed since is not taken as tried."""
        before = self._absent.get(model)
        is_again = before is not None and before.files == files
        wait_s = min(2.0 * before.wait_s, LATEST_AGAIN_S) if before is not None and is_again else FIRST_AGAIN_S
        self._absent[model] = _Absence(reason, files, clock.now() + wait_s, wait_s)
        self._some.set()
        words = "another generation of a model stands in for it" if stood_in else "a model is not served"
        log.error(words, model=model, reason=reason, again_in_s=wait_s)

    @property
    def reasons(self) -> Mapping[str, str]:
        """Why each model is not served that is wanted and is not served."""
        return {model: one.reason for model, one in list(self._absent.items()) if not self._is_served(model)}

    def begin(self) -> None:
        """Try them again from now on, those too that are noted later."""
        self._task.start()

    async def aclose(self) -> None:
        await self._task.aclose()

    async def _run(self) -> None:
        while True:
            await self._some.wait()
            await clock.sleep(LOOK_S)
            for model, absence in list(self._absent.items()):
                if self._is_served(model):
                    continue
                files = await asyncio.to_thread(self._files, model)
                if clock.now() >= absence.again_at or files != absence.files:
                    await self._try(model, files)

    async def _try(self, model: str, files: Files) -> None:
        try:
            if not await self._bring(model):
                return
        except (StartError, RepositoryError, OSError) as error:
            self._note(model, str(error), files)
            return
        except Exception as error:  # a defect at one model must not keep the others away
            log.exception("an absent model has a defect", model=model)
            self._note(model, f"{type(error).__name__}: {error}", files)
            return
        self._absent.pop(model, None)
        if not self._absent:
            self._some.clear()
        log.info("a model that was absent is served", model=model)
        self._on_change()

    def _files(self, model: str) -> Files:
        found = set()
        try:
            for path in (self._root / model).rglob("*"):
                about = path.stat()
                found.add((str(path), about.st_size, about.st_mtime_ns, about.st_ino))
        except OSError:  # it is being changed: what it is then differs from this
            found.add(("", -1, 0, 0))
        return frozenset(found)

    def __repr__(self) -> str:
        return f"<AbsentModels {', '.join(self.reasons) or 'none'}>"
