"""`tidegate edge join` makes this machine the device that a bundle names."""

from __future__ import annotations

import os
import shlex
import stat
from datetime import UTC, datetime
from pathlib import Path

import click

from edge_agent.commands.join import join_fleet
from tidegate import clock
from tidegate.config import ConfigError
from tidegate.runtime.owner_option import owner_option
from tidegate.security.device_bundle import CONFIG, HOME, BundleError
from tidegate.storage.file_owner import FileOwner

SERVICE_USER = "tidegate"  # of deploy/systemd


@click.command(
    epilog="""\b
Examples:
  sudo tidegate edge join kiosk-7.tar
  tidegate edge join kiosk-7.tar --dir ~/kiosk-7
"""
)
@click.argument("bundle", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--dir",
    "home",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help=f"Where to install it; models and state lie there too. Default for root: {HOME}.",
)
@owner_option("for root, `tidegate`; else who runs this")
@click.option(
    "--replace", is_flag=True, help="Make this device another one than it is, with the bundle's configuration."
)
def join(bundle: Path, home: Path | None, owner: FileOwner | None, replace: bool) -> None:
    """Install a bundle of `tidegate pki issue --from`: certificate, key, CA and configuration.

    Checks that the certificate and its key fit, that the CA signed it, that it names this device and is valid now, and
    that the agent's user can read it all. Whatever fails, what was installed before stays as it was.
    """
    if home is None and os.geteuid() != 0:
        raise click.UsageError(f"only root may write to {HOME}: run it with sudo, or say --dir")
    home = home or HOME
    if owner is None and os.geteuid() == 0:
        try:
            owner = FileOwner.parse(SERVICE_USER)
        except ValueError as error:
            raise click.ClickException(f"{error}; --owner root if the agent shall run as root") from error
    try:
        now = datetime.fromtimestamp(clock.utc_s(), UTC)
        joined = join_fleet(bundle, home, now=now, owner=owner, replace_other=replace)
    except (BundleError, ConfigError, ValueError) as error:
        raise click.ClickException(f"{bundle}: {error}") from error
    except OSError as error:
        raise click.ClickException(f"{error.filename}: {error.strerror}") from error
    config = home / CONFIG
    who = f"{joined.config.name} of the fleet {joined.config.fleet}"
    click.echo(f"joined: {who}, in {home}, until {joined.ends:%Y-%m-%d}")
    if joined.aside is not None:
        click.echo(f"the configuration that was there is {joined.aside}")
    if joined.kept:
        keys = ", ".join(joined.kept)
        click.echo(f"kept {config}, which differs from the bundle's in {keys}; --replace takes the bundle's")
    if bundle.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        click.echo(f"others could read the key in {bundle}: issue it again with --renew if strangers use this machine")
    click.echo(f"remove {bundle}, which holds the key; then: {_next_command(home, config)}")


def _next_command(home: Path, config: Path) -> str:
    if home == HOME:
        return "systemctl enable --now tidegate-edge"
    return f"tidegate edge --config {shlex.quote(str(config))}"
