"""`follow` watches a rollout until it is over: live on a terminal, a line per change elsewhere.

Watching does not influence the rollout. A gateway that is restarted meanwhile is waited for, since it goes on with the
rollout.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from typing import Any, Final

import click
from rich.console import Console
from rich.live import Live

from tidegate import clock
from tidegate.admin_client import Admin, AdminError
from tidegate.tools.delivery.screen import rollout_view

LOOK_S: Final = 0.5
GONE_S: Final = 60.0  # how long a gateway may be away
OVER: Final = ("succeeded", "returned", "paused")


def follow(
    gateway: Admin, one: dict[str, Any], *, as_json: bool, detach: bool = False, good: str = "succeeded"
) -> None:
    """Show how it goes on until it is over; exit code 1 where it did not end well, 130 where the watcher left."""
    if not detach:
        try:
            one = _watched(gateway, one, as_json)
        except KeyboardInterrupt:
            click.echo(
                f"\nthe rollout goes on without you: `tidegate model status {one['id']} --watch` comes back to it, "
                f"`tidegate model abort {one['id']}` calls it back",
                err=True,
            )
            sys.exit(130)
    show(one, as_json)
    if not detach and one["phase"] != good:
        sys.exit(1)


def say_nothing_to_do(words: str, nothing: dict[str, Any], given: dict[str, Any], *, as_json: bool) -> None:
    """Say that all devices have what is wanted, so that nothing begins: which is no failure.

    Args:
        nothing: what there is to say as JSON.
        given: the command's options.

    Raises:
        ClickException: keys were to be changed on the way, and reach no device.
    """
    if given["roots"] or given.get("rotate"):
        raise click.ClickException(f"{words}, and keys change with what is new for a device only")
    if as_json:
        click.echo(json.dumps(nothing))
    else:
        click.echo(f"{words}: there is nothing to do{', and no order is written' if given['out'] else ''}")


def show(one: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(one))
    else:
        console().print(rollout_view(one))


def shipping(gateway: Admin) -> dict[str, Any]:
    """What orders are made from: devices, and where they fetch. Raises ClickException: this gateway ships nothing."""
    try:
        found: dict[str, Any] = gateway.read("/v1/devices")
        return found
    except AdminError as error:
        if error.status != 404:
            raise
        raise click.ClickException(
            f"the gateway at {gateway.address} ships no models: its configuration has no section `artifacts` "
            "(docs/rollout.md; to try it out: `tidegate up --ship operator.pub`)"
        ) from error


def newest(gateway: Admin, name: str) -> str:
    """The id of the rollout that is meant by its own name, a model's, or that of a group whose settings it changes."""
    shipping(gateway)
    every = gateway.read("/v1/rollouts")["rollouts"]
    found = [one["id"] for one in every if name in (one["id"], one["model"])] or [
        one["id"] for one in settings_rollouts(every, name)
    ]
    if not found:
        raise click.ClickException(
            f"there is no rollout of {name!r}; `tidegate model status` lists those of models, "
            "`tidegate fleet configuration` those of settings"
        )
    return str(found[-1])


def settings_slug(group: str) -> str:
    """What the ids of a group's rollouts of settings begin with; a number comes behind it."""
    return re.sub(r"[^a-z0-9]+", "-", f"configuration-{group}".lower()).strip("-")[:40]


def settings_rollouts(every: Iterable[dict[str, Any]], group: str | None = None) -> list[dict[str, Any]]:
    """The rollouts of settings, oldest first; of a group, those that were begun for it by name."""
    return [
        one
        for one in every
        if one.get("kind") == "configuration"
        and (group is None or one["id"].rpartition("-")[0] == settings_slug(group))
    ]


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 160)


def _watched(gateway: Admin, one: dict[str, Any], as_json: bool) -> dict[str, Any]:
    if as_json or not sys.stdout.isatty():
        shown = ""
        while one["phase"] not in OVER:
            if not as_json and (line := _line(one)) != shown:
                shown = line
                click.echo(line)
            one = _later(gateway, one)
        return one
    with Live(rollout_view(one), refresh_per_second=8, transient=True, console=console()) as live:
        while one["phase"] not in OVER:
            one = _later(gateway, one)
            live.update(rollout_view(one))
    return one


def _later(gateway: Admin, one: dict[str, Any]) -> dict[str, Any]:
    """The same a moment later. Raises AdminError when the gateway stays away, or has forgotten it."""
    give_up_at = clock.now() + GONE_S
    while True:
        clock.block_until(clock.now() + LOOK_S)
        try:
            found: dict[str, Any] = gateway.read(f"/v1/rollouts/{one['id']}")
            return found
        except AdminError as error:
            if error.status or clock.now() > give_up_at:
                raise


def _line(one: dict[str, Any]) -> str:
    counts = ", ".join(f"{count} {step}" for step, count in one["counts"].items() if count)
    why = f", {one['reason']}" if one["reason"] else ""
    return f"{one['model']} {one['version']}: {one['phase']}{why}; wave {one['wave']} of {len(one['sizes'])}: {counts}"
