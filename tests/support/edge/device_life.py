"""A device as a real process with a real broker and a server of artefacts, which a test can kill at any point.

with DeviceLife(folder) as device:
    device.ask(1, made("2"))
    device.start(die_at="before:verified"); device.wait_dead(); device.start()
    report = device.settled(1)
"""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edge_agent.delivery.model_store import Generation, ModelStore
from tests.support.edge.rollouts import ArtefactServer, Author, Made
from tests.support.faults.fleet_stack import Part
from tests.support.models.staged import Staged
from tests.support.models.tiny_models import tiny_repository
from tests.support.mqtt.brokers import Mosquitto
from tests.support.mqtt.gossip import Gossip, Heard
from tidegate.fleet.messages import decode_up
from tidegate.fleet.reported import ModelReport, Reported
from tidegate.fleet.topics import DEFAULT_FLEET, DeviceTopic, Topics

WITHIN_S = 60.0
TOPICS = Topics(DEFAULT_FLEET)


class DeviceLife(Staged):
    """Broker and server live inside `with`; the agent from `start` to its death."""

    def __init__(self, folder: Path, *, author: Author | None = None) -> None:
        super().__init__()
        self.folder = folder
        self.author = author or Author(1)
        self.server = ArtefactServer()
        self.broker = Mosquitto(folder)
        self.lives = 0
        self._gossip: Gossip | None = None
        self._desired: Heard | None = None
        self._part = Part("kiosk-1", "tests.support.edge.dying_edge", self._config(), folder)

    def _start(self) -> None:
        tiny_repository(self.folder / "models")
        self.author.trust_file(self.folder / "trusted")
        self._stack.enter_context(self.broker)
        self._stack.enter_context(self.server)
        self._listen()
        self._stack.callback(self._close)
        self._stack.callback(self._part.kill)

    # -- the agent -------------------------------------------------------------------------------------------------

    def start(self, *, die_at: str = "") -> None:
        os.environ["TIDEGATE_TEST_DIE_AT"] = die_at
        try:
            self._part.start()
        finally:
            del os.environ["TIDEGATE_TEST_DIE_AT"]
        self.lives += 1

    def wait_ready(self) -> None:
        self._part.wait_ready()

    def wait_dead(self) -> None:
        """Return once it has died by itself; its workers are gone then, too."""
        self.until(lambda: not self._part.alive, "the agent did not die")
        self._part.kill()

    @property
    def alive(self) -> bool:
        return self._part.alive

    @property
    def log(self) -> str:
        return self._part.log

    def kill(self) -> None:
        """SIGKILL for agent and workers: a power cut, as far as processes go."""
        self._part.kill()

    def kill_a_worker(self, draw: Callable[[int], int]) -> None:
        """SIGKILL for one of the workers, if there are any."""
        workers = [one for one in self._part.everyone()[1:] if "tidegate.workers.child" in one.cmdline()]
        if workers:
            os.kill(workers[draw(len(workers))].pid, signal.SIGKILL)

    def restart_broker(self) -> None:
        """It forgets everything; the document is said again, as a gateway would."""
        assert self._gossip is not None
        self.broker.kill()
        self._gossip.close()
        self.broker.start()
        self._listen()
        if self._desired is not None:
            self._gossip.say(self._desired)

    # -- what is asked and told ------------------------------------------------------------------------------------

    def ask(self, revision: int, one: Made, *, author: Author | None = None, **changes: Any) -> None:
        """Publish a document that asks for this model."""
        assert self._gossip is not None
        self.server.add(one)
        message = (author or self.author).message(revision, one.plan(**changes), urls=[self.server.url])
        self._desired = Heard(TOPICS.desired("kiosk-1"), message, True)
        self._gossip.say(self._desired)

    @property
    def reported(self) -> Reported | None:
        """The newest report on the broker."""
        assert self._gossip is not None
        topic = TOPICS.up("kiosk-1", DeviceTopic.REPORTED)
        heard = [decode_up(DeviceTopic.REPORTED, one.payload) for one in self._gossip.heard if one.topic == topic]
        reports = [one for one in heard if isinstance(one, Reported)]
        return max(reports, key=lambda one: (one.epoch, one.sequence), default=None)

    def report(self) -> ModelReport | None:
        found = self.reported
        return found.models[0] if found is not None and found.models else None

    def settled(self, revision: int) -> ModelReport:
        """What was reported of this revision's rollout in the end."""

        def is_settled() -> bool:
            found = self.report()
            return found is not None and found.revision == revision and found.state.is_settled

        self.until(is_settled, f"revision {revision} is not settled")
        found = self.report()
        assert found is not None
        return found

    def until(self, what: Callable[[], bool], otherwise: str) -> None:
        give_up_at = time.perf_counter() + WITHIN_S
        while not what():
            if time.perf_counter() > give_up_at:
                raise AssertionError(f"{otherwise}; last report {self.report()}\n{self.log[-6000:]}")
            time.sleep(0.01)

    def committed(self) -> Generation:
        """The committed generation on the disk, whatever process runs."""
        return ModelStore(self.folder / "state" / "rollout").committed()

    def answer(self, value: float = 3.0) -> tuple[str, float]:
        """(version, answer) of a request over the device's own HTTP door."""
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [value]}]}
        url = f"{self._part.addresses['http']}/v2/models/double/infer"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as response:
            found = json.load(response)
        return found["model_version"], found["outputs"][0]["data"][0]

    def _config(self) -> dict[str, Any]:
        return {
            "name": "kiosk-1", "mqtt": self.broker.url, "grpc_port": 0, "http_port": 0, "models": ["double"],
            "model_repository": str(self.folder / "models"), "state_dir": str(self.folder / "state"), "store": None,
            "warmup_budget_s": 0.1, "sensors": None, "log_level": "info", "drain_s": 0.2,
            "rollout": {"keys": [str(self.folder / "trusted")], "recheck_s": 0.1},
        }  # fmt: skip

    def _listen(self) -> None:
        self._gossip = Gossip(self.broker.port)
        self._gossip.listen(TOPICS.up("kiosk-1", DeviceTopic.REPORTED))

    def _close(self) -> None:
        if self._gossip is not None:
            self._gossip.close()

    def __repr__(self) -> str:
        return f"<DeviceLife {self.lives} lives, {self._part!r}>"
