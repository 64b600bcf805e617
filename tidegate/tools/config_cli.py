"""`tidegate config` prints the schema of a configuration, checks a file, and writes an example.

The configuration models are entry points of the group `tidegate.configs`, so a process that is not installed has none
here and this file knows no process by name. The example is written from the model itself: each field's own sentence as
its comment, its default as its value, commented out, so that the file says what differs from the defaults and nothing
else.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

import click
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from tidegate.config import ConfigError, ProcessConfig, load, variables_of_no_key
from tidegate.runtime.suggestion import SuggestingGroup, did_you_mean
from tidegate.tools.config_findings import missing_here, said_wrongly, taken_ports

GROUP: Final = "tidegate.configs"
COMMENT_WIDTH: Final = 100


def roles() -> list[str]:
    return sorted(point.name for point in entry_points(group=GROUP))


@cache  # finding it reads the metadata of every installed package, and an operator asks for each resource it judges
def config_model(role: str) -> type[ProcessConfig]:
    """The configuration model of one process.

    Raises:
        ClickException: the role is unknown, or what its model imports is not installed.
    """
    point = next(iter(entry_points(group=GROUP, name=role)), None)
    if point is None:
        known = f"there are: {', '.join(roles())}.{did_you_mean(role, roles())}"
        raise click.ClickException(f"no process is called {role!r}; {known}")
    try:
        model = point.load()
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"the configuration of {role!r} needs {error.name}, which is not installed"
        ) from error
    if not (isinstance(model, type) and issubclass(model, ProcessConfig)):
        raise TypeError(f"the entry point {point.value} is not a ProcessConfig")
    return model


@click.group(cls=SuggestingGroup)
def config() -> None:
    """Print, check and begin configuration files."""


@config.command()
@click.argument("role")
def schema(role: str) -> None:
    """Print the JSON schema of a process's configuration (gateway, edge or pool).

    \b
    Example:  tidegate config schema edge > edge.schema.json
    """
    click.echo(json.dumps(config_model(role).model_json_schema(), indent=2))


@config.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--for", "role", required=True, metavar="ROLE", help="gateway, edge or pool")
@click.option("--elsewhere", is_flag=True, help="Check nothing of this machine: files and ports are another's.")
@click.option("--json", "as_json", is_flag=True, help="Problems and notes as JSON; the exit code is the same.")
def check(file: Path, role: str, elsewhere: bool, as_json: bool) -> None:
    """Check a configuration file, and whether it could start here: its files can be read, its ports are free.

    The environment counts too, as it does when the process starts. Run it as the user that the service runs as.

    \b
    Examples:
      tidegate config check /etc/tidegate/device.yaml --for edge
      tidegate config check deploy/config/device.yaml --for edge --elsewhere
      tidegate config check site.yaml --for gateway --json | jq .problems
    """
    try:
        problems, notes = _findings(load(config_model(role), file), role, elsewhere=elsewhere)
    except ConfigError as error:
        if not as_json:
            raise
        problems, notes = [str(error)], []
    if as_json:
        click.echo(json.dumps({"file": str(file), "role": role, "problems": problems, "notes": notes}))
        sys.exit(1 if problems else 0)
    if problems:
        raise click.ClickException("\n".join(f"{file}: {one}" for one in problems))
    for one in notes:
        click.echo(f"{file}: note: {one}", err=True)
    click.echo(f"{file}: a valid {role} configuration")


def _findings(config: ProcessConfig, role: str, *, elsewhere: bool) -> tuple[list[str], list[str]]:
    """What keeps it from starting, and what it may stumble over."""
    unread = variables_of_no_key(config_model(role))
    if elsewhere:
        return said_wrongly(config), unread
    return [*said_wrongly(config), *missing_here(config, role)], [*unread, *taken_ports(config)]


@config.command()
@click.argument("role")
def example(role: str) -> None:
    """Print a configuration file with every key, its meaning and its default.

    \b
    Example:  tidegate config example gateway > gateway.yaml
    """
    click.echo(example_yaml(role, config_model(role)), nl=False)


def example_yaml(role: str, model: type[ProcessConfig]) -> str:
    """A YAML file that lists every key and changes nothing: defaults are commented out, required keys are not."""
    prefix = str(model.model_config.get("env_prefix") or "").upper()
    lines = [f"# Configuration of `tidegate {role}`. What stands here commented out is the default."]
    lines += [f"# Each key can also come from the environment: {prefix}NAME for `name`, and so on.", ""]
    for key, field in model.model_fields.items():
        lines += [*_field_lines(key, field), ""]
    return "\n".join(lines)


def _field_lines(key: str, field: FieldInfo) -> Iterator[str]:
    for line in textwrap.wrap(field.description or "", COMMENT_WIDTH):
        yield f"# {line}"
    if field.is_required():
        yield f"{key}:  # required"
        return
    default = field.get_default(call_default_factory=True)
    if isinstance(default, BaseModel):
        yield f"#{key}:"
        yield from (f"#  {line}" for line in _section_lines(default))
    else:
        yield from (f"#{line}" for line in _yaml({key: default}))


def _section_lines(section: BaseModel) -> Iterator[str]:
    """A section's keys, which are commented out as a whole: their words stay comments without the first sign."""
    for key, field in type(section).model_fields.items():
        for line in textwrap.wrap(field.description or "", COMMENT_WIDTH - 2):
            yield f"# {line}"
        yield from _yaml({key: getattr(section, key)})


def _yaml(value: dict[str, Any]) -> list[str]:
    return yaml.safe_dump(to_jsonable_python(value), sort_keys=False, allow_unicode=True).splitlines()
