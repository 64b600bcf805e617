"""What an edge can be told, and what it says to what it cannot use."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from edge_agent.config import EdgeConfig
from tidegate.config import ConfigError, load


def test_everything_has_a_default_and_listens_on_loopback_only() -> None:
    config = load(EdgeConfig)

    assert (config.host, config.grpc_port, config.http_port) == ("127.0.0.1", 9001, 9000)
    assert config.mqtt is None
    assert config.models is None


@pytest.mark.parametrize(
    ("host_name", "name"),
    [("kiosk-7.lan", "kiosk-7"), ("my_pi", "my_pi"), ("größe", "gr--e"), ("--", "edge"), ("a" * 90, "a" * 64)],
)
def test_a_device_is_called_like_its_host_as_far_as_a_fleets_names_go(
    monkeypatch: pytest.MonkeyPatch, host_name: str, name: str
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host_name)

    assert load(EdgeConfig).name == name


def test_the_environment_can_set_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_EDGE_SLOTS", "3")

    assert load(EdgeConfig).slots == 3


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "kiosk/1"}, "key 'name' = 'kiosk/1'"),
        ({"fleet": "a+b"}, "key 'fleet' = 'a\\+b'"),
        ({"grpc_port": 65536}, "key 'grpc_port' = 65536"),
        ({"advertise": "http://kiosk:9001"}, "key 'advertise' = 'http://kiosk:9001'"),
        ({"max_queue_size": 0}, "key 'max_queue_size' = 0"),
        ({"thread": 2}, "unknown key 'thread'; did you mean 'threads'?"),
    ],
)
def test_a_key_that_cannot_be_used_is_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(EdgeConfig, **keys)


def test_every_key_is_explained() -> None:
    assert [key for key, field in EdgeConfig.model_fields.items() if not (field.description or "").endswith(".")] == []
