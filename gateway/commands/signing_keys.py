"""The commands `tidegate keys signing` make and show the keys with which operators sign desired documents.

    NAME.key    PEM, Ed25519, readable for its owner alone; it stays with the operator, on no gateway and no device
    NAME.pub    its line for the devices' lists of trusted keys (`rollout.keys` of an edge); it is public

A rotation of keys is a rollout like others, with documents that name the new key (`docs/rollout.md`).
"""

from __future__ import annotations

from pathlib import Path

import click

from tidegate.config import ConfigError
from tidegate.rollout.signing import id_of
from tidegate.security.attestation.keys import line_of, make_key, read_key
from tidegate.storage import audit_log
from tidegate.storage.atomic_file import write_atomically

MAKER = "tidegate keys signing create"
_EXAMPLES = """
\b
Examples:
  tidegate keys signing create operator
  tidegate keys signing show operator.key >> devices/signing.pub
  tidegate model rollout minilm --key operator.key
"""


@click.group(epilog=_EXAMPLES)
def signing() -> None:
    """Make and show the keys that sign rollouts of models."""


@signing.command()
@click.argument("name")
@click.option(
    "--dir", "folder", type=click.Path(path_type=Path, file_okay=False), default=".", show_default=True,
    help="Where NAME.key and NAME.pub are written.",
)  # fmt: skip
def create(name: str, folder: Path) -> None:
    """Make a key: NAME.key for the operator, NAME.pub for the devices.

    \b
    Examples:
      tidegate keys signing create operator
      tidegate keys signing create operator-2027 --dir /media/safe
    """
    if Path(name).name != name or name.startswith("."):
        raise click.BadParameter(f"{name!r} is no file's name; --dir says where", param_hint="NAME")
    private, public = folder / f"{name}.key", folder / f"{name}.pub"
    key = make_key(private)
    try:
        write_atomically(public, f"{line_of(key, name)}\n".encode(), mode=0o644)
    except OSError as error:
        raise ConfigError(f"cannot write {public}: {error.strerror}") from error
    click.echo(f"{private} signs rollouts: keep it where you run `tidegate model rollout`, and a copy in a safe")
    click.echo(f"{public} goes to every device: key `rollout.keys` of its configuration")
    audit_log.note(audit_log.beside(private), "signing-key-created", name=name, kid=id_of(key))


@signing.command()
@click.argument("path", metavar="KEY", type=click.Path(path_type=Path, dir_okay=False))
def show(path: Path) -> None:
    """Print a key's line for the devices' lists of trusted keys.

    \b
    Example:
      tidegate keys signing show operator.key >> devices/signing.pub
    """
    click.echo(line_of(read_key(path, "signing key", MAKER), path.stem))
