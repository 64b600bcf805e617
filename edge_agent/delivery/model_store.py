"""The model store keeps each file once by its digest, and one link that names the committed generation.

    models/sha256/DIGEST                 whole and verified; these files never change
    partial/DIGEST                       under download (`partial_file.py`)
    versions/CONTENT/MODEL/VERSION/…     hard links into models/, in the layout of a model repository
    generations/N.json                   one generation: a version per model
    current → generations/N.json         the committed generation

A generation holds all deployed models, so `current` is one pointer for all of them, and swapping it is one rename. A
file is synced before it gets its name under `models/`, and a folder of links before it gets its own; so whatever has a
name is whole. Files that no kept generation and no rollout refers to are collected.

Whole it stays only as long as the medium keeps it. A name says nothing about that, so files that a rollout finds here
are read back before it relies on them, those of a committed content where it does not verify; `discard_damaged` removes
the damaged ones, and they are fetched again. A committed content with damaged files counts as not held until it is
committed again.

Where the committed generation itself is damaged (a bad block), the newest before it that can be read counts in its
place: it was committed once, and what it lacks the documents request again. The damaged one may have named models that
nothing else names, so nothing is collected until newer ones have superseded it as they would have if it were whole.

Everything blocks on the disk and raises OSError.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

import msgspec
import structlog
from msgspec.structs import replace

from tidegate.models.digest import sha256_of
from tidegate.models.repository import RepositoryError
from tidegate.models.trusted_digests import FILE_NAME, TrustedDigests
from tidegate.rollout.plan import Artefact, ModelPlan
from tidegate.storage.atomic_file import link_atomically, move_durably, sync_folder, write_atomically
from tidegate.storage.disk_failure import is_disk_failure

SPARE_BYTES: Final = 4 * 1024 * 1024  # stays free for the journal, the epoch and other programs
log = structlog.get_logger(__name__)


class Deployed(msgspec.Struct, frozen=True):
    """One model of a generation."""

    version: str
    content: str
    files: tuple[str, ...]  # digests
    keep: int = 2


class Generation(msgspec.Struct, frozen=True):
    """The models deployed on this device at one time; number 0 is none."""

    number: int = 0
    models: dict[str, Deployed] = {}
    v: Literal[1] = 1

    def with_model(self, model: str, plan: ModelPlan, number: int) -> Generation:
        deployed = Deployed(plan.version, plan.content, tuple(file.sha256 for file in plan.files), plan.keep)
        return replace(self, number=number, models={**self.models, model: deployed})

    def without(self, model: str, number: int) -> Generation:
        return replace(self, number=number, models={name: one for name, one in self.models.items() if name != model})


class ModelStore:
    def __init__(self, root: Path) -> None:
        self.root = root
        self._contents = root / "models" / "sha256"
        self._partials = root / "partial"
        self._versions = root / "versions"
        self._generations = root / "generations"
        self._current = root / "current"
        self._damaged: set[str] = set()  # contents, found since this start

    def prepare(self) -> None:
        for folder in (self._contents, self._partials, self._versions, self._generations):
            folder.mkdir(parents=True, exist_ok=True)

    # -- files -----------------------------------------------------------------------------------------------------

    def has(self, artefact: Artefact) -> bool:
        return self.path(artefact.sha256).is_file()

    def path(self, digest: str) -> Path:
        """The path of a verified file."""
        return self._contents / digest

    def partial(self, digest: str) -> Path:
        return self._partials / digest

    def admit(self, digest: str) -> None:
        """Give a complete and verified partial file its name."""
        move_durably(self.partial(digest), self.path(digest))

    def missing_bytes(self, plan: ModelPlan) -> int:
        """Bytes that are still to be fetched."""
        sizes = (one.size_bytes - self._partial_bytes(one) for one in plan.artefacts if not self.has(one))
        return sum(max(0, size) for size in sizes)

    def is_complete(self, plan: ModelPlan) -> bool:
        return all(map(self.has, plan.artefacts))

    def free_bytes(self) -> int:
        """Bytes that may still be written here, less the spare ones."""
        found = os.statvfs(self.root)
        return found.f_bavail * found.f_frsize - SPARE_BYTES

    def _partial_bytes(self, artefact: Artefact) -> int:
        try:
            return self.partial(artefact.sha256).stat().st_size
        except FileNotFoundError:
            return 0

    # -- versions --------------------------------------------------------------------------------------------------

    def repository(self, content: str) -> Path:
        """The root of a model repository with only this content."""
        return self._versions / content

    def stage(self, model: str, plan: ModelPlan) -> Path:
        """Make the version's folder; the root of its repository."""
        root = self.repository(plan.content)
        if root.exists():
            return root
        beside = self._beside(plan.content)
        shutil.rmtree(beside, ignore_errors=True)
        folder = beside / model / plan.version
        for file in plan.files:
            place = folder / file.path
            place.parent.mkdir(parents=True, exist_ok=True)
            os.link(self.path(file.sha256), place)
        # The document that asked for these files was signed by a trusted key.
        TrustedDigests(beside).add({file.sha256: f"rolled out: {model}/{file.path}" for file in plan.files})
        for one in [*beside.rglob("*"), beside]:
            if one.is_dir():
                sync_folder(one)
        os.replace(beside, root)
        sync_folder(self._versions)
        return root

    def vouch(self, deployed: Deployed) -> None:
        """Trust a version's files, which a signed document named: versions that older agents staged have no trust list.

        Raises RepositoryError.
        """
        root = self.repository(deployed.content)
        if root.is_dir():
            TrustedDigests(root).add(dict.fromkeys(deployed.files, "rolled out"))

    def discard_damaged(
        self,
        content: str,
        files: Collection[str],
        others: Collection[str] = (),
        *,
        verified: Collection[str] = (),
        stopped: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Remove what the disk has damaged of a content, so that it is fetched and staged anew; whether there was any.

        Reads every file. One that was removed leaves its links in other contents, which are found when those are read.
        The trust list beside the version is the store's own, and one that cannot be relied on costs a new one.

        Args:
            files: the digests of its version's files; others: those of files that only its rollout needs.
            verified: those of files under `models/` that are known to be right, and are not read again.
            stopped: asked all the while; once it is true, the reading ends, and nothing is removed any more.
        """
        read = _ReadBack(stopped)
        root = self.repository(content)
        try:
            for one in verified:
                read.note(self.path(one), one)
            damaged = sorted(one for one in {*files, *others} if read.digest(self.path(one)) not in (one, None))
            found = {read.digest(file) for file in root.rglob("*") if file.is_file() and file.name != FILE_NAME}
        except _Stopped:
            return False
        for one in damaged:
            self.path(one).unlink()
        is_right = found >= set(files) and _is_readable(TrustedDigests(root))
        if not damaged and (is_right or not root.exists()):
            return False
        log.error("files of a model were damaged on the disk", content=content, files=damaged)
        self._damaged.add(content)
        if root.exists():
            # Renamed first: a folder of which a power cut has left a part would count as staged.
            beside = self._beside(content)
            shutil.rmtree(beside, ignore_errors=True)
            os.replace(root, beside)
            sync_folder(self._versions)
            shutil.rmtree(beside, ignore_errors=True)
        return True

    def holds(self, content: str) -> bool:
        """Whether the files of a committed content are there, as far as was found since this start."""
        return content not in self._damaged and self.repository(content).is_dir()

    def healed(self, content: str) -> None:
        """Note that a content was committed again, and is served."""
        self._damaged.discard(content)

    def _beside(self, content: str) -> Path:
        """Where a version's folder is made and removed."""
        return self._versions / f".{content}"

    # -- generations -----------------------------------------------------------------------------------------------

    def committed(self) -> Generation:
        """The generation that the agent boots with; the empty one where none was committed.

        Where that one cannot be read, it is the newest before it that can be.
        """
        return self._committed()[0]

    def kept(self) -> list[Generation]:
        """Every generation on disk that can be read, the newest first."""
        try:
            numbers = self._numbers()
        except OSError as error:
            if not is_disk_failure(error):
                raise
            log.warning("the generations cannot be listed", path=str(self._generations), reason=error.strerror)
            return []
        found = (self._read(self._generations / f"{number}.json") for number in numbers)
        return [one for one in found if one is not None]

    def next_number(self) -> int:
        """A number that no generation has, also none that cannot be read."""
        return 1 + max([self.committed().number, *self._numbers()])

    def commit(self, generation: Generation) -> None:
        """Make a generation the committed one, also after a power cut."""
        name = f"{generation.number}.json"
        write_atomically(self._generations / name, msgspec.json.encode(generation), parents=True)
        link_atomically(self._current, f"generations/{name}")

    def collect(self, in_use: Iterable[ModelPlan]) -> None:
        """Remove files that no kept generation and none of these plans refers to.

        A model's `keep` newest versions stay, each with the newest generation that has it. While a generation that
        cannot be read may be one of these, only partial files are removed.
        """
        plans = list(in_use)
        wanted = {artefact.sha256 for plan in plans for artefact in plan.artefacts}
        _remove(self._partials, wanted)
        (committed, stands_in), kept = self._committed(), self.kept()
        if stands_in or self._may_miss_versions(committed, kept):
            log.warning("no model is collected, since a generation that may name some cannot be read")
            return
        numbers, versions = _kept_versions(committed, kept)
        contents = {one.content for one in versions} | {plan.content for plan in plans}
        files = {digest for one in versions for digest in one.files} | wanted
        _remove(self._generations, {f"{number}.json" for number in numbers})
        _remove(self._versions, contents)
        _remove(self._contents, files)

    def _committed(self) -> tuple[Generation, bool]:
        """The committed generation, and whether it is an older one that stands in for it."""
        found = self._read(self._current)
        if found is not None:
            return found, False
        # Not a newer one: its commit was cut short, and the rollout that it is of goes on from the journal.
        number = self._committed_number()
        return next((one for one in self.kept() if one.number < number), Generation()), number > 0

    def _may_miss_versions(self, committed: Generation, kept: Iterable[Generation]) -> bool:
        """Whether a generation that cannot be read may have a version that is to be kept.

        Not once `keep` newer ones can be read: without that end, one bad block would let the disk fill up for good, for
        the sake of a version to fall back to that can no longer be found.
        """
        keep = max((one.keep for one in committed.models.values()), default=0)
        readable = {committed.number, *(one.number for one in kept)}
        return any(sum(newer > one for newer in readable) < keep for one in self._numbers() if one not in readable)

    def _numbers(self) -> list[int]:
        """The numbers of the generations on disk, the newest first, whether they can be read or not."""
        try:
            names = os.listdir(self._generations)
        except FileNotFoundError:
            return []
        stems = (name.removesuffix(".json") for name in names if name.endswith(".json"))
        return sorted((int(stem) for stem in stems if stem.isdecimal()), reverse=True)

    def _committed_number(self) -> float:
        """The number of the generation that `current` names; 0 where there is no link, infinity where it is unknown."""
        try:
            stem = Path(os.readlink(self._current)).stem
        except FileNotFoundError:
            return 0
        except OSError as error:
            if error.errno != errno.EINVAL and not is_disk_failure(error):  # EINVAL: a copy has made a file of the link
                raise
            return math.inf
        return int(stem) if stem.isdecimal() else math.inf

    def _read(self, path: Path) -> Generation | None:
        """None where there is none, or where it is damaged."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=Generation)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeError) as error:
            if isinstance(error, OSError) and not is_disk_failure(error):
                raise
            log.warning("a generation cannot be read", path=str(path), reason=str(error))
            return None

    def __repr__(self) -> str:
        return f"<ModelStore {self.root} at generation {self.committed().number}>"


class _Stopped(Exception):
    """The reading back was to end."""


class _ReadBack:
    """The digests of files, each read once: most files of a version are links to those under `models/`."""

    def __init__(self, stopped: Callable[[], bool]) -> None:
        self._stopped = stopped
        self._digests: dict[tuple[int, int], str] = {}  # by device and inode

    def note(self, path: Path, digest: str) -> None:
        """Rely on a digest that somebody else has read back."""
        with suppress(OSError):
            self._digests[_inode(path)] = digest

    def digest(self, path: Path) -> str | None:
        """Of the bytes that the disk gives back: None where there is no file, "" where its medium cannot be read.

        Raises _Stopped.
        """
        try:
            inode = _inode(path)
            if inode not in self._digests:
                self._digests[inode] = sha256_of(path, on_bytes=self._go_on)
            return self._digests[inode]
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return ""

    def _go_on(self, _: int) -> None:
        if self._stopped():
            raise _Stopped


def _inode(path: Path) -> tuple[int, int]:
    about = path.stat()
    return about.st_dev, about.st_ino


def _is_readable(trusted: TrustedDigests) -> bool:
    """Whether a trust list can be relied on: with one that cannot, a content never boots, whatever its files are."""
    try:
        trusted.entries()
    except RepositoryError:
        return False
    return True


def _kept_versions(committed: Generation, kept: Iterable[Generation]) -> tuple[set[int], list[Deployed]]:
    """The numbers of the generations to keep, and the versions that they are kept for."""
    numbers, found = {committed.number}, dict[str, dict[str, Deployed]]()
    for generation in [committed, *kept]:
        for model, deployed in generation.models.items():
            held = found.setdefault(model, {})
            keep = committed.models[model].keep if model in committed.models else 0
            if deployed.content not in held and len(held) < keep:
                held[deployed.content] = deployed
                numbers.add(generation.number)
    return numbers, [one for held in found.values() for one in held.values()]


def _remove(folder: Path, names: Collection[str]) -> None:
    """Remove from the folder whatever has none of these names."""
    for entry in list(folder.iterdir()):
        if entry.name not in names:
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
