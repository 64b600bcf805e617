"""`tidegate broker config` writes a broker's files, so that each device publishes as itself only."""

from __future__ import annotations

import os
import pwd
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Final
from urllib.parse import quote

import click

from tidegate.fleet.topics import DEFAULT_FLEET, checked_name
from tidegate.runtime.owner_option import check_readable, owner_option
from tidegate.runtime.suggestion import SuggestingGroup
from tidegate.security.certificate_identity import CertificateIdentity
from tidegate.security.certificate_store import PkiStore
from tidegate.storage.atomic_file import write_atomically
from tidegate.storage.file_owner import FileOwner
from tidegate.tools.broker.mosquitto_config import (
    MosquittoPlan,
    Users,
    acl_text,
    conf_text,
    gateway_user,
    new_password,
    passwd_text,
    pool_user,
    users_in,
)

CONF, ACL, PASSWD = "mosquitto.conf", "tidegate.acl", "tidegate.passwd"
TLS_FILES: Final = ("ca.crt", "broker.crt", "broker.key")
FILES: Final = (CONF, ACL, PASSWD, *TLS_FILES)
MOSQUITTOS_USER: Final = "mosquitto"  # which it becomes when root starts it, before it reads any of its files


@click.group(cls=SuggestingGroup)
def broker() -> None:
    """Configure the MQTT broker of a fleet.

    \b
    Examples:
      tidegate broker config --for mosquitto --gateway main --pki pki
      tidegate broker config --for mosquitto --gateway main --users passwords --device edge-1 --pki pki
    """


@broker.command()
@click.option("--for", "kind", type=click.Choice(["mosquitto"]), required=True, help="Which broker.")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("mosquitto"),
    show_default=True,
    help="Where to write the files.",
)
@click.option(
    "--installed-at",
    type=click.Path(path_type=Path),
    default=None,
    metavar="DIR",
    help="Where they will lie on the broker's machine. Default: where they are written.",
)
@click.option(
    "--fleet", default=DEFAULT_FLEET, show_default=True, help="The fleet, as its agents and gateways call it."
)
@click.option("--gateway", "gateways", multiple=True, metavar="NAME", help="A gateway's name; repeatable.")
@click.option("--pool", "pools", multiple=True, metavar="NAME", help="A pool that announces itself; repeatable.")
@click.option("--device", "devices", multiple=True, metavar="NAME", help="With passwords: a device's name; repeatable.")
@click.option(
    "--users",
    type=click.Choice(["certificates", "passwords"]),
    default="certificates",
    show_default=True,
    help="How clients authenticate.",
)
@click.option("--new-password", "renewed", multiple=True, metavar="USER", help="Give this user another password.")
@click.option("--no-tls", is_flag=True, help="Without encryption, for a network that you trust with passwords.")
@click.option("--port", type=click.IntRange(1, 65535), default=None, help="Default: 8883, without TLS 1883.")
@click.option("--neighbours", is_flag=True, help="Let devices read where others are, to ask them for help.")
@click.option("--host", default="localhost", show_default=True, help="The broker's host, for the addresses shown.")
@click.option(
    "--pki",
    "pki_folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    envvar="TIDEGATE_PKI_DIR",
    help="Copy ca.crt and the certificate of broker/main from this folder of `tidegate pki`.",
)
@owner_option("for root, `mosquitto` where there is such a user; else who runs this")
def config(
    kind: str,
    folder: Path,
    installed_at: Path | None,
    fleet: str,
    gateways: tuple[str, ...],
    pools: tuple[str, ...],
    devices: tuple[str, ...],
    users: Users,
    renewed: tuple[str, ...],
    no_tls: bool,
    port: int | None,
    neighbours: bool,
    host: str,
    pki_folder: Path | None,
    owner: FileOwner | None,
) -> None:
    """Write mosquitto.conf, tidegate.acl and, with passwords, tidegate.passwd.

    Run it again to add devices: passwords that were given stay, and new ones are shown once, here.

    Mosquitto, started by root, reads its files as the user `mosquitto`: root's files are given to that user (--owner
    names another, which mosquitto.conf then names too).

    \b
    Examples:
      tidegate broker config --for mosquitto --gateway main --pki pki
      tidegate broker config --for mosquitto --gateway main --users passwords --device edge-1 --device edge-2 --pki pki
      tidegate broker config --for mosquitto --gateway main --dir out --installed-at /etc/mosquitto/tidegate
    """
    reader = owner or (FileOwner.known(MOSQUITTOS_USER) if installed_at is None else None)
    try:
        plan = MosquittoPlan(fleet, gateways or ("main",), (installed_at or folder).resolve(), users)
        plan = replace(plan, port=port or (1883 if no_tls else 8883), encrypted=not no_tls)
        plan = replace(plan, run_as=reader.user if reader else None, pools=pools, neighbours=neighbours)
        named = [*map(gateway_user, plan.gateways), *map(pool_user, pools)]
        names = [*named, *(checked_name(one, "the device's name") for one in devices)]
        given = write(plan, folder, names if users == "passwords" else (), renewed=renewed, owner=reader)
        if pki_folder is not None:
            copy_certificate(PkiStore(pki_folder), folder, owner=reader)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"{error.filename}: {error.strerror}") from error
    written = [path for name in FILES if (path := folder / name).exists()]
    click.echo(f"wrote {', '.join(map(str, written))}, for the fleet {fleet}")
    for user, password in given.items():
        scheme = "mqtt" if no_tls else "mqtts"
        click.echo(f"mqtt: {scheme}://{quote(user)}:{quote(password)}@{host}:{plan.port}   # shown this once")
    if installed_at is None:
        check_readable(owner, written)
        _say_how_to_start(plan, reader, written)
    else:
        _say_how_to_install(plan.folder, written, reader.user if reader else MOSQUITTOS_USER)


