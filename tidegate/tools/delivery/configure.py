"""`tidegate fleet configure` and `configuration` change settings of running devices, and show how they are.

They talk to a gateway's admin port. A change is a rollout: it belongs to the gateway once it has begun, and `pause`,
`resume`, `abort` and `rollback` steer it by its id, as they steer a model's.
"""

from __future__ import annotations

import json
from math import floor
from pathlib import Path
from typing import Any, Final

import click
import msgspec
import yaml

from tidegate import clock
from tidegate.admin_client import Admin, admin_option
from tidegate.rollout.desired import DesiredConfiguration
from tidegate.rollout.device_settings import DEVICE_KEYS, SettingRefused, checked, flattened
from tidegate.rollout.root_chain import read_chain
from tidegate.runtime.duration import Duration, printed_duration
from tidegate.runtime.finite_range import FiniteRange
from tidegate.runtime.plain_text import plain
from tidegate.storage import audit_log
from tidegate.storage.bounded_yaml import TooMuch, compose, construct
from tidegate.tools.delivery.cli import signing_key
from tidegate.tools.delivery.configuration_order import (
    EVERY,
    ChosenDevices,
    ConfigurationTerms,
    chosen_devices,
    make_configuration_order,
)
from tidegate.tools.delivery.configuration_rows import configuration_row, configuration_table, rest_in_words
from tidegate.tools.delivery.follow import (
    console,
    follow,
    say_nothing_to_do,
    settings_rollouts,
    settings_slug,
    shipping,
)
from tidegate.tools.delivery.order import ListedDevice, OrderError, OrderSigning
from tidegate.tools.delivery.order_file import out_option, write_order
from tidegate.tools.delivery.screen import rollouts_table
from tidegate.tools.delivery.shares import WaveSharesParam

MAX_FILE_BYTES: Final = 64 * 1024
_LEFT_OUT_NAMED: Final = 5
_MOST_ROLLOUTS: Final = 20
_APPLIES: Final = {
    "now": "at once",
    "worker": "with another worker beside the present one",
    "start": "at the agent's next start",
}
_json = click.option("--json", "as_json", is_flag=True, help="For programs.")


@click.command(
    epilog="""\b
Examples:
  tidegate fleet configure kiosks device.yaml --dry-run
  tidegate fleet configure kiosks device.yaml --key operator.key
  tidegate fleet configure all device.yaml --key operator.key --waves 5%,50%,100% --watch 5m --local-changes undo
"""
)
@click.argument("group")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--key", "keys", multiple=True, type=click.Path(path_type=Path, dir_okay=False),
              help="Key that signs (`tidegate keys signing create`); may be repeated.")  # fmt: skip
@click.option("--roots", type=click.Path(path_type=Path, dir_okay=False, exists=True),
              help="Chain of roots that leads devices to these keys.")  # fmt: skip
@click.option("--waves", type=WaveSharesParam(), default="10%,100%", show_default=True,
              help="Share of devices after each wave.")  # fmt: skip
@click.option("--success", type=FiniteRange(0, 1, min_open=True), default=0.95, show_default=True,
              help="Share of a wave's devices that must keep it before the next wave.")  # fmt: skip
@click.option(
    "--max-errors",
    type=click.IntRange(0),
    help="One device more that goes back, and all go back. Default: what --success leaves.",
)
@click.option("--deadline", type=Duration(), default="24h", show_default=True, help="Time for each device.")
@click.option("--bake", type=Duration(), default="0s", show_default=True, help="Pause between waves.")
@click.option("--expires", type=Duration(), default="90d", show_default=True,
              help="Time after which no device accepts the documents any more.")  # fmt: skip
@click.option("--watch", type=Duration(min_s=1, max_s=86_400), default="60s", show_default=True,
              help="Time for which a device must do well before it keeps the settings.")  # fmt: skip
@click.option("--local-changes", type=click.Choice(["show", "undo"]), default="show", show_default=True,
              help="Settings changed on a device by hand stay, or are undone after a minute.")  # fmt: skip
