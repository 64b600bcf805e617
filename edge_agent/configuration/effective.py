"""An agent's configuration with settings over it, and the settings that a configuration has.

The result is validated by the very model of the configuration file, so a setting cannot be in force that a start with
the same value would refuse.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from edge_agent.config import EdgeConfig
from tidegate.config import explain
from tidegate.rollout.device_settings import DEVICE_KEYS, Setting, SettingRefused, Settings, canonical_setting


def with_settings(base: EdgeConfig, settings: Settings) -> EdgeConfig:
    """`base` with the settings over it. Raises SettingRefused: this configuration does not take one of them."""
    if not settings:
        return base
    values: dict[str, Any] = {name: getattr(base, name) for name in EdgeConfig.model_fields}
    inside: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        if not section:
            values[key] = value
        elif values[section] is None:
            raise SettingRefused(
                f"key {key!r} = {value!r}: this device has no {section!r} (null in its own configuration): give it "
                "that section there and start the agent again, or leave the key out"
            )
        else:
            inside.setdefault(section, values[section].model_dump())[name] = value
    try:
        for section, fields in inside.items():
            values[section] = type(values[section]).model_validate(fields)
        return EdgeConfig(**values)
    except ValidationError as error:
        raise SettingRefused("; ".join(explain(EdgeConfig, dict(one)) for one in error.errors())) from error


def settings_of(config: EdgeConfig) -> dict[str, Setting]:
    """The settings that the configuration has, in canonical form; none of a section that it lacks."""
    found: dict[str, Setting] = {}
    for key in DEVICE_KEYS:
        section, _, name = key.rpartition(".")
        holder = getattr(config, section) if section else config
        if holder is not None:
            found[key] = canonical_setting(getattr(holder, name))
    return found