def _say_how_to_start(plan: MosquittoPlan, reader: FileOwner | None, written: list[Path]) -> None:
    if reader is not None and (why := reader.why_closed(written)):
        click.echo(f"Mosquitto would not start from there, since it becomes the user {reader}: {why}", err=True)
        return
    if plan.encrypted and (missing := [name for name in TLS_FILES if not Path(plan.folder, name).exists()]):
        click.echo(f"still missing in {plan.folder}: {', '.join(missing)}; --pki FOLDER copies them there")
    whose = f", as root; the files are the user {reader}'s, which it becomes" if reader else ""
    if reader is None and os.geteuid() == 0:
        whose = f", once there is a user {MOSQUITTOS_USER}: install Mosquitto, and run this again, or say --owner"
    elif reader is None:
        whose = f", as {pwd.getpwuid(os.geteuid()).pw_name}: the files are that user's"
    click.echo(f"start it with: mosquitto -c {shlex.quote(str(plan.folder / CONF))}{whose}")
    if plan.data_dir is not None and not Path(plan.data_dir).is_dir():
        click.echo(f"retained messages are kept in {plan.data_dir}, which is missing: make it, writable for that user")


def _say_how_to_install(folder: PurePath, written: list[Path], user: str) -> None:
    where = shlex.quote(str(folder))
    files = " ".join(shlex.quote(str(one)) for one in written)
    click.echo("on the broker's machine, as root:")
    click.echo(f"  install -d -m 755 {where} && install -o {user} -g {user} -m 600 {files} {where}/")
    click.echo(f"  mosquitto -c {shlex.quote(str(folder / CONF))}")


def write(
    plan: MosquittoPlan,
    folder: Path,
    names: list[str] | tuple[str, ...],
    *,
    renewed: tuple[str, ...] = (),
    owner: FileOwner | None = None,
) -> Mapping[str, str]:
    """Write the files; the passwords that were made, by user.

    Args:
        names: the users that have a password, or get one; none without passwords.
        renewed: the users that get a new one.
        owner: the user as whom Mosquitto reads the files; None: who runs this.

    Raises:
        ValueError: a name to renew has no password.
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    passwd = folder / PASSWD
    existing = passwd.read_text() if passwd.exists() else ""
    known = set(users_in(existing))
    if unknown := set(renewed) - known:
        raise ValueError(f"--new-password {min(unknown)}: there is no such user; known: {', '.join(sorted(known))}")
    given = {name: new_password() for name in dict.fromkeys((*names, *renewed)) if name not in known or name in renewed}
    ids = owner.ids if owner else None
    if names or renewed:
        write_atomically(passwd, passwd_text(existing, given).encode(), mode=0o600, owner=ids)
    write_atomically(folder / ACL, acl_text(plan).encode(), mode=0o600, owner=ids)
    write_atomically(folder / CONF, conf_text(plan).encode(), mode=0o644, owner=ids)
    return given


def copy_certificate(store: PkiStore, folder: Path, *, owner: FileOwner | None = None) -> None:
    """Copy what the broker needs from the CA's folder, under the names in its configuration.

    Args:
        owner: as of `write`.

    Raises:
        ValueError: no certificate was issued for a broker.
    """
    broker = CertificateIdentity("broker", "main")
    try:
        parts = {"ca.crt": store.ca_cert, "broker.crt": store.cert(broker), "broker.key": store.key(broker)}
        contents = {name: path.read_bytes() for name, path in parts.items()}
    except FileNotFoundError as error:
        raise ValueError(
            f"{error.filename} is missing: `tidegate pki issue {broker} --host BROKERS-HOST` makes it"
        ) from error
    for name, content in contents.items():
        mode = 0o600 if name.endswith(".key") else 0o644
        write_atomically(folder / name, content, mode=mode, owner=owner.ids if owner else None)
