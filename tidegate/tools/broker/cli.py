"""`tidegate broker config` writes a broker's files, so that each device publishes as itself only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import click

from tidegate.fleet.topics import checked_name
from tidegate.security.certificate_identity import CertificateIdentity
from tidegate.security.certificate_store import PkiStore
from tidegate.storage.atomic_file import write_atomically
from tidegate.tools.broker.mosquitto_config import (
    MosquittoPlan,
    Users,
    acl_text,
    conf_text,
    gateway_user,
    new_password,
    passwd_text,
    users_in,
)

CONF, ACL, PASSWD = "mosquitto.conf", "tidegate.acl", "tidegate.passwd"


@click.group()
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
@click.option("--fleet", default="demo", show_default=True, help="The fleet, as its agents and gateways call it.")
@click.option("--gateway", "gateways", multiple=True, metavar="NAME", help="A gateway's name; repeatable.")
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
@click.option("--host", default="localhost", show_default=True, help="The broker's host, for the addresses shown.")
@click.option(
    "--pki",
    "pki_folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    envvar="TIDEGATE_PKI_DIR",
    help="Copy ca.crt and the certificate of broker/main from this folder of `tidegate pki`.",
)
def config(
    kind: str,
    folder: Path,
    installed_at: Path | None,
    fleet: str,
    gateways: tuple[str, ...],
    devices: tuple[str, ...],
    users: Users,
    renewed: tuple[str, ...],
    no_tls: bool,
    port: int | None,
    host: str,
    pki_folder: Path | None,
) -> None:
    """Write mosquitto.conf, tidegate.acl and, with passwords, tidegate.passwd.

    Run it again to add devices: passwords that were given stay, and new ones are shown once, here.

    \b
    Examples:
      tidegate broker config --for mosquitto --gateway main --pki pki
      tidegate broker config --for mosquitto --gateway main --users passwords --device edge-1 --device edge-2 --pki pki
      tidegate broker config --for mosquitto --gateway main --dir out --installed-at /etc/mosquitto/tidegate
    """
    try:
        plan = MosquittoPlan(fleet, gateways or ("main",), (installed_at or folder).resolve(), users)
        plan = replace(plan, port=port or (1883 if no_tls else 8883), encrypted=not no_tls)
        names = [*map(gateway_user, plan.gateways), *(checked_name(one, "the device's name") for one in devices)]
        given = write(plan, folder, names if users == "passwords" else (), renewed=renewed)
        if pki_folder is not None:
            copy_certificate(PkiStore(pki_folder), folder)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"{error.filename}: {error.strerror}") from error
    click.echo(f"wrote {folder / CONF} and {folder / ACL}; start it with: mosquitto -c {plan.folder / CONF}")
    for user, password in given.items():
        scheme = "mqtt" if no_tls else "mqtts"
        click.echo(f"mqtt: {scheme}://{quote(user)}:{quote(password)}@{host}:{plan.port}   # shown this once")


def write(
    plan: MosquittoPlan, folder: Path, names: list[str] | tuple[str, ...], *, renewed: tuple[str, ...] = ()
) -> Mapping[str, str]:
    """Write the files; the passwords that were made, by user.

    Args:
        names: the users that have a password, or get one; none without passwords.
        renewed: the users that get a new one.

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
    if names or renewed:
        write_atomically(passwd, passwd_text(existing, given).encode(), mode=0o600)
    write_atomically(folder / ACL, acl_text(plan).encode(), mode=0o600)
    write_atomically(folder / CONF, conf_text(plan).encode(), mode=0o644)
    return given


def copy_certificate(store: PkiStore, folder: Path) -> None:
    """Copy what the broker needs from the CA's folder, under the names in its configuration.

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
        write_atomically(folder / name, content, mode=0o600 if name.endswith(".key") else 0o644)
