"""The commands `tidegate keys signing` make and show the keys with which operators sign desired documents.

    NAME.key    PEM, Ed25519, readable for its owner alone; it stays with the operator, on no gateway and no device
    NAME.pub    its line for the devices' lists of trusted keys (`rollout.keys` of an edge); it is public

`rotate` writes the chain of roots (`tidegate/rollout/root_chain.py`), which travels with later rollouts. Where the keys
lie on several machines, `draft` writes the next root unsigned, `sign` adds a signature on each machine, and `merge`
puts the copies into the chain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from tidegate import clock
from tidegate.config import ConfigError
from tidegate.rollout.root_chain import (
    RootKeys,
    RootLink,
    TrustedRoot,
    encode_chain,
    encode_draft,
    lacking,
    link_of,
    merged,
    read_chain,
    read_draft,
    read_link,
    walk,
    with_signature,
)
from tidegate.rollout.signing import id_of, public_text
from tidegate.runtime.suggestion import SuggestingGroup
from tidegate.security.attestation.keys import line_of, make_key, read_allowed, read_key
from tidegate.storage import audit_log
from tidegate.storage.atomic_file import write_atomically
from tidegate.storage.output_file import output_path

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
        trusted = _last_root(links, {id_of(key): key.public_key().public_bytes_raw() for key in olds})
        texts = tuple(public_text(key.public_key().public_bytes_raw()) for key in news)
        root = RootKeys(trusted.version + 1, threshold, texts, int(clock.utc_s()))
        link = link_of(root, [*olds, *news])
        walk(trusted, [link])
    except ValueError as error:
        raise click.ClickException(f"{chain}: {error}") from error
    _append(chain, links, link)


@signing.command()
@click.argument("chain", metavar="CHAIN", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("draft_path", metavar="DRAFT", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--to", "successors", multiple=True, required=True, type=click.Path(path_type=Path, dir_okay=False),
    help="Public lines (NAME.pub) of keys that are trusted from then on, those that stay included.",
)  # fmt: skip
@click.option(
    "--threshold", type=click.IntRange(1, 8), default=1, show_default=True,
    help="How many of the new keys must sign a rollout, and the next change.",
)  # fmt: skip
def draft(chain: Path, draft_path: Path, successors: tuple[Path, ...], threshold: int) -> None:
    """Write the root that would follow CHAIN, unsigned, to the file DRAFT. It needs no private key.

    Copy it to each machine that has a key, of those that are trusted now and of the new ones; `sign` it there.

    \b
    Examples:
      tidegate keys signing draft roots.json root-2.json --to a.pub --to b.pub --threshold 2
    """
    links = read_chain(chain) if chain.exists() else ()
    publics = {kid: public for path in successors for kid, public in read_allowed(path, what="signing keys").items()}
    version = read_link(links[-1]).version + 1 if links else 2
    try:
        root = RootKeys(version, threshold, tuple(map(public_text, publics.values())), int(clock.utc_s()))
        link = link_of(root, [])
        read_link(link)
    except ValueError as error:
        raise click.ClickException(f"{draft_path}: {error}") from error
    _write(draft_path, encode_draft(link))
    click.echo(f"{draft_path}: version {version}, {threshold} of {len(publics)} keys, unsigned; sign copies of it")


@signing.command()
@click.argument("draft_path", metavar="DRAFT", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--key", "key_path", required=True, type=click.Path(path_type=Path, dir_okay=False),
    help="Key of this machine, one that is trusted now or a new one.",
)  # fmt: skip
def sign(draft_path: Path, key_path: Path) -> None:
    """Sign a draft of a root, in its place, and say what was signed.

    \b
    Example:
      tidegate keys signing sign root-2.json --key a.key
    """
    link, key = read_draft(draft_path), read_key(key_path, "signing key", MAKER)
    root = read_link(link)
    for kid in root.by_id():
        click.echo(f"will be trusted: {kid}")
    _write(draft_path, encode_draft(with_signature(link, key)))
    click.echo(f"{draft_path}: version {root.version}, threshold {root.threshold}, is signed by {id_of(key)}")
    audit_log.note(audit_log.beside(key_path), "signing-root-signed", version=root.version, kid=id_of(key))


@signing.command()
@click.argument("chain", metavar="CHAIN", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("copies", metavar="DRAFT...", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--trusted", "trusted_path", type=click.Path(path_type=Path, dir_okay=False),
    help="Where CHAIN does not exist yet: the devices' list of trusted keys (`rollout.keys`).",
)  # fmt: skip
def merge(chain: Path, copies: tuple[Path, ...], trusted_path: Path | None) -> None:
    """Add a root to the file CHAIN from the signed copies of its draft, once enough keys have signed.

    \b
    Examples:
      tidegate keys signing merge roots.json root-2.a.json root-2.b.json --trusted devices/signing.pub
    """
    links = read_chain(chain) if chain.exists() else ()
    if not links and trusted_path is None:
        raise click.UsageError(f"{chain} does not exist yet: name the devices' list of trusted keys with --trusted")
    first = read_allowed(trusted_path, what="signing keys") if trusted_path is not None else {}
    try:
        trusted = _last_root(links, first)
        link = merged([read_draft(path) for path in copies], trusted)
        if words := lacking(link, trusted):
            raise click.ClickException(f"{chain}: it lacks {'; and '.join(words)}")
        if walk(trusted, [link]).version == trusted.version:
            raise click.ClickException(f"{chain}: it is at version {trusted.version} already")
    except ValueError as error:
        raise click.ClickException(f"{chain}: {error}") from error
    _append(chain, links, link)


def _last_root(links: Sequence[RootLink], first: Mapping[str, bytes]) -> TrustedRoot:
    """What devices trust at the end of a chain; `first`: what they trust before any."""
    if not links:
        return TrustedRoot(first)
    before = read_link(links[-1])
    return TrustedRoot(before.by_id(), before.version, before.threshold)


def _append(chain: Path, links: Sequence[RootLink], link: RootLink) -> None:
    root = read_link(link)
    _write(chain, encode_chain((*links, link)))
    kids = sorted(root.by_id())
    click.echo(
        f"{chain}: version {root.version}, {root.threshold} of {len(kids)} keys; show it to devices with --roots"
    )
    audit_log.note(audit_log.beside(chain), "signing-root-rotated", version=root.version, kids=kids)


def _write(path: Path, content: bytes) -> None:
    try:
        write_atomically(output_path(path), content, mode=0o644)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