@click.option("--replace", "replace_unsigned", is_flag=True,
              help="Leave out models that documents of foreign keys name.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Check the file and say what would be done; needs no key.")
@click.option("--detach", is_flag=True, help="Begin, and do not watch it.")
@out_option
@admin_option
@_json
def configure(group: str, file: Path, admin: str, as_json: bool, **given: Any) -> None:
    """Change settings of a GROUP of running devices, in waves; a device that does not do well goes back.

    FILE has keys of the agent's configuration, as far as they may change; it replaces what was desired before, and an
    empty one takes all back. GROUP: as devices have it in `rollout.groups`; `all` means every device.
    """
    if given["watch"] >= given["deadline"]:
        raise click.UsageError(
            f"--watch {printed_duration(given['watch'])} is not less than --deadline "
            f"{printed_duration(given['deadline'])}: no device could keep the settings in time"
        )
    configuration = DesiredConfiguration(settings_in(file), given["watch"], given["local_changes"])
    gateway = Admin(admin, within_s=60.0)
    report = shipping(gateway)
    devices = msgspec.convert(report["devices"], list[ListedDevice], strict=False)
    try:
        chosen = chosen_devices(devices, group, configuration)
    except OrderError as error:
        raise click.ClickException(str(error)) from error
    if given["dry_run"]:
        _say_plan(configuration, chosen, given, as_json=as_json)
        return
    if not given["keys"]:
        raise click.UsageError("--key is needed: devices take what their operator's key has signed")
    if chosen.left_out and not as_json:
        click.echo(_left_out(chosen), err=True)
    if not chosen.ask and not chosen.have_it:
        raise click.ClickException(_left_out(chosen))
    if not chosen.ask:
        words = f"all {len(chosen.have_it)} devices have these settings already"
        say_nothing_to_do(words, {"id": None, "group": group}, given, as_json=as_json)
        return
    order = _order(group, configuration, chosen, given)
    if given["out"]:
        write_order(given["out"], order, as_json=as_json)
        return
    begun = gateway.post("/v1/rollouts", order)
    trail = audit_log.beside(given["keys"][0])
    audit_log.note(
        trail, "settings-rollout-started", id=begun["id"], group=group,
        settings=configuration.settings, devices=len(chosen.ask), gateway=gateway.address,
    )  # fmt: skip
    if chosen.have_it and not as_json:
        click.echo(f"{len(chosen.have_it)} devices have them already")
    follow(gateway, begun, as_json=as_json, detach=given["detach"])


@click.command(
    epilog="""\b
Examples:
  tidegate fleet configuration
  tidegate fleet configuration kiosks --all
  tidegate fleet configuration --json | jq '.devices[] | select(.state == "drifted") | .differs'
"""
)
@click.argument("group", default=EVERY)
@click.option("--all", "whole", is_flag=True, help="Every device of a large fleet.")
@admin_option
@_json
def configuration(group: str, whole: bool, admin: str, as_json: bool) -> None:
    """Show desired and reported settings of devices: what is pending, what has drifted, what was refused and why.

    The newest rollouts of settings come first, with the ids that pause, resume, abort and rollback take.
    """
    gateway = Admin(admin)
    every = msgspec.convert(shipping(gateway)["devices"], list[ListedDevice], strict=False)
    groups = {name for one in every if one.reported is not None for name in one.reported.groups}
    if group != EVERY and group not in groups:
        known = ", ".join(sorted(groups)) or "none"
        raise click.ClickException(f"no device is in the group {group!r}; there are: {known}")
    found = [one for one in every if group not in groups or (one.reported and group in one.reported.groups)]
    rows = [configuration_row(one) for one in found]
    every_rollout = gateway.read("/v1/rollouts")["rollouts"]
    rollouts = settings_rollouts(every_rollout, None if group == EVERY else group)[-_MOST_ROLLOUTS:]
    if as_json:
        click.echo(json.dumps({"devices": rows, "rollouts": rollouts}))
        return
    screen = console()
    if rollouts:  # their ids are what `tidegate fleet pause` and the others take
        screen.print(rollouts_table(rollouts))
    screen.print(configuration_table(rows, whole=whole))
    if words := rest_in_words(rows, whole=whole):
        screen.print(plain(words), highlight=False)


