"""Checks an exported program's archive before torch reads it, so that the file runs no code when it is loaded.

Four ways lead from such a file to code, and each is closed here. A pickle: `torch.export.load` unpickles a weight or
constant whose entry says `use_pickle`, constants that are named `opaque_obj_…` or `custom_obj_…` whatever their entry
says, and archives of older forms. A library: what lies under `data/aotinductor/` is compiled code, which is linked at
once. A text that is evaluated: `program_grammar.py`. And a second reading of the archive: torch has a reader of its
own, which could find other members than Python's; so names that occur twice are refused, and `TorchEngine` compares.

Programs that `torch.export.save` writes from ordinary tensors have none of these, so nothing is lost by refusing; a
digest in the manifest does not make a pickle harmless, it only says that it is the one that was meant.

What a program computes is not judged here. So before all this its digest must be on the trust list
(`tidegate/models/trusted_digests.py`), and it is the digest of the copy that is then checked and loaded.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from tidegate.engines.errors import EngineError, UntrustedProgram
from tidegate.engines.program_grammar import ProgramGrammar, UnsafeText
from tidegate.models.digest import sha256_of
from tidegate.models.repository import RepositoryError
from tidegate.models.trusted_digests import TrustedDigests

_FORCE: Final = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_MAX_CONFIG_BYTES: Final = 64 * 2**20
_BLOCK_BYTES: Final = 8 * 2**20
_MAX_MEMBERS: Final = 100_000
_CODE_PREFIXES: Final = ("custom_obj_", "opaque_obj_")
_MEMBER: Final = re.compile(
    r"(archive_format|archive_version|byteorder|version|\.format_version|\.storage_alignment|\.data/[A-Za-z0-9_]+"
    r"|data/(weights|constants)/[A-Za-z0-9_]+(_config\.json)?|data/sample_inputs/[A-Za-z0-9_]+\.pt"
    r"|models/[A-Za-z0-9_]+\.json|extra/[A-Za-z0-9_./-]+)\Z"
)


@contextmanager
def private_copy(artefact: Path) -> Iterator[Path]:
    """Within, a copy that no other account can write, in memory where the kernel can: what was checked is what is
    loaded, also when somebody replaces or rewrites the file in between. Raises EngineError."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="tidegate-")))  # for its owner alone
        copied = folder / f"copy{artefact.suffix}"
        try:
            with artefact.open("rb") as source:
                if hasattr(os, "memfd_create"):
                    target = stack.enter_context(os.fdopen(os.memfd_create(artefact.name[:200]), "wb"))
                    shutil.copyfileobj(source, target, _BLOCK_BYTES)
                    target.flush()
                    copied.symlink_to(f"/proc/self/fd/{target.fileno()}")
                else:
                    with copied.open("xb") as target:
                        shutil.copyfileobj(source, target, _BLOCK_BYTES)
        except OSError as error:
            raise EngineError(f"{artefact}: it cannot be read: {error}") from error
        yield copied


def require_trust(copied: Path, shown: Path, trusted: TrustedDigests) -> None:
    """Raises UntrustedProgram unless the digest of a private copy is trusted. `shown`: the path for messages."""
    try:
        digest = sha256_of(copied)
        if digest not in trusted:
            raise UntrustedProgram(trusted.refusal(digest, shown))
    except (OSError, RepositoryError) as error:
        raise UntrustedProgram(str(error)) from error


def refuse_code(artefact: Path, *, shown: Path | None = None) -> dict[str, bytes]:
    """The JSON members that were checked, by name, for a reader that wants to compare.

    Args:
        shown: the path for messages, where `artefact` is a copy.

    Raises:
        EngineError: torch would run a part of the exported program when it loads it, or it is no archive.
    """
    path, artefact = artefact, shown or artefact
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            _check_members(artefact, members)
            documents = {one.filename: _read(artefact, archive, one) for one in members if is_document(one.filename)}
        grammar = ProgramGrammar()
        for name, content in documents.items():
            found = json.loads(content)
            if name.endswith("_config.json"):
                _refuse(artefact, name, found)
            try:
                grammar.check(found)
            except UnsafeText as error:
                raise EngineError(
                    f"{artefact}: {name} has something that torch would evaluate and that no exported program needs: "
                    f"{error}: refused, since it could run code"
                ) from error
    except (OSError, zipfile.BadZipFile, ValueError, RecursionError, NotImplementedError) as error:
        raise EngineError(f"{artefact}: no exported program: {error}") from error
    return documents


def _check_members(artefact: Path, members: Sequence[zipfile.ZipInfo]) -> None:
    names = [one.filename for one in members]
    if len(names) > _MAX_MEMBERS or len({name.lower() for name in names}) != len(names):
        raise EngineError(f"{artefact}: {len(names)} members, or two of one name: refused, since readers may differ")
    if not any(name.endswith("_weights_config.json") for name in names):
        raise EngineError(f"{artefact}: an exported program of an older form, which is a pickle: export it anew")
    for name in names:
        if not _MEMBER.match(name.partition("/")[2]):
            raise EngineError(
                f"{artefact}: {name!r} is no member of a plain exported program (compiled code, a pickle, or unknown): "
                "refused; export it anew with torch.export.save"
            )


def is_document(name: str) -> bool:
    """Whether a member of an archive, by its whole name, is JSON that torch reads as a part of the program."""
    return name.endswith(".json") and not name.partition("/")[2].startswith("extra/")


def _read(artefact: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    if member.file_size > _MAX_CONFIG_BYTES:
        raise EngineError(f"{artefact}: {member.filename} has {member.file_size} bytes")
    return archive.read(member)


@contextmanager
def no_pickles() -> Iterator[None]:
    """Within, torch unpickles tensors and nothing else, also where its own code would try again without care: it does
    for the example inputs in an archive. Of the whole process, so not for where several threads load."""
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before


def _refuse(artefact: Path, config: str, found: Any) -> None:
    entries = found.get("config") if isinstance(found, dict) else None
    if not isinstance(entries, dict):
        raise EngineError(f"{artefact}: {config} is no list of what the program holds")
    for name, entry in entries.items():
        if not isinstance(entry, dict) or entry.get("use_pickle") is not False:
            raise EngineError(f"{artefact}: {name!r} is stored as a pickle, which runs code when it is read: refused")
        path_name = entry.get("path_name")
        if not isinstance(path_name, str) or path_name.startswith(_CODE_PREFIXES):
            raise EngineError(f"{artefact}: {name!r} is stored as an object ({path_name!r}), which runs code: refused")
