"""What a pool says over MQTT is bounded, and speaks for the pool in its topic only."""

from __future__ import annotations

import pytest

from tidegate.fleet.messages import BadMessage
from tidegate.fleet.pool_messages import MAX_POOL_BYTES, PoolDeath, PoolState, decode_pool, encode_pool
from tidegate.fleet.topics import PoolTopic, Topics

STATE = PoolState("pool-0", 7, 1, "b", "10.0.0.1:8101", zone="site", draining=True)
DEATH = PoolDeath("pool-0", 7, "b", "lost")


def test_what_was_said_is_heard() -> None:
    assert decode_pool("pool-0", PoolTopic.STATE, encode_pool(STATE)) == STATE
    assert decode_pool("pool-0", PoolTopic.DEATH, encode_pool(DEATH)) == DEATH


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{}",
        b"[" * 2000,
        b"\xff\xfe",
        encode_pool(PoolState("pool-1", 7, 1, "b", "10.0.0.1:8101")),
        encode_pool(STATE).replace(b'"v":1', b'"v":2'),
        encode_pool(STATE).replace(b'"e":7', b'"e":0'),
        encode_pool(STATE).replace(b'"e":7', b'"e":9007199254740992'),
        encode_pool(STATE).replace(b'"site"', b'"moon"'),
        encode_pool(STATE).replace(b"10.0.0.1", b"x" * 300),
        encode_pool(STATE) + b" " * MAX_POOL_BYTES,
    ],
)
def test_what_does_not_fit_is_refused(payload: bytes) -> None:
    with pytest.raises(BadMessage):
        decode_pool("pool-0", PoolTopic.STATE, payload)


@pytest.mark.parametrize(
    ("topic", "expected"),
    [
        ("tidegate/v1/f1/pool/pool-0/state", ("pool-0", PoolTopic.STATE)),
        ("tidegate/v1/f1/pool/pool-0/death", ("pool-0", PoolTopic.DEATH)),
        ("tidegate/v1/f2/pool/pool-0/state", None),
        ("tidegate/v1/f1/pool/pool-0/birth", None),
        ("tidegate/v1/f1/pool/state", None),
        ("tidegate/v1/f1/pool/a/b/state", None),
        ("tidegate/v1/f1/pool/+/state", None),
        ("tidegate/v1/f1/up/pool-0/state", None),
    ],
)
def test_topics_of_pools(topic: str, expected: tuple[str, PoolTopic] | None) -> None:
    assert Topics("f1").parse_pool(topic) == expected
