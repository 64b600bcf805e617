"""Configuration: one frozen model per process, read from a YAML file and the environment.

Order of precedence: arguments in code, then the environment (`TIDEGATE_EDGE_GRPC_PORT=9001`), then the file, then
the defaults. Unknown keys are errors that name the key and its nearest neighbour. Nothing is read at import.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from tidegate.storage.bounded_yaml import compose, construct

SettingsT = TypeVar("SettingsT", bound="ProcessConfig")
_MOST_VALUES: Final = 1_000_000  # of a file, with each alias counted as what it stands for

# weights by model or modality (tidegate/models/share_weights.py)
Shares = dict[str, Annotated[float, Field(gt=0, le=1000)]]

# How Kubernetes names and spells what it says of a Service called `tidegate-gateway`.
_SERVICE: Final = re.compile(r"_SERVICE_(HOST|PORT)(_\w+)?=|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?=|_PORT=(tcp|udp|sctp)://")

# Keys that several processes have, with one meaning.
REPOSITORY_POLL_S: Any = Field(
    15.0, gt=0, le=86400, description="Seconds from one look at a followed repository to the next."
)
OPERATOR_TOKEN_FILE: Any = Field(
    None,
    description="File for the token that loading and unloading by request needs. Default: admin-PORT.token, with "
    "`grpc_port`, in the first private folder of this account (docs/security.md).",
)


class ConfigError(Exception):
    """A configuration that cannot be used; the message names the file, the key, the value and the way out."""


class Section(BaseModel):
    """A nested part of a configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ProcessConfig(BaseSettings):
    """Base of each process's configuration. Subclasses set `env_prefix`; every field has a unit and a description."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_nested_delimiter="__")

    def conflicts(self) -> list[str]:
        """Keys that are right by themselves and do not go together in a process of its own: each names the way out."""
        return []


def load(model: type[SettingsT], path: Path | None = None, /, **overrides: Any) -> SettingsT:
    """The configuration from `path` (none: defaults and environment), with `overrides` on top.

    Raises:
        ConfigError: the file is missing or not YAML, or a key is unknown, there twice or has a wrong value.
    """
    try:
        return _bind(model, _read(path))(**overrides)
    except ValidationError as error:
        raise ConfigError(_explain(model, path, error)) from error
    except SettingsError as error:
        raise ConfigError(_no_json(model, error.__cause__)) from error


def variables_of_no_key(model: type[ProcessConfig]) -> list[str]:
    """What the environment says of keys that there are not, in words. No errors: a name may be meant for others."""
    prefix = str(model.model_config.get("env_prefix") or "").upper()
    known = [prefix + key.upper() for key in model.model_fields]
    found = []
    for name, value in sorted(os.environ.items()):
        upper = name.upper()
        of_no_key = prefix and upper.startswith(prefix) and upper.partition("__")[0] not in known
        if of_no_key and not _SERVICE.search(f"{upper}={value}"):
            near = difflib.get_close_matches(upper, known, n=1, cutoff=0.8)
            hint = f"; did you mean {near[0]}?" if near else ""
            found.append(f"the environment variable {name} is not read: there is no such key{hint}")
    return found


def _bind(model: type[SettingsT], file_values: dict[str, Any]) -> type[SettingsT]:
    """The same model with the file's values as its weakest source, under the environment."""

    class Bound(model):  # type: ignore[valid-type,misc]  # a subclass of the argument is the way to add a source
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            **_: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, InitSettingsSource(settings_cls, init_kwargs=file_values)

    Bound.__name__ = model.__name__
    return Bound


