"""`tidegate release`: signs a release, and verifies one before it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from tidegate.config import ConfigError
from tidegate.runtime.suggestion import SuggestingGroup
from tidegate.security.attestation.keys import read_allowed, read_key
from tidegate.storage import audit_log
from tidegate.tools.release.checksums import ENVELOPE, ReleaseRefused
from tidegate.tools.release.sealed_release import VerifiedRelease, sign, verify, verify_checksums

_MAKER = "tidegate keys signing create"
_folder = click.argument("folder", metavar="DIST", type=click.Path(path_type=Path, file_okay=False, exists=True))


@click.group(cls=SuggestingGroup)
def release() -> None:
    """Sign a release, and verify one before it is installed.

    \b
    Examples:
      tidegate release verify dist/0.2.0 --key operator.pub
      tidegate release sign dist/0.2.0 --key operator.key
    """


@release.command("verify")
@_folder
@click.option(
    "--key", "keys", multiple=True, type=click.Path(path_type=Path, dir_okay=False),
    help="Public lines (NAME.pub) of keys that you trust; one of them must have signed.",
)  # fmt: skip
@click.option("--version", "wanted", help="The version that you mean; an older one is signed as well as this one.")
@click.option("--checksums-only", is_flag=True, help="Ask for no signature: who made the files is not checked.")
@click.option("--json", "as_json", is_flag=True, help="What was found as JSON; the exit code is the same.")
def verify_command(
    folder: Path, keys: tuple[Path, ...], wanted: str | None, checksums_only: bool, as_json: bool
) -> None:
    """Hold a release to its signed statement: no file is changed, missing or added.

    \b
    Examples:
      tidegate release verify dist/0.2.0 --key operator.pub
      tidegate release verify dist/0.2.0 --key operator.pub --version 0.2.0
      tidegate release verify dist/0.2.0 --checksums-only
    """
    if bool(keys) == checksums_only:
        raise click.UsageError("give --key with the keys that you trust, or --checksums-only, and not both")
    if checksums_only and wanted is not None:
        raise click.UsageError("--version needs --key: without a signature the version is anybody's word")
    trusted = {kid: public for path in keys for kid, public in read_allowed(path, what="signing keys").items()}
    try:
        found = verify_checksums(folder) if checksums_only else verify(folder, trusted)
    except ReleaseRefused as error:
        raise _refused(folder, error) from error
    if found.statement is not None and wanted not in (None, found.statement.version):
        raise click.ClickException(f"{folder}: it is {found.statement.version}, and signed as that, not {wanted}")
    click.echo(json.dumps(_as_json(found)) if as_json else _said(folder, found))


@release.command("sign")
@_folder
@click.option(
    "--key", "key_path", required=True, type=click.Path(path_type=Path, dir_okay=False),
    help="Key that signs (`tidegate keys signing create`).",
)  # fmt: skip
def sign_command(folder: Path, key_path: Path) -> None:
    """Sign the statement of a release whose files are as it says, beside signatures of others.

    \b
    Example:
      tidegate release sign dist/0.2.0 --key operator.key
    """
    key = read_key(key_path, "signing key", _MAKER)
    try:
        kid = sign(folder, key)
    except ReleaseRefused as error:
        raise _refused(folder, error) from error
    except OSError as error:
        raise ConfigError(f"cannot write {folder / ENVELOPE}: {error.strerror}") from error
    click.echo(f"{folder / ENVELOPE}: signed by the key {kid}")
    audit_log.note(audit_log.beside(key_path), "release-signed", release=str(folder), kid=kid)


def _as_json(found: VerifiedRelease) -> dict[str, Any]:
    statement = found.statement
    told: dict[str, Any] = {"files": found.files, "signers": list(found.signers)}
    if statement is None:
        return told
    return told | {"version": statement.version, "commit": statement.commit, "builder": statement.builder}


def _said(folder: Path, found: VerifiedRelease) -> str:
    if found.statement is None:
        return f"{folder}: {found.files} files are as SHA256SUMS says; who made them was not checked"
    statement = found.statement
    return (
        f"{folder}: {found.files} files are as signed by {', '.join(found.signers)}\n"
        f"version {statement.version}, of commit {statement.commit or 'unknown'}, built by {statement.builder}"
    )


def _refused(folder: Path, error: ReleaseRefused) -> click.ClickException:
    lines = str(error).splitlines()
    return click.ClickException("\n".join([f"{folder} is not a release to install:", *(f"  {line}" for line in lines)]))
