"""`tidegate model trust` keeps the list of model files that may run code (`tidegate/models/trusted_digests.py`)."""

from __future__ import annotations

from pathlib import Path

import click

from tidegate.models.digest import sha256_of
from tidegate.models.trusted_digests import TrustedDigests, digest_in
from tidegate.storage import audit_log
from tidegate.tools.build.command import errors_in_one_line, repository_option
from tidegate.tools.build.errors import BuildError


@click.command()
@click.argument("files", metavar="[PATH|DIGEST]...", nargs=-1)
@click.option("--remove", is_flag=True, help="Trust them no more; workers that run keep them until they end.")
@click.option("--list", "listed", is_flag=True, help="Print what is trusted.")
@repository_option
@errors_in_one_line
def trust(files: tuple[str, ...], remove: bool, listed: bool, repository: Path) -> None:
    """Say which exported programs (.pt2) and TorchScript files (.pt) may be loaded: they are programs.

    Nothing is loaded by this command; of a file the SHA-256 is taken. What `tidegate model build` makes is trusted
    already, and on a device what a signed rollout brings.

    \b
    Examples:
      tidegate model trust encoder.pt2
      tidegate model trust --list
      tidegate model trust --remove encoder.pt2
    """
    if not files and not listed:
        raise BuildError("give a file, a SHA-256 digest, or --list")
    trusted = TrustedDigests(repository)
    digests = {_digest_of(one): one for one in files}
    if files and not remove:
        trusted.add({digest: f"by an operator: {Path(one).name}" for digest, one in digests.items()})
    for digest, one in digests.items():
        if remove and not trusted.remove(digest):
            raise BuildError(f"{one}: sha256:{digest} is not on the list {trusted.path}; see it with --list")
        audit_log.note(audit_log.of_repository(repository), _ACTIONS[remove], sha256=digest)
        click.echo(f"{'no longer trusted' if remove else 'trusted'}: sha256:{digest}")
    if listed:
        for digest, words in trusted.entries().items():
            click.echo(f"sha256:{digest}  {words}".rstrip())


_ACTIONS = {False: "digest-trusted", True: "digest-no-longer-trusted"}


def _digest_of(text: str) -> str:
    path = Path(text)
    if path.is_file():
        return sha256_of(path)
    digest = digest_in(text)
    if digest is None:
        raise BuildError(f"{text}: no such file, and no SHA-256 digest (64 hexadecimal digits)")
    return digest
