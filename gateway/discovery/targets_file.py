"""A targets file is YAML or JSON with the list `targets`; an error names the file, the line and the key.

The lines come from YAML's own nodes, of which JSON is a part: a validator knows keys and values but not where they
were written.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import ValidationError

from gateway.config.discovery import ListedTargetConfig, TargetsFile
from gateway.core.fleet.found_targets import MOST_TARGETS, Found
from tidegate.config import ConfigError, explain
from tidegate.fleet.topics import is_name
from tidegate.storage.bounded_yaml import TooMuch, compose, construct

MOST_BYTES: Final = 2**20
_ERRORS: Final = 8  # in one message
_WORDS: Final = 300  # of one error: it may quote a value


def read_targets(path: Path, *, has_tls: bool) -> tuple[Found, ...]:
    """The targets that the file lists.

    Args:
        has_tls: whether the gateway has a certificate to call over TLS with.

    Raises:
        ConfigError: the file is missing, too large, no YAML, or has a key or value that does not fit.
    """
    node = _composed(path, _text(path))
    loaded = _constructed(path, node) if node is not None else None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}:1: a mapping with the key 'targets' is wanted; an empty list is `targets: []`")
    try:
        listed = TargetsFile.model_validate(loaded).targets
    except ValidationError as error:
        lines = [
            f"{path}:{line_of(node, one['loc'])}: {explain(TargetsFile, dict(one))}"[:_WORDS]
            for one in error.errors()[:_ERRORS]
        ]
        raise ConfigError("\n".join(lines)) from error
    count = sum(one.servers for one in listed)
    if count > MOST_TARGETS:
        raise ConfigError(f"{path}: {count} targets are more than {MOST_TARGETS}")
    for place, target in enumerate(listed):
        if why := _misfit(target, has_tls=has_tls):
            raise ConfigError(f"{path}:{line_of(node, ('targets', place))}: target {target.name!r} {why}")
    return tuple(Found(one.spec, one.draining) for target in listed for one in target.each())


def _misfit(target: ListedTargetConfig, *, has_tls: bool) -> str:
    if target.openai is not None:
        return "has transport: openai, which is for the gateway's own list `targets`"
    if not all(is_name(one.name) for one in target.each()):
        return "has a name that is not 1 to 64 letters, digits and . _ ~ -, starting with a letter or digit"
    return target.why_not(has_tls=has_tls)


def line_of(node: Any, keys: Sequence[int | str]) -> int:
    """The line at which the value under these keys was written, from 1; of one that is missing, its section's."""
    line = int(node.start_mark.line) + 1 if node is not None else 1
    for key in keys:
        found = None
        if isinstance(node, yaml.MappingNode):
            found = next(((name, value) for name, value in node.value if name.value == key), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
            found = node.value[key], node.value[key]
        if found is None:
            return line
        named, node = found
        line = int(named.start_mark.line) + 1
    return line


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the targets file {path}: {error.strerror}") from error
    if len(raw) > MOST_BYTES:
        raise ConfigError(f"the targets file {path} has more than {MOST_BYTES} bytes")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"the targets file {path} is not UTF-8: byte {error.start}") from error


def _constructed(path: Path, node: yaml.Node) -> Any:
    try:
        return construct(node)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise ConfigError(f"{path}:{line}: {error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:  # a date that does not exist
        raise ConfigError(f"{path}: not valid YAML or JSON: {error}") from error


def _composed(path: Path, text: str) -> yaml.Node | None:
    try:
        return compose(text)
    except TooMuch as error:
        raise ConfigError(f"{path}: {error}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 1
        raise ConfigError(f"{path}:{line}: not valid YAML or JSON: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML or JSON: {error}") from error
