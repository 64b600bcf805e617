"""What the product declares: entry points and extras, commands, configuration keys, the OpenAPI document, fixtures.

Entry points are read from `pyproject.toml` and not from what is installed, so that a checkout is held to its own.
"""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Final

import click
import pytest

from gateway.http.openapi import document
from tidegate.cli import EXTRAS, cli

ROOT: Final = Path(__file__).parents[3]
PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
COMMANDS: Final = "tidegate.commands"
CONFIGS: Final = "tidegate.configs"
PLUGINS: Final = "pytest11"

_OF_AN_OPTION: Final = (
    "opts", "secondary_opts", "required", "nargs", "multiple", "default", "envvar", "is_flag", "flag_value", "count",
    "hidden", "prompt",
)  # fmt: skip
_PROSE: Final = frozenset({"title", "description"})


def entry_points() -> dict[str, Any]:
    """Groups with their names, scripts, extras, and which extra each command asks for."""
    return {
        "group": {group: sorted(_names(group)) for group in PROJECT["entry-points"]},
        "script": sorted(PROJECT["scripts"]),
        "extra": sorted(PROJECT["optional-dependencies"]),
        "extra of a command": EXTRAS,
    }


def _names(group: str) -> Iterator[str]:
    for name, value in PROJECT["entry-points"][group].items():
        yield "(its module)" if name == value else name  # a plugin is called as its module is: pytest loads it once


def loaded(group: str) -> dict[str, Any]:
    points = PROJECT["entry-points"][group].items()
    return {name: EntryPoint(name, value, group).load() for name, value in points}


def commands() -> dict[str, Any]:
    """Every command with its arguments and options, by the words that call it."""
    found = dict(_parameters("tidegate", cli))
    for name, command in loaded(COMMANDS).items():
        found |= _commands(f"tidegate {name}", command)
    return found


def _commands(path: str, command: click.Command) -> Iterator[tuple[str, Any]]:
    yield from _parameters(path, command)
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from _commands(f"{path} {name}", child)


def _parameters(path: str, command: click.Command) -> Iterator[tuple[str, Any]]:
    yield path, {"group": isinstance(command, click.Group), "hidden": command.hidden, "alone": _runs_alone(command)}
    context = click.Context(command)
    arguments = [one for one in command.params if isinstance(one, click.Argument)]
    for parameter in command.params:
        told = parameter.to_info_dict()
        facts = {key: told[key] for key in _OF_AN_OPTION if not _absent(told.get(key))}
        facts |= {
            f"type {key}": value for key, value in told["type"].items() if key != "param_type" and value is not False
        }
        facts["metavar"] = parameter.make_metavar(context)
        if isinstance(parameter, click.Argument):
            del facts["opts"]
            yield f"{path} / argument {arguments.index(parameter)}", facts
        else:
            facts["opts"] = sorted(parameter.opts)
            yield f"{path} / {max(parameter.opts, key=len)}", facts


def _absent(value: Any) -> bool:
    """Nothing said; 0 and "" are something."""
    return value is None or value is False or value == []


def _runs_alone(command: click.Command) -> bool:
    return not isinstance(command, click.Group) or command.invoke_without_command


def configurations() -> dict[str, Any]:
    """Every key of the three processes' configuration, with the prefix of its variable in the environment."""
    found = {}
    for role, model in loaded(CONFIGS).items():
        schema = model.model_json_schema()
        settings = model.model_config
        environment = {key: settings.get(key) for key in ("env_prefix", "env_nested_delimiter", "case_sensitive")}
        found[role] = {"environment": environment, "keys": _inlined(schema, schema.get("$defs", {}))}
    return found


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """A JSON schema without prose and without the names of its definitions, which are classes."""
    if isinstance(schema, list):
        return [_inlined(one, definitions) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return _inlined({**definitions[schema["$ref"].rpartition("/")[2]], **rest}, definitions)
    found = {key: _inlined(value, definitions) for key, value in schema.items() if key not in _PROSE | {"$defs"}}
    if "properties" in schema:  # a key may be called `title`
        named = schema["properties"].items()
        found["properties"] = {name: _inlined(value, definitions) for name, value in named}
        found["required"] = sorted(schema.get("required", []))
    return found


def openapi() -> dict[str, Any]:
    """The document without prose and examples; parameters by name instead of place."""
    whole = document()
    del whole["info"]
    return _words_of(whole)


_SAID: Final = frozenset({"description", "summary", "title", "example", "examples", "externalDocs"})


def _words_of(node: Any, *, named: bool = False) -> Any:
    """Args: named: the keys are names that somebody gave, not words of OpenAPI."""
    if isinstance(node, list):
        if node and all(isinstance(one, dict) and "name" in one for one in node):
            return {one["name"]: _words_of(one) for one in node}
        return [_words_of(one) for one in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _words_of(
            value, named=not named and key in ("properties", "headers", "schemas", "responses", "parameters")
        )
        for key, value in node.items()
        if named or key not in _SAID
    }


class _Options:
    """In the place of pytest's parser: notes what a plugin adds."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def getgroup(self, name: str, *_: Any, **__: Any) -> _Options:
        return self

    def addoption(self, *names: str, **facts: Any) -> None:
        facts["type"] = getattr(facts.get("type"), "__name__", None)
        self.found[f"option {' '.join(names)}"] = {key: value for key, value in facts.items() if key != "help"}

    def addini(self, name: str, help: str, **facts: Any) -> None:
        self.found[f"ini {name}"] = facts


def pytest_plugin() -> dict[str, Any]:
    """Fixtures with their scopes, and options."""
    options = _Options()
    fixtures = {}
    for module in PROJECT["entry-points"][PLUGINS].values():
        plugin = importlib.import_module(module)
        plugin.pytest_addoption(options)
        for one in vars(plugin).values():
            if isinstance(one, pytest.FixtureDef | _fixture()) and not one.name.startswith("_"):
                fixtures[f"fixture {one.name}"] = {"scope": one._fixture_function_marker.scope}  # noqa: SLF001  # pytest says a fixture's scope nowhere else
    return {**options.found, **fixtures}


def _fixture() -> type[Any]:
    return type(pytest.fixture(lambda: None))
