"""`tidegate attest`: manages the keys by which edges and pools attest what they run."""

from __future__ import annotations

import json
from pathlib import Path

import click

from tidegate.config import ConfigError
from tidegate.runtime.owner_option import check_readable, owner_option
from tidegate.runtime.suggestion import SuggestingGroup
from tidegate.security.attestation.keys import line_of, make_key, read_allowed, read_key
from tidegate.security.attestation.software import key_id
from tidegate.storage.file_owner import FileOwner

_key = click.argument("key", type=click.Path(path_type=Path, dir_okay=False))


@click.group(cls=SuggestingGroup)
def attest() -> None:
    """Make keys for attested placement: requests marked `tidegate-require: attested` go to their holders only.

    \b
    Examples:
      tidegate attest init edge-1.attest.key >> attested.keys     on the device; the line belongs on the gateway
      tidegate attest show edge-1.attest.key
      tidegate attest list attested.keys
    """


@attest.command()
@_key
@click.option("--words", default="", help="A note in the line, for people. Default: the file's name.")
@owner_option("who runs this")
def init(key: Path, words: str, owner: FileOwner | None) -> None:
    """Make an attestation key, and print the line that allows it.

    KEY is the file for `attestation.key` of an edge or a pool: make it on that machine, and leave it there. The line
    goes into the file that a gateway's `attestation.allowed` names; taking it out ends the trust within seconds.

    \b
    Examples:
      tidegate attest init edge-1.attest.key
      tidegate attest init edge-1.attest.key --words 'kiosk, ground floor' >> attested.keys
    """
    try:
        made = make_key(key, owner)
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    click.echo(line_of(made, words or key.name))
    click.echo(f"made {key}, key id {key_id(made.public_key().public_bytes_raw())}", err=True)
    check_readable(owner, [key])


@attest.command()
@_key
@click.option("--words", default="", help="A note in the line, for people. Default: the file's name.")
def show(key: Path, words: str) -> None:
    """Print the line that allows a key, and its id.

    \b
    Example:
      tidegate attest show edge-1.attest.key
    """
    try:
        found = read_key(key)
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    click.echo(line_of(found, words or key.name))
    click.echo(f"key id {key_id(found.public_key().public_bytes_raw())}", err=True)


@attest.command(name="list")
@click.argument("allowed", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--json", "as_json", is_flag=True, help="As JSON, one list.")
def list_(allowed: Path, as_json: bool) -> None:
    """Print the ids of the keys in a list, which answers and `tidegate status` name.

    \b
    Example:
      tidegate attest list attested.keys
    """
    try:
        names = list(read_allowed(allowed))
        for line in [json.dumps(names)] if as_json else names:
            click.echo(line)
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
