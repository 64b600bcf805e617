"""The commands of `tidegate model` share the repository option, its audit log, and errors in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

import click

from tidegate.models.digest import sha256_of
from tidegate.models.manifest import Manifest
from tidegate.models.repository import RepositoryError
from tidegate.outcome import ModelNotFound
from tidegate.storage import audit_log
from tidegate.storage.os_error_line import one_line
from tidegate.tools.build.errors import BuildError

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_REPOSITORY = Path(".tidegate/models")

repository_option = click.option(
    "--repository",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_REPOSITORY,
    show_default=True,
    help="Folder of the model repository.",
)


def errors_in_one_line(command: Callable[P, R]) -> Callable[P, R]:
    """What goes wrong for reasons that a user can mend is one line and exit code 1, not a traceback."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except (BuildError, RepositoryError, ModelNotFound) as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            raise click.ClickException(one_line(error)) from error

    return run


def record_in_trail(repository: Path, action: str, manifest: Manifest) -> None:
    """Leave a line in the repository's trail, with the digest of the manifest, which has those of all else."""
    name, version = manifest.name, manifest.version
    digest = sha256_of(repository / name / version / "model.yaml")
    audit_log.note(audit_log.of_repository(repository), action, model=name, version=version, manifest_sha256=digest)


@contextmanager
def requires_extra(*modules: str) -> Iterator[None]:
    """Turn a failed import in the block into an error that says what to install."""
    try:
        yield
    except ImportError as error:
        raise BuildError(f"this needs {' and '.join(modules)}: pip install 'tidegate[build]'") from error
