"""Device settings are the keys of an edge agent's configuration that may be changed from outside while it runs.

One list for the device, which refuses every other key, and for the operator's command, which says so before anything is
signed. No key on it names an address, a file, a model, an account or a key: so no document cuts a device off from its
fleet, and none makes it trust anybody. What a key costs its device decides when it applies:

    now      in the running agent, from the next request on
    worker   each model gets another worker beside the present one, which answers until that is warm
    start    at the agent's next start; until then it is reported as waiting

A document is refused whole: half of a configuration is one that nobody wanted. Bounds here are those of
`edge_agent/config.py`, which a test compares. The canonical form writes a number in one way, 30 for 30.0, so that equal
settings have equal digests whoever wrote them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import inf, isfinite
from typing import Any, Final, Literal

from tidegate.rollout.canonical import canonical, digest_of

Setting = bool | int | float | str | None
Settings = Mapping[str, Setting]  # by key, sections with a dot: "store.max_rows"
Applies = Literal["now", "worker", "start"]
MAX_SETTINGS: Final = 64
MAX_TEXT: Final = 64
MAX_EXACT: Final = 2**53 - 1  # what every parser of JSON reads as it was written; no key has any use for more
_DIGEST_DIGITS: Final = 16
_SHOWN: Final = 60


class SettingRefused(ValueError):
    """A setting that cannot be changed from outside; the text names the key, the value and the way out."""


@dataclass(frozen=True, slots=True)
class DeviceKey:
    """One key of the list.

    Attributes:
        kind: of its value; an int is taken where a float is meant.
        least, most: its bounds, in its unit; `above_least`: the lower one is excluded.
        choices: of a text.
        nullable: whether it may be null.
    """

    applies: Applies
    kind: type[bool] | type[int] | type[float] | type[str]
    least: float = -inf
    most: float = inf
    above_least: bool = False
    choices: tuple[str, ...] = ()
    nullable: bool = False

    def wrong(self, value: Any) -> str:
        """What is wrong with a value, with what would be right; "" for nothing."""
        if value is None:
            return "" if self.nullable else f"it must be {self.in_words}"
        if self.kind is bool or isinstance(value, bool):
            return "" if self.kind is bool and isinstance(value, bool) else f"it must be {self.in_words}"
        if self.kind is str:
            return "" if value in self.choices else f"it must be {self.in_words}"
        if not isinstance(value, int if self.kind is int else (int, float)) or not _is_finite(value):
            return f"it must be {self.in_words}"
        fits = self.least <= value <= min(self.most, MAX_EXACT) and not (self.above_least and value == self.least)
        return "" if fits else f"it must be {self.in_words}"

    @property
    def in_words(self) -> str:
        if self.kind is bool:
            return "true or false"
        if self.kind is str:
            return f"one of {', '.join(self.choices)}"
        what = "a whole number" if self.kind is int else "a number"
        least = "" if self.least == -inf else f" {'above' if self.above_least else 'from'} {self.least:.15g}"
        most = "" if self.most == inf else f" to {self.most:.15g}"
        return f"{what}{least}{most}{', or null' if self.nullable else ''}"


def _key(applies: Applies, kind: Any, least: float = -inf, most: float = inf, **more: Any) -> DeviceKey:
    return DeviceKey(applies, kind, least, most, **more)


DEVICE_KEYS: Final[Mapping[str, DeviceKey]] = {
    "drain_s": _key("now", float, 0, 60),
    "hang_timeout_s": _key("now", float, 0, 3600, above_least=True),
    "limits.max_held_bytes": _key("now", int, 2**16),
    "log_level": _key("now", str, choices=("debug", "info", "warning", "error")),
    "max_queue_size": _key("now", int, 1, 4096),
    "max_temperature_c": _key("now", float, 30, 150, nullable=True),
    "metered": _key("now", bool),
    "min_battery": _key("now", float, 0, 1),
    "store.forward_results": _key("now", str, choices=("none", "unsure", "all")),
    "store.max_rows": _key("now", int, 16, 10_000_000),
    "store.request_ttl_s": _key("now", float, 0, above_least=True),
    "store.result_ttl_s": _key("now", float, 0, above_least=True),
    "nice": _key("worker", int, 0, 19),
    "threads": _key("worker", int, 1, 256),
    "limits.max_json_bytes": _key("start", int, 1024, 2**31),
    "limits.max_output_tokens": _key("start", int, 1, 2**20),
    "limits.max_prompt_tokens": _key("start", int, 1, 2**24),
    "max_message_bytes": _key("start", int, 1024, 1 << 30),
    "slots": _key("start", int, 1, 64),
    "store.max_bytes": _key("start", int, 65_536, 2**40),
    "warmup_budget_s": _key("start", float, 0, 600, above_least=True),
}


def flattened(document: Any) -> dict[str, Any]:
    """The settings of a document with sections, by dotted key; what they are worth is for `checked` to say.

    Raises:
        SettingRefused: it is no mapping, has too many keys, or one of them twice.
    """
    if document is None:
        return {}
    if not isinstance(document, Mapping):
        raise SettingRefused(f"it must be a mapping of keys, not a {type(document).__name__}")
    found: dict[str, Any] = {}
    for key, value in document.items():
        inside = {f"{key}.{name}": one for name, one in value.items()} if isinstance(value, Mapping) else {key: value}
        for name, one in inside.items():
            if name in found:
                raise SettingRefused(f"key {_shown(name)} is there twice: leave one of them out")
            found[str(name)] = one
            if len(found) > MAX_SETTINGS:
                raise SettingRefused(f"it has more than {MAX_SETTINGS} keys; {_all_keys()}")
    return found


def checked(settings: Mapping[str, Any]) -> dict[str, Setting]:
    """The settings in canonical form. Raises SettingRefused: a key is not on the list, or a value is none of its."""
    for key, value in settings.items():
        known = DEVICE_KEYS.get(key)
        if known is None:
            near = get_close_matches(key, DEVICE_KEYS, n=1)
            hint = f"did you mean {near[0]!r}? Else set" if near else "set"
            raise SettingRefused(
                f"key {_shown(key)} = {_shown(value)}: it cannot be changed from outside; {hint} it in the agent's "
                f"own configuration, and start the agent again. {_all_keys()}"
            )
        if why := known.wrong(value):
            raise SettingRefused(f"key {key!r} = {_shown(value)}: {why}")
    return {key: canonical_setting(settings[key]) for key in sorted(settings)}


def settings_digest(settings: Settings) -> str:
    """What settings are told apart by: 16 hexadecimal digits, the same for equal settings."""
    return digest_of(canonical({key: canonical_setting(value) for key, value in settings.items()}))[:_DIGEST_DIGITS]


def keys_that_apply(settings: Settings, when: Applies) -> tuple[str, ...]:
    """Those of the settings' keys that apply then, in order."""
    return tuple(sorted(key for key in settings if key in DEVICE_KEYS and DEVICE_KEYS[key].applies == when))


def canonical_setting(value: Any) -> Setting:
    """A value in the one way in which it is written: whole numbers without a point."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_finite(value: float) -> bool:
    try:
        return isfinite(value)
    except OverflowError:  # an int of a thousand digits
        return False


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python writes
        text = "a number of very many digits"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def _all_keys() -> str:
    return f"What can: {', '.join(DEVICE_KEYS)}"
