"""The trust list holds the SHA-256 digests of the model files that may run code here: programs of torch.

    ROOT/trusted.digests     one a line, `sha256:HEX  where it came from`; beside the models of a repository

An exported program or a TorchScript file is a program, and no check of its bytes says what it computes. So it is loaded
where its digest is on the list and nowhere else. Three ways lead onto it: our own tools built the file into this
repository, an operator named it (`tidegate model trust`), or an operator's key signed the document that rolled it out.
The digest is taken of the private copy that is loaded (`engines/archive.py`), so there is no time between.

The list is replaced as a whole, for the account and its group to read. One that everybody may write, or that does not
parse, trusts nothing. How it can be wrong: who may write the folder may replace the list, as they may the models.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tidegate.models.manifest import EngineName, Manifest, Variant
from tidegate.models.repository import Repository, RepositoryError
from tidegate.storage.atomic_file import write_atomically

FILE_NAME: Final = "trusted.digests"
CODE_ENGINES: Final[frozenset[EngineName]] = frozenset({"torch-export", "torchscript"})
_HEAD: Final = "# Digests of model files that may run code; change it with `tidegate model trust`."
_LINE: Final = re.compile(r"sha256:(?P<digest>[0-9a-f]{64})(?:\s+(?P<words>\S.*))?\Z")
_DIGEST: Final = re.compile(r"(?:sha256:)?(?P<digest>[0-9a-fA-F]{64})\Z")
_MAX_BYTES: Final = 4 * 2**20
_MAX_WORDS: Final = 200
_MODE: Final = 0o640


class TrustedDigests:
    """The list of one repository. Reads and writes block on the disk; every question reads the file anew."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = root / FILE_NAME

    @classmethod
    def of_artefact(cls, artefact: Path) -> TrustedDigests:
        """The list of the repository that an artefact lies in, as ROOT/NAME/VERSION/ARTEFACT."""
        return cls(artefact.absolute().parent.parent.parent)

    def entries(self) -> Mapping[str, str]:
        """Where each trusted file came from, by its digest. Raises RepositoryError: it cannot be relied on."""
        try:
            with self.path.open("rb") as file:
                if stat.S_IMODE(mode := os.fstat(file.fileno()).st_mode) & stat.S_IWOTH:
                    raise RepositoryError(
                        f"{self.path}: every account may write it (mode {stat.S_IMODE(mode):o}), so it trusts nothing: "
                        f"look through it, then chmod 640 {self.path}"
                    )
                content = file.read(_MAX_BYTES + 1)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise RepositoryError(f"{self.path}: the trust list cannot be read: {error.strerror}") from error
        if len(content) > _MAX_BYTES:
            raise RepositoryError(f"{self.path}: has more than {_MAX_BYTES} bytes")
        return dict(self._parsed(content))

    def __contains__(self, digest: object) -> bool:
        return digest in self.entries()

    def add(self, digests: Mapping[str, str]) -> None:
        """Trust files from now on: where each came from, by its digest. Raises RepositoryError."""
        if set(digests) - set(self.entries()):
            self._change(lambda held: {**digests, **held})

    def remove(self, digest: str) -> bool:
        """Trust a file no more; whether it was trusted. Workers that have loaded it keep it until they end."""
        was = digest in self
        self._change(lambda held: {one: words for one, words in held.items() if one != digest})
        return was

    def refusal(self, digest: str, what: object) -> str:
        """Why a file is not loaded, with the way out."""
        return (
            f"{what}: it is a program, which can do what its author likes, and its digest is not trusted here: "
            f"sha256:{digest}; if you know where it is from: "
            f"tidegate model trust {digest} --repository {self.root}"
        )

    def _parsed(self, content: bytes) -> Iterator[tuple[str, str]]:
        for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), start=1):
            if not line.strip() or line.startswith("#"):
                continue
            if (found := _LINE.match(line.rstrip())) is None:
                raise RepositoryError(
                    f"{self.path}: line {number}: {line[:_MAX_WORDS]!r} is no `sha256:HEX words`, so the list "
                    "trusts nothing: remove the line"
                )
            yield found["digest"], found["words"] or ""

    def _change(self, change: Callable[[Mapping[str, str]], Mapping[str, str]]) -> None:
        try:
            with self._locked():
                wanted = change(self.entries())
                lines = (f"sha256:{digest}  {_plain(words)}".rstrip() for digest, words in wanted.items())
                write_atomically(self.path, "\n".join((_HEAD, *lines, "")).encode(), mode=_MODE)
        except OSError as error:
            raise RepositoryError(f"{self.path}: the trust list cannot be written: {error.strerror}") from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.root.mkdir(parents=True, exist_ok=True)
        folder = os.open(self.root, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def __repr__(self) -> str:
        return f"<TrustedDigests {self.path}>"


def check_trusted(repository: Repository, manifest: Manifest, variant: Variant) -> None:
    """Raises RepositoryError for a variant whose file can run code and is not on its repository's list."""
    trusted = TrustedDigests(repository.root)
    if variant.engine in CODE_ENGINES and variant.sha256 not in trusted:
        raise RepositoryError(trusted.refusal(variant.sha256, repository.artefact(manifest, variant)))


def digest_in(text: str) -> str | None:
    """The digest that a text spells, with or without `sha256:`; None if it is none."""
    found = _DIGEST.match(text)
    return found["digest"].lower() if found else None


def _plain(words: str) -> str:
    return " ".join("".join(one if one.isprintable() else " " for one in words).split())[:_MAX_WORDS]
