"""`tidegate pki`: a private CA and certificates for a small fleet."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.console import Console
from rich.table import Column, Table

from tidegate import clock
from tidegate.fleet.topics import DEFAULT_FLEET, Topics
from tidegate.mqtt.broker_url import BrokerUrl
from tidegate.runtime.owner_option import check_readable, owner_option
from tidegate.runtime.suggestion import SuggestingGroup
from tidegate.security.authority import IssuedCertificate, PkiError
from tidegate.security.certificate_identity import CertificateIdentity
from tidegate.security.certificate_store import CA_DAYS, CERT_DAYS, PkiStore
from tidegate.security.device_bundle import DEFAULTS, BundleError, settings_in
from tidegate.storage.file_owner import FileOwner
from tidegate.tools.device_bundles import FleetSettings, issue_bundles, read_names

_COLOURS = {"valid": "green", "due": "yellow", "expired": "red"}

_folder = click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("pki"),
    show_default=True,
    envvar="TIDEGATE_PKI_DIR",
    help="Folder with the CA and what it has issued.",
)


@click.group(cls=SuggestingGroup)
def pki() -> None:
    """Make a private CA and certificates for a small fleet.

    \b
    Examples:
      tidegate pki init
      tidegate pki issue gateway/main --host gateway.local --host 10.0.0.2
      tidegate pki issue edge/edge-1 --host 10.0.0.7
      tidegate pki show
      tidegate pki renew            from cron, daily: renews what has less than a third of its validity left
    """


@pki.command()
@_folder
@click.option("--name", default="Tidegate fleet CA", show_default=True, help="The CA's name, for people.")
@click.option(
    "--days", type=click.IntRange(1, 36500), default=CA_DAYS, show_default=True, help="Days until the CA expires."
)
@click.option(
    "--permit",
    multiple=True,
    metavar="DOMAIN",
    help="Domain that it may name beside private ones; repeatable.",
)
def init(folder: Path, name: str, days: int, permit: tuple[str, ...]) -> None:
    """Make the CA: ca.crt, which everyone needs, and ca.key, which stays here (mode 0600).

    The only host names in its reach are private ones (localhost, *.local, *.internal, …) and what --permit adds. So
    a thief of its key can impersonate this fleet, but no public site.

    \b
    Examples:
      tidegate pki init
      tidegate pki init --dir /etc/tidegate/pki --permit example.com
    """
    store = PkiStore(folder)
    try:
        store.init(name, days=days, now=_now(), permit=permit)
    except PkiError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"made {store.ca_cert} (give it to every machine) and {store.ca_key} (keep it here, and a copy offline)")


@pki.command()
@click.argument("identity", metavar="[ROLE/NAME]", required=False)
@_folder
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME|ADDRESS",
    help="Host name or address where others reach it; repeatable.",
)
@click.option(
    "--days",
    type=click.IntRange(1, 3650),
    default=CERT_DAYS,
    show_default=True,
    help="Days until it expires; fewer limit the use of a stolen key.",
)
@owner_option("who runs this, for a renewal whose the older files are")
@click.option(
    "--from",
    "names_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File with the names of devices, a line each: write a bundle for each of them.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("bundles"),
    show_default=True,
    help="With --from: folder for the bundles, NAME.tar.",
)
@click.option("--broker", metavar="URL", help="With --from: the fleet's broker, mqtts://HOST.")
@click.option("--fleet", default=DEFAULT_FLEET, show_default=True, help="With --from: the fleet of these devices.")
@click.option(
    "--config",
    "common",
    type=click.Path(path_type=Path, dir_okay=False),
    help="With --from: YAML with further keys for every device, such as deploy/config/device.yaml.",
)
@click.option("--renew", is_flag=True, help="With --from: issue all anew; else devices that have a bundle keep it.")
def issue(
    identity: str | None,
    folder: Path,
    hosts: tuple[str, ...],
    days: int,
    owner: FileOwner | None,
    names_file: Path | None,
    out: Path,
    broker: str | None,
    fleet: str,
    common: Path | None,
    renew: bool,
) -> None:
    """Issue a certificate with a new key for a gateway, edge, pool, broker or client.

    With --from, for every device of a list, each in a bundle that `tidegate edge join` installs on the device.

    The role and the name are what other parts check; for an edge, NAME is its `name` in its configuration. Hosts are
    for callers that check addresses: those of the broker and of the gateway.

    \b
    Examples:
      tidegate pki issue edge/edge-1
      tidegate pki issue broker/main --host broker.local --host 10.0.0.3
      tidegate pki issue client/reports --days 30
      tidegate pki issue --from names.txt --out bundles --broker mqtts://broker.internal
      sudo tidegate pki issue pool/cloud --dir /etc/tidegate/pki --owner tidegate
    """
    store = PkiStore(folder)
    if names_file is not None:
        if identity is not None or hosts or owner is not None or broker is None:
            raise click.UsageError("--from FILE takes --broker URL, and neither ROLE/NAME nor --host nor --owner")
        _issue_bundles(store, names_file, out, _settings(broker, fleet, common), days=days, renew=renew)
        return
    if identity is None:
        raise click.UsageError("say ROLE/NAME, such as edge/edge-1, or --from FILE for many devices")
    try:
        subject = CertificateIdentity.parse(identity)
        issued = store.issue(subject, hosts, days=days, now=_now(), owner=owner)
    except (PkiError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    files = store.cert(subject), store.key(subject)
    click.echo(f"{subject}: {files[0]} and {files[1]}, until {issued.ends:%Y-%m-%d}")
    check_readable(owner, [store.ca_cert, *files])


def _settings(broker: str, fleet: str, common: Path | None) -> FleetSettings:
    """Raises ClickException for what no device could start with."""
    try:
        if not BrokerUrl.parse(broker).secure:
            raise ValueError(
                f"--broker {broker.rpartition('@')[2]}: devices with certificates need an mqtts:// address"
            )
        Topics(fleet)
        keys = DEFAULTS if common is None else {**DEFAULTS, **settings_in(common.read_bytes())}
        if "advertise" in keys:
            raise ValueError(f"key 'advertise' in {common}: it is each device's own; leave it out, and they dial out")
    except (ValueError, BundleError) as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"{error.filename}: {error.strerror}") from error
    return FleetSettings(fleet, broker, keys)


def _issue_bundles(
    store: PkiStore, names_file: Path, out: Path, settings: FleetSettings, *, days: int, renew: bool
) -> None:
    written = 0
    try:
        names = read_names(names_file)
        for name, issued in issue_bundles(store, names, out, settings, days=days, now=_now(), renew=renew):
            if issued is not None:
                written += 1
                click.echo(f"edge/{name}: {out / name}.tar, until {issued.ends:%Y-%m-%d}")
    except PkiError as error:
        raise click.ClickException(str(error)) from error
    click.echo(
        f"{written} written, {len(names) - written} were there already; on each device: tidegate edge join NAME.tar"
    )


@pki.command()
@click.argument("identities", metavar="[ROLE/NAME]...", nargs=-1)
@_folder
@click.option("--force", is_flag=True, help="Also those that are not due yet.")
def renew(identities: tuple[str, ...], folder: Path, force: bool) -> None:
    """Renew the certificates with less than a third of their validity left: all, or the named ones.

    Each gets a new key and the hosts, days and owner that it had. Running processes take the new files by themselves,
    where they lie or where you copy them; nothing need be restarted.

    \b
    Examples:
      tidegate pki renew
      tidegate pki renew edge/edge-1 --force
    """
    store, now = PkiStore(folder), _now()
    try:
        wanted = {CertificateIdentity.parse(one) for one in identities}
        store.authority()
        all_held = store.held()
        known = [held.issued for held in all_held if held.issued is not None]
        unusable = [f"{held.path}: {held.problem}" for held in all_held if held.issued is None]
        if missing := wanted - {one.identity for one in known}:
            names = ", ".join(sorted(map(str, missing)))
            raise PkiError(f"{folder} holds no certificate of {names}; `tidegate pki issue` makes one")
        due = [one for one in known if force or one.state(now) != "valid"]
        for one in due:
            if not wanted or one.identity in wanted:
                click.echo(f"renewed {one.identity}, until {store.renew(one, now=now).ends:%Y-%m-%d}")
    except (PkiError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if not any(not wanted or one.identity in wanted for one in due):
        click.echo("nothing is due")
    if unusable and not wanted:
        raise click.ClickException("; ".join(unusable) + ": `tidegate pki issue` makes them anew")


@pki.command()
@_folder
@click.option("--json", "as_json", is_flag=True, help="As JSON, one list.")
def show(folder: Path, as_json: bool) -> None:
    """Show the CA and every certificate: its identity, its hosts, when it ends, and when it is due for renewal.

    \b
    Examples:
      tidegate pki show
      tidegate pki show --json | jq '.certificates[] | select(.state != "valid")'
    """
    store, now = PkiStore(folder), _now()
    try:
        authority = store.authority()
    except PkiError as error:
        raise click.ClickException(str(error)) from error
    held = store.held()
    if as_json:
        certificates = [_fields(one.issued, now) for one in held if one.issued is not None]
        ca = {"name": authority.cert.subject.rfc4514_string(), "ends": authority.cert.not_valid_after_utc.isoformat()}
        click.echo(json.dumps({"ca": ca, "certificates": certificates}))
        return
    console = Console()
    console.print(f"{authority.cert.subject.rfc4514_string()}, until {authority.cert.not_valid_after_utc:%Y-%m-%d}")
    table = Table(Column("identity", no_wrap=True), "hosts", "state", "until", "renew from")
    for one in held:
        if one.issued is None:
            table.add_row(f"{one.path.parent.name}/{one.path.name}", one.problem, "[red]unusable[/]", "", "")
        else:
            table.add_row(*_row(one.issued, now))
    console.print(table)


def _row(one: IssuedCertificate, now: datetime) -> tuple[str, ...]:
    state = one.state(now)
    colour = _COLOURS[state]
    return str(one.identity), ", ".join(one.hosts), f"[{colour}]{state}[/]", f"{one.ends:%Y-%m-%d}", _day(one.renew_at)


def _fields(one: IssuedCertificate, now: datetime) -> dict[str, object]:
    return {
        "identity": str(one.identity),
        "hosts": one.hosts,
        "state": one.state(now),
        "ends": one.ends.isoformat(),
        "renew_from": one.renew_at.isoformat(),
        "serial": f"{one.serial:x}",
    }


def _day(instant: datetime) -> str:
    return f"{instant:%Y-%m-%d}"


def _now() -> datetime:
    return datetime.fromtimestamp(clock.utc_s(), UTC)
