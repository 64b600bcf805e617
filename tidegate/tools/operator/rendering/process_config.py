"""A process's configuration, of what the operator sets and the resource says, judged by the process's own model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tidegate.config import ConfigError, ProcessConfig, load
from tidegate.tools.config_cli import config_model
from tidegate.tools.config_findings import said_wrongly
from tidegate.tools.operator.resource import Refused

MODELS: Final = "/var/lib/tidegate/models"
PKI: Final = "/etc/tidegate/pki"
TLS: Final = {"cert": f"{PKI}/tls.crt", "key": f"{PKI}/tls.key", "ca": f"{PKI}/ca.crt"}


def merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return both, section by section; where both say something the resource's own wins. Lists are whole."""
    made = dict(base)
    for key, value in own.items():
        before = made.get(key)
        made[key] = merged(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return made


def named_port(config: Mapping[str, Any], key: str) -> int:
    """Return a port that a Service and probes have to name. Raises Refused: it is a free one."""
    if port := int(config.get(key) or 0):
        return port
    raise Refused("InvalidConfig", f"spec.config.{key}: 0 takes a free port, which no Service finds; name one")


def judged(role: str, config: Mapping[str, Any]) -> ProcessConfig:
    """Return the configuration as the process reads it. Raises Refused, in the words of `tidegate config check`."""
    try:
        found = load(config_model(role), **config)
    except ConfigError as error:
        raise Refused("InvalidConfig", f"spec.config: {error}"[:2000]) from error
    if problems := said_wrongly(found):
        raise Refused("InvalidConfig", f"spec.config: {'; '.join(problems)}"[:2000])
    return found