def _read(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        root = _composed(path.read_text(encoding="utf-8"))
        _refuse_equal_keys(root)
        loaded = None if root is None else construct(root)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        words = f"byte {error.start} (0x{error.object[error.start]:02x}) is no UTF-8: save the file in that encoding"
        raise ConfigError(f"the configuration {path}: {words}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that is none
        raise ConfigError(f"the configuration {path} is not valid YAML: {_shown(error)}") from error
    except (TypeError, LookupError, AttributeError) as error:  # PyYAML at `!!bool x`, `!!int ""` and `!!timestamp x`
        words = f"a value that cannot be read as its tag says: {_shown(error)}"
        raise ConfigError(f"the configuration {path} is not valid YAML: {words}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"the configuration {path} must be a mapping of keys, not a {type(loaded).__name__}")
    return {str(key): value for key, value in loaded.items()}


def _composed(text: str) -> yaml.Node | None:
    """The root of a file that people write. Raises yaml.YAMLError, with the line that is wrong, and ValueError."""
    try:
        return compose(text, most_nodes=_MOST_VALUES)
    except yaml.YAMLError:
        yaml.compose(text, Loader=yaml.SafeLoader)  # libyaml shows no line, and this one does
        raise


def _refuse_equal_keys(root: yaml.Node | None) -> None:
    """YAML takes the last of two equal keys and drops the other. Raises yaml.YAMLError.

    Of what a merge (`<<`) brings an own key replaces one, as it should.
    """
    left, looked = [root], set[int]()
    while left:
        node = left.pop()
        if node is None or id(node) in looked:  # aliases share their node
            continue
        looked.add(id(node))
        if isinstance(node, yaml.MappingNode):
            _refuse_equal_keys_of(node)
            left += [one for pair in node.value for one in pair]
        elif isinstance(node, yaml.SequenceNode):
            left += node.value


def _refuse_equal_keys_of(node: yaml.MappingNode) -> None:
    seen: dict[tuple[str, str], int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
            continue
        if (named := (key.tag, key.value)) in seen:
            words = f"the key {key.value!r} is there twice, first in line {seen[named]}"
            raise yaml.composer.ComposerError(None, None, words, key.start_mark)
        seen[named] = key.start_mark.line + 1


def _shown(error: Exception) -> str:
    """What the parser says, with the line that it points at, but without an address's user and password."""
    return re.sub(r"(?<=://)\S*@", "…@", str(error))


def _explain(model: type[ProcessConfig], path: Path | None, error: ValidationError) -> str:
    where = f"{path}: " if path else ""
    return "\n".join(where + explain(model, dict(one)) for one in error.errors())


def _no_json(model: type[ProcessConfig], cause: BaseException | None) -> str:
    """Why a variable cannot be read; its value may be a secret, so it is named only."""
    prefix, text = str(model.model_config.get("env_prefix") or ""), getattr(cause, "doc", None)
    named = [name for name, value in os.environ.items() if value == text and name.upper().startswith(prefix.upper())]
    where = " or ".join(sorted(named)) or f"{prefix}…"
    return f"the environment variable {where} must be JSON, as lists and sections are: {cause}"


def _section_at(model: type[BaseModel], path: Sequence[Any]) -> type[BaseModel]:
    """The section that a path of keys leads to; places in lists and names in mappings lead to what is there."""
    for part in path:
        field = model.model_fields.get(str(part))
        section = None if field is None else _section_of(field.annotation)
        model = section or model
    return model


def _section_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for one in get_args(annotation) if (found := _section_of(one))), None)


def explain(model: type[BaseModel], one: dict[str, Any]) -> str:
    """One of a validator's errors in words: the key, its value, and the way out."""
    key = ".".join(str(part) for part in one["loc"])
    if one["type"] == "extra_forbidden":
        known = _section_at(model, one["loc"][:-1]).model_fields
        near = difflib.get_close_matches(str(one["loc"][-1]), list(known), n=1)
        within = ".".join(str(part) for part in one["loc"][:-1])
        named = f"{within}.{near[0]}" if near and within else "".join(near)
        hint = f"; did you mean {named!r}?" if near else f"; known keys: {', '.join(sorted(known))}"
        return f"unknown key {key!r}{hint}"
    if one["type"] == "missing":  # without its section's other values, which may be secrets
        field = _section_at(model, one["loc"][:-1]).model_fields.get(str(one["loc"][-1]))
        meaning = f": {field.description}" if field is not None and field.description else ""
        return f"key {key!r} is missing{meaning}"
    prefix = str(model.model_config.get("env_prefix") or "")
    env = prefix.upper() + key.upper().replace(".", "__")
    hint = f" (from the environment variable {env})" if env in os.environ else ""
    return f"key {key!r} = {without_credentials(one.get('input'))!r}{hint}: {one['msg']}"


def without_credentials(value: Any) -> Any:
    """The value without the user and the password of the addresses in it."""
    if isinstance(value, Mapping):
        return {key: without_credentials(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(without_credentials(one) for one in value)
    if not isinstance(value, str):
        return value
    before, _, host = value.rpartition("@")
    scheme = re.match(r"[\w+.-]*://", before)
    start = scheme.end() if scheme else 0
    return f"{before[:start]}…@{host}" if ":" in before[start:] else value
