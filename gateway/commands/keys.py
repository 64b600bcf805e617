"""The commands `tidegate keys` make, list, rotate and revoke API keys of clients, and make operators' signing keys.

A key is printed once, on stdout, so that it can be piped into a secret store; messages for people go to stderr.
Gateways that read the file follow a change within a second. Each change is a line of the audit log beside the file.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from msgspec.structs import replace
from rich.console import Console
from rich.table import Column, Table

from gateway.commands.signing_keys import signing
from gateway.core.access.api_key import ID_BYTES, SALT_BYTES, SECRET_BYTES, KeyRecord, new_key, with_new_secret
from gateway.identity.key_file import edit_keys, read_keys
from tidegate import clock
from tidegate.caller import RIGHTS, Grant, UsageLimits
from tidegate.oip.tenant import RULE, is_tenant
from tidegate.placement_pin import PINS
from tidegate.priority import LAST_LEVEL
from tidegate.runtime.duration import Duration
from tidegate.runtime.finite_range import FiniteRange
from tidegate.runtime.owner_option import check_readable, owner_option
from tidegate.runtime.plain_text import plain
from tidegate.runtime.suggestion import SuggestingGroup
from tidegate.storage import audit_log
from tidegate.storage.file_owner import FileOwner

_EXAMPLES = """
\b
Examples:
  tidegate keys create --tenant clinic --models 'minilm*' --expires 90d
  tidegate keys create --tenant ops --right admin --right metrics
  tidegate keys list
  tidegate keys rotate 3f9a0c11d2e4 --overlap 24h
  tidegate keys revoke 3f9a0c11d2e4
  tidegate keys signing create operator
"""
_file = click.option(
    "--file",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    default="keys.json",
    show_default=True,
    envvar="TIDEGATE_KEYS_FILE",
    help="The file that `auth.keys_file` of the gateway names.",
)


@click.group(cls=SuggestingGroup, epilog=_EXAMPLES)
def keys() -> None:
    """Make, list, rotate and revoke the API keys of a gateway's clients, and make signing keys."""


keys.add_command(signing)


LONGEST_S = 100 * 365 * 86_400.0  # a century: beyond, "until it is revoked" says it better
_key_as_json = click.option("--json", "as_json", is_flag=True, help="The key with its grant, as JSON.")