def settings_in(file: Path) -> dict[str, Any]:
    """The settings of a file. Raises ClickException: it cannot be read, or no device would take it."""
    try:
        raw = file.read_bytes()[: MAX_FILE_BYTES + 1]
        if len(raw) > MAX_FILE_BYTES:
            raise SettingRefused(f"it has more than {MAX_FILE_BYTES} bytes, which no list of settings needs")
        node = compose(raw.decode())
        return dict(checked(flattened(None if node is None else construct(node))))
    except OSError as error:
        raise click.ClickException(f"cannot read {file}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise click.ClickException(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    except (SettingRefused, TooMuch, ValueError, TypeError) as error:
        raise click.ClickException(f"{file}: {error}") from error


def _order(group: str, configuration: DesiredConfiguration, chosen: ChosenDevices, given: dict[str, Any]) -> bytes:
    issued_s = int(clock.utc_s())
    roots = read_chain(given["roots"]) if given["roots"] else ()
    signing = OrderSigning([signing_key(path) for path in given["keys"]], roots=roots)
    terms = ConfigurationTerms(
        configuration, issued_s, issued_s + max(1, round(given["expires"])), given["replace_unsigned"]
    )
    spec = {"id": f"{settings_slug(group)}-{int(clock.utc_s() * 1e3):x}", **_staging(len(chosen.ask), given)}
    try:
        return make_configuration_order(spec, chosen.ask, terms, signing)
    except OrderError as error:
        raise click.ClickException(str(error)) from error


def _staging(devices: int, given: dict[str, Any]) -> dict[str, Any]:
    errors = given["max_errors"]
    return {
        "waves": given["waves"],
        "success_ratio": given["success"],
        "max_errors": floor((1 - given["success"]) * devices + 1e-9) if errors is None else errors,
        "deadline_s": given["deadline"],
        "bake_s": given["bake"],
    }


def _say_plan(
    configuration: DesiredConfiguration, chosen: ChosenDevices, given: dict[str, Any], *, as_json: bool
) -> None:
    settings = configuration.settings
    if as_json:
        applies = {key: DEVICE_KEYS[key].applies for key in settings}
        ask = [one.name for one in chosen.ask]
        plan = {"settings": settings, "applies": applies, "ask": ask, "have_it": list(chosen.have_it)}
        staging = _staging(len(ask), given)
        click.echo(json.dumps({**plan, "left_out": dict(chosen.left_out), **staging, "watch_s": configuration.watch_s}))
        return
    for key, value in settings.items():
        click.echo(f"{key} = {json.dumps(value)}, {_APPLIES[DEVICE_KEYS[key].applies]}")
    if not settings:
        click.echo("no settings: devices have what their own configuration says")
    away = sum(one.freshness == "dead" for one in chosen.ask)
    later = f", {away} of them when they are back" if away else ""
    click.echo(f"{len(chosen.ask)} devices would be asked{later}, {len(chosen.have_it)} have it already")
    shares = ", ".join(f"{share:.0%}" for share in given["waves"])
    click.echo(f"in waves of {shares}; each keeps it after {printed_duration(configuration.watch_s)} of doing well")
    if chosen.left_out:
        click.echo(_left_out(chosen))


def _left_out(chosen: ChosenDevices) -> str:
    named = [f"{name}: {why}" for name, why in list(chosen.left_out.items())[:_LEFT_OUT_NAMED]]
    more = len(chosen.left_out) - len(named)
    return f"left out: {'; '.join(named)}{f'; and {more} more' if more else ''}"
