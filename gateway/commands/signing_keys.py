"""The commands `tidegate keys signing` make and show the keys with which operators sign desired documents.

    NAME.key    PEM, Ed25519, readable for its owner alone; it stays with the operator, on no gateway and no device
    NAME.pub    its line for the devices' lists of trusted keys (`rollout.keys` of an edge); it is public

`rotate` writes the chain of roots (`tidegate/rollout/root_chain.py`), which travels with later rollouts.
"""

from __future__ import annotations

from pathlib import Path

import click

from tidegate import clock
from tidegate.config import ConfigError
from tidegate.rollout.root_chain import RootKeys, TrustedRoot, encode_chain, link_of, read_chain, read_link, walk
from tidegate.rollout.signing import id_of, public_text
from tidegate.runtime.suggestion import SuggestingGroup
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


@click.group(cls=SuggestingGroup, epilog=_EXAMPLES)
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


@signing.command()
@click.argument("chain", metavar="CHAIN", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--key", "keys", multiple=True, required=True, type=click.Path(path_type=Path, dir_okay=False),
    help="Key that is trusted now and signs the change; as many as the threshold asks for.",
)  # fmt: skip
@click.option(
    "--to", "successors", multiple=True, required=True, type=click.Path(path_type=Path, dir_okay=False),
    help="Key that is trusted from then on, one that stays included.",
)  # fmt: skip
@click.option(
    "--threshold", type=click.IntRange(1, 8), default=1, show_default=True,
    help="How many of the new keys must sign a rollout, and the next change.",
)  # fmt: skip
def rotate(chain: Path, keys: tuple[Path, ...], successors: tuple[Path, ...], threshold: int) -> None:
    """Add a root to the file CHAIN: from then on devices trust exactly the keys --to.

    `tidegate model rollout --roots CHAIN` brings the chain to devices; one that missed some changes walks them all.
    Keep the file: a device at version n needs every link behind it.

    \b
    Examples:
      tidegate keys signing rotate roots.json --key operator.key --to operator-2027.key
      tidegate keys signing rotate roots.json --key a.key --key b.key --to b.key --to c.key --threshold 2
    """
    links = read_chain(chain) if chain.exists() else ()
    olds, news = ([read_key(path, "signing key", MAKER) for path in paths] for paths in (keys, successors))
    try:
        before = read_link(links[-1]) if links else None
        trusted = (
            TrustedRoot({id_of(key): key.public_key().public_bytes_raw() for key in olds})
            if before is None
            else TrustedRoot(before.by_id(), before.version, before.threshold)
        )
        texts = tuple(public_text(key.public_key().public_bytes_raw()) for key in news)
        root = RootKeys(trusted.version + 1, threshold, texts, int(clock.utc_s()))
        link = link_of(root, [*olds, *news])
        walk(trusted, [link])
    except ValueError as error:
        raise click.ClickException(f"{chain}: {error}") from error
    try:
        write_atomically(chain, encode_chain((*links, link)), mode=0o644)
    except OSError as error:
        raise ConfigError(f"cannot write {chain}: {error.strerror}") from error
    click.echo(f"{chain}: version {root.version}, {threshold} of {len(news)} keys; show it to devices with --roots")
    audit_log.note(audit_log.beside(chain), "signing-root-rotated", version=root.version, kids=sorted(root.by_id()))
