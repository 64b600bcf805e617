"""Row 13: what MQTT says is old, comes twice and out of order, and tells of a device that is not there."""

from __future__ import annotations

import json
from random import Random
from typing import Final

from tests.bench.fault_rows.trial import Check, Trial, points
from tests.support.faults.matrix import Act, Matrix, Row
from tests.support.faults.matrix_seen import Seen
from tests.support.mqtt.gossip import Gossip, Heard
from tidegate.testing.ports import free_port

_GHOST: Final = "ghost"


class _Rumours:
    """Row 13's fault: messages of this fleet, heard before, said again and again in any order."""

    def __init__(self) -> None:
        self._gossip: Gossip | None = None

    def acts(self, matrix: Matrix) -> list[tuple[float, Act]]:
        gossip = self._gossip = Gossip(matrix.fleet.broker.port)
        gossip.listen("tidegate/v1/+/up/#")
        draw = Random(13)

        def say() -> None:
            heard = [one for one in gossip.heard if f"/{_GHOST}/" not in one.topic]
            old = heard[: len(heard) // 2] * 2  # each twice, none newer than what was heard since
            draw.shuffle(old)
            for one in old[-400:]:
                gossip.say(one)
            for one in [one for one in heard if "/device-1/" in one.topic][:3]:
                gossip.say(_as_ghost(one))

        return [(0.5 * turn, say) for turn in range(12)]

    def end(self, _matrix: Matrix) -> None:
        assert self._gossip is not None
        for topic in {one.topic for one in self._gossip.heard if f"/{_GHOST}/" in one.topic}:
            self._gossip.say(Heard(topic, b"", True))
        self._gossip.close()


def _as_ghost(one: Heard) -> Heard:
    """The same of a device that does not exist, at an address where nobody answers."""
    words = json.loads(one.payload)
    words["dev"] = _GHOST
    if "urls" in words:
        words["urls"] = [f"127.0.0.1:{free_port()}"]
    return Heard(one.topic.replace("/device-1/", f"/{_GHOST}/"), json.dumps(words).encode(), True)


def _checks(seen: Seen) -> list[Check]:
    known = [look for look in seen.looks if seen.broken_at < look.at < seen.healed_at]
    wrong = {
        target
        for look in known
        for target, (state, _) in look.states.items()
        if (state != "ready") != (target == f"edge/{_GHOST}")
    }
    return [
        Check("lost_points", points(seen.loss()), "<=", 1.0),
        Check("sent_to_the_ghost", len(seen.launches(f"edge/{_GHOST}")), "<=", 1),
        Check("targets_in_a_wrong_state", len(wrong), "<=", 0),
        Check("ghost_was_told_of", sum(f"edge/{_GHOST}" in look.states for look in known), ">=", 1),
    ]


_RUMOURS: Final = _Rumours()
TRIALS: Final = (Trial(Row("13", "MQTT says what is old, twice, in any order", _RUMOURS.acts, _RUMOURS.end), _checks),)
