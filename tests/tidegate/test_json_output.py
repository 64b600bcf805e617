"""Every command that reports something reports it as JSON too; those that do not are listed with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import click
import pytest
from click.testing import CliRunner

from tests.contract.surface.declared import COMMANDS, loaded
from tidegate.cli import cli

SERVES: Final = "runs until it is stopped; its events on stdout are JSON lines"
WRITES: Final = "writes a file whose path it was given, and says so in a line"
ACTS: Final = "does one thing and says so in a line; its exit code tells the rest"
LINE: Final = "prints the very line that another file takes in"
# A command that is not here has --json, and one that has it is not here.
WITHOUT_JSON: Final = {
    "attest init": LINE,
    "attest show": LINE,
    "broker config": WRITES,
    "config example": "prints a configuration file, YAML",
    "config schema": "prints a JSON schema as it is",
    "edge": SERVES,
    "edge join": WRITES,
    "edge store drop": ACTS,
    "edge store retry": ACTS,
    "edge store show": "prints JSON as it is",
    "gateway": SERVES,
    "keys revoke": ACTS,
    "keys signing create": WRITES,
    "keys signing draft": WRITES,
    "keys signing merge": WRITES,
    "keys signing rotate": WRITES,
    "keys signing show": LINE,
    "keys signing sign": WRITES,
    "model add": WRITES,
    "model build": WRITES,
    "model golden": WRITES,
    "model load": ACTS,
    "model measure": "prints a cost table for `tidegate simulate`, YAML",
    "model paced": WRITES,
    "model pack": WRITES,
    "model quantize": WRITES,
    "model trust": WRITES,
    "model unload": ACTS,
    "operator crds": "prints custom resource definitions, YAML",
    "operator render": "prints objects of Kubernetes, YAML",
    "operator run": SERVES,
    "pki init": WRITES,
    "pki issue": WRITES,
    "pki renew": WRITES,
    "pool": SERVES,
    "ray-scale": SERVES,
    "record": WRITES,
    "release sign": WRITES,
}


def every_command() -> dict[str, click.Command]:
    """Commands by their words, without the groups that only hold others."""
    found: dict[str, click.Command] = {}

    def walk(words: str, command: click.Command) -> None:
        if command.hidden:
            return
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                child = command.get_command(context, name)
                assert child is not None
                walk(f"{words} {name}", child)
        if not isinstance(command, click.Group) or command.invoke_without_command:
            found[words] = command

    for name, command in loaded(COMMANDS).items():
        walk(name, command)
    return found


def has_json(command: click.Command) -> bool:
    return any("--json" in one.opts for one in command.params)


def test_every_command_has_json_or_a_reason_against_it() -> None:
    without = {words for words, command in every_command().items() if not has_json(command)}
    assert without == set(WITHOUT_JSON)


def test_json_is_a_plain_flag_everywhere_and_says_what_it_does() -> None:
    for words, command in every_command().items():
        for one in command.params:
            if isinstance(one, click.Option) and "--json" in one.opts:
                assert one.is_flag, words
                assert one.help, words


@pytest.mark.slow
def test_exit_codes_are_listed_where_one_looks_for_them() -> None:
    told = CliRunner().invoke(cli, ["--help"]).output
    assert "Exit codes: 0 done; 1 it could not be done" in told
    assert CliRunner().invoke(cli, ["status", "--no-such-option"]).exit_code == 2


def test_keys_are_made_and_renewed_as_json(tmp_path: Path) -> None:
    file = str(tmp_path / "keys.json")
    made = CliRunner().invoke(cli, ["keys", "create", "--file", file, "--tenant", "clinic", "--json"])
    assert made.exit_code == 0, made.output
    first = json.loads(made.stdout)
    assert (first["tenant"], first["standing"]) == ("clinic", "valid")
    renewed = CliRunner().invoke(cli, ["keys", "rotate", "--file", file, first["id"], "--json"])
    second = json.loads(renewed.stdout)
    assert second["id"] == first["id"]
    assert second["key"] != first["key"]
    assert second["rotating_until"] is not None
    plain = CliRunner().invoke(cli, ["keys", "create", "--file", file, "--tenant", "clinic"])
    assert plain.stdout.strip().startswith(first["key"][:3])
    assert "{" not in plain.stdout
