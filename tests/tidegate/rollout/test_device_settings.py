"""The keys that may be changed from outside: which, within which bounds, and what a refusal says."""

from __future__ import annotations

from typing import Any

import pytest

from edge_agent.config import EdgeConfig
from tidegate.rollout.device_settings import (
    DEVICE_KEYS,
    MAX_SETTINGS,
    SettingRefused,
    checked,
    flattened,
    settings_digest,
)

# What would cut a device off from its fleet, or make it trust somebody else.
NEVER = ("mqtt", "name", "host", "grpc_port", "gateways", "dial_out", "tls", "rollout", "state_dir", "store", "models",
         "model_repository", "sandbox", "allowed_engines", "device_file")  # fmt: skip


def _schema(key: str) -> dict[str, Any]:
    """What the agent's own configuration says of a key."""
    whole = EdgeConfig.model_json_schema()
    section, _, name = key.rpartition(".")
    holder = whole
    if section:
        names = {"limits": "LimitsConfig", "store": "StoreConfig"}
        holder = whole["$defs"][names[section]]
    found: dict[str, Any] = holder["properties"][name]
    return found


@pytest.mark.parametrize("key", sorted(DEVICE_KEYS))
def test_a_key_has_the_type_and_the_bounds_of_the_agents_own_configuration(key: str) -> None:
    ours, theirs = DEVICE_KEYS[key], _schema(key)
    options = theirs.get("anyOf", [theirs])
    plain = next(one for one in options if one.get("type") != "null")

    assert plain["type"] == {bool: "boolean", int: "integer", float: "number", str: "string"}[ours.kind]
    assert ours.nullable == any(one.get("type") == "null" for one in options)
    assert tuple(plain.get("enum", ())) == ours.choices
    assert (ours.least, ours.above_least) == (
        plain.get("minimum", plain.get("exclusiveMinimum", float("-inf"))), "exclusiveMinimum" in plain
    )  # fmt: skip
    assert ours.most == plain.get("maximum", float("inf"))


@pytest.mark.parametrize("key", NEVER)
def test_nothing_that_leads_to_a_device_or_says_whom_it_trusts_can_be_changed(key: str) -> None:
    with pytest.raises(
        SettingRefused, match=rf"key '{key}' = None: it cannot be changed from outside.*start the agent"
    ):
        checked({key: None})


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("max_queue_size", 0, "key 'max_queue_size' = 0: it must be a whole number from 1 to 4096"),
        ("max_queue_size", True, "a whole number"),
        ("max_queue_size", 2.5, "a whole number"),
        ("max_queue_size", "32", "a whole number"),
        ("max_queue_size", [1], "a whole number"),
        pytest.param("max_queue_size", 10**5000, "a whole number", id="more digits than Python writes"),
        ("limits.max_held_bytes", 10**30, "a whole number from 65536"),
        ("store.request_ttl_s", 1e300, "a number above 0"),
        ("hang_timeout_s", 0, "a number above 0 to 3600"),
        ("hang_timeout_s", float("nan"), "a number above 0"),
        ("min_battery", None, "a number from 0 to 1"),
        ("max_temperature_c", 20, "a number from 30 to 150, or null"),
        ("metered", 1, "true or false"),
        ("log_level", "loud", "one of debug, info, warning, error"),
        ("max_queue_sise", 3, "did you mean 'max_queue_size'"),
        ("x" * 500, "y" * 500, "…"),
    ],
)
def test_a_wrong_value_is_refused_with_key_value_and_way_out(key: str, value: Any, words: str) -> None:
    with pytest.raises(SettingRefused) as refused:
        checked({"metered": True, key: value})

    assert words in str(refused.value)
    assert len(str(refused.value)) < 1000


def test_equal_settings_have_one_digest_whoever_wrote_them() -> None:
    assert settings_digest({"hang_timeout_s": 30.0, "nice": 1}) == settings_digest({"nice": 1, "hang_timeout_s": 30})
    assert settings_digest({"metered": True}) != settings_digest({"metered": 1})
    assert checked({"hang_timeout_s": 30.0}) == {"hang_timeout_s": 30}


def test_sections_become_keys_with_a_dot_and_nothing_is_there_twice() -> None:
    assert flattened({"nice": 1, "store": {"max_rows": 99}}) == {"nice": 1, "store.max_rows": 99}
    with pytest.raises(SettingRefused, match="twice"):
        flattened({"store.max_rows": 1, "store": {"max_rows": 99}})
    with pytest.raises(SettingRefused, match="mapping"):
        flattened([1])
    with pytest.raises(SettingRefused, match=f"more than {MAX_SETTINGS}"):
        flattened({f"k{number}": 1 for number in range(MAX_SETTINGS + 1)})