@keys.command()
@_file
@click.option("--tenant", required=True, help="The tenant whose limits its requests count against.")
@click.option(
    "--models",
    multiple=True,
    default=("*",),
    show_default=True,
    help="Glob of models; may be repeated.",
)
@click.option(
    "--expires",
    type=Duration(max_s=LONGEST_S),
    help="How long it is valid: 24h, 90d. Default: until it is revoked.",
)
@click.option(
    "--highest-priority",
    type=click.IntRange(1, LAST_LEVEL),
    default=1,
    show_default=True,
    help="1 is the highest.",
)
@click.option(
    "--pin", type=click.Choice(PINS), default="any", show_default=True, help="Outermost zone for its requests."
)
@click.option(
    "--right", "rights", multiple=True, type=click.Choice(RIGHTS), default=("infer",), show_default=True,
    help="What it may do; may be repeated.",
)  # fmt: skip
@click.option("--requests-per-s", type=FiniteRange(0, min_open=True), help="Its own limit, within its tenant's.")
@click.option("--tokens-per-s", type=FiniteRange(0, min_open=True), help="Tokens of generations, in and out.")
@click.option("--bytes-per-s", type=FiniteRange(0, min_open=True), help="Bytes of tensors, both ways together.")
@click.option("--pool-s-per-s", type=FiniteRange(0), help="Seconds of pool compute a second.")
@click.option("--edge-s-per-s", type=FiniteRange(0), help="Seconds of edge compute a second.")
@click.option("--max-in-flight", type=click.IntRange(1), help="Its requests in flight at once.")
@click.option("--note", default="", help="A note on its owner; shown in lists.")
@owner_option("the file's own, for a new one who runs this")
@_key_as_json
def create(
    path: Path,
    tenant: str,
    expires: float | None,
    note: str,
    owner: FileOwner | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Make a key for a client and print it, once.

    \b
    Examples:
      tidegate keys create --tenant clinic --models 'minilm*' --expires 90d
      tidegate keys create --tenant ops --right admin --right metrics
    """
    if not is_tenant(tenant):
        raise click.BadParameter(f"{tenant!r} is no tenant's name: {RULE}", param_hint="--tenant")
    limits = UsageLimits(**{name: given[name] for name in UsageLimits.__struct_fields__})
    grant = Grant(tenant, given["models"], given["highest_priority"], given["pin"], given["rights"], limits)
    now = clock.utc_s()
    record, key = new_key(
        grant,
        secrets.token_bytes(ID_BYTES + SALT_BYTES + SECRET_BYTES),
        utc_s=now,
        expires_at=None if expires is None else now + expires,
        note=note,
    )
    with edit_keys(path, owner) as records:
        records[record.id] = record
    try:
        audit_log.note(
            audit_log.beside(path), "key-created", id=record.id, tenant=tenant, models=list(grant.models),
            rights=list(grant.rights), expires=_date(record.expires_at),
        )  # fmt: skip
    finally:  # it is valid, whatever became of its line
        words = f"key {record.id} of tenant {tenant} is in {path}; it is shown here and never again:"
        with _lost_unless_printed(f"key {record.id} was made", f"`tidegate keys revoke {record.id} --file {path}`"):
            _print_key(words, record, key, now, as_json=as_json)
    check_readable(owner, [path])


@keys.command("list")
@_file
@click.option("--json", "as_json", is_flag=True, help="As JSON, without hashes.")
def list_(path: Path, as_json: bool) -> None:
    """List the keys with their grants and whether they are valid.

    \b
    Examples:
      tidegate keys list
      tidegate keys list --json | jq '.[] | select(.tenant == "clinic")'
    """
    now = clock.utc_s()
    rows = [_row(one, now) for one in read_keys(path)]
    if as_json:
        click.echo(json.dumps(rows))
        return
    columns = (Column("id", no_wrap=True), "tenant", "standing", "models", "rights", "expires", "note")
    table = Table(*columns)
    for row in rows:
        table.add_row(
            row["id"], plain(row["tenant"]), row["standing"], plain(", ".join(row["models"])),
            ", ".join(row["rights"]), row["expires"] or "never", plain(row["note"]),
        )  # fmt: skip
    Console().print(table)


@keys.command()
@_file
@click.argument("id")
@click.option(
    "--overlap",
    type=Duration(max_s=LONGEST_S),
    default="24h",
    show_default=True,
    help="How long the old secret stays valid.",
)
@_key_as_json
def rotate(path: Path, id: str, overlap: float, as_json: bool) -> None:
    """Give key ID a new secret and print it; the old secret stays valid for a while.

    \b
    Example:
      tidegate keys rotate 3f9a0c11d2e4 --overlap 24h
    """
    now = clock.utc_s()
    with edit_keys(path) as records:
        record = _valid(records, id, path, now)
        records[id], key = with_new_secret(record, secrets.token_bytes(SECRET_BYTES), utc_s=now, overlap_s=overlap)
    until = _date(now + overlap)
    try:
        audit_log.note(audit_log.beside(path), "key-rotated", id=id, tenant=record.grant.tenant, old_good_until=until)
    finally:  # it is valid, whatever became of its line
        words = f"key {id} has a new secret; the old one is good for another {overlap:g} s:"
        with _lost_unless_printed(f"key {id} has a new secret", f"`tidegate keys rotate {id} --file {path}`"):
            _print_key(words, records[id], key, now, as_json=as_json)


@keys.command()
@_file
@click.argument("id")
def revoke(path: Path, id: str) -> None:
    """Revoke key ID; every gateway that reads the file refuses it within a second.

    \b
    Example:
      tidegate keys revoke 3f9a0c11d2e4
    """
    with edit_keys(path) as records:
        record = _known(records, id, path)
        if record.revoked_at is None:
            records[id] = replace(record, revoked_at=clock.utc_s())
    if record.revoked_at is not None:
        click.echo(f"key {id} was revoked already, at {_date(record.revoked_at)}", err=True)
        return
    click.echo(f"key {id} is revoked", err=True)
    audit_log.note(audit_log.beside(path), "key-revoked", id=id, tenant=record.grant.tenant)


def _print_key(words: str, record: KeyRecord, key: str, now: float, *, as_json: bool) -> None:
    click.echo(words, err=True)
    click.echo(json.dumps({**_row(record, now), "key": key}) if as_json else key)


@contextmanager
def _lost_unless_printed(done: str, way_out: str) -> Iterator[None]:
    """Say what becomes of a secret that could not be printed: only its hash is kept."""
    try:
        yield
    except OSError as error:
        raise click.ClickException(
            f"{done}, but could not be printed ({error.strerror}), and nothing else holds it: {way_out}"
        ) from error


def _known(records: dict[str, KeyRecord], id: str, path: Path) -> KeyRecord:
    if id not in records:
        raise click.ClickException(f"{path} has no key {id!r}; `tidegate keys list` shows them")
    return records[id]


def _valid(records: dict[str, KeyRecord], id: str, path: Path, now: float) -> KeyRecord:
    record = _known(records, id, path)
    standing = record.standing(now)
    if standing != "valid":
        raise click.ClickException(f"key {id} is {standing}; make another with `tidegate keys create`")
    return record


def _row(record: KeyRecord, now: float) -> dict[str, Any]:
    grant = record.grant
    return {
        "id": record.id,
        "tenant": grant.tenant,
        "standing": record.standing(now),
        "models": list(grant.models),
        "rights": list(grant.rights),
        "highest_priority": grant.highest_priority,
        "pin": grant.pin,
        "limits": {name: getattr(grant.limits, name) for name in UsageLimits.__struct_fields__},
        "created": _date(record.created_at),
        "expires": _date(record.expires_at),
        "rotating_until": _date(next((one.until for one in record.secrets if one.until and one.until > now), None)),
        "note": record.note,
    }


def _date(utc_s: float | None) -> str | None:
    if utc_s is None:
        return None
    try:
        return datetime.fromtimestamp(utc_s, UTC).isoformat(timespec="seconds")
    except (OverflowError, OSError, ValueError):  # of a file that something else wrote
        return "beyond the calendar"
