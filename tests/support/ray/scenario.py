"""A gateway before pools on Ray Serve, under load, while replicas come and go and Ray's head is lost and comes back.

    python -m tests.support.ray.scenario FOLDER [CONTROL_AWAY_S HEAD_AWAY_S RATE BUDGET_S]

The head and the replicas have a node each, and the cluster's state is in Redis, as production has it. Runs in a network
of its own (`in_own_network`). The last line of stdout is JSON: of each phase how many requests were sent, how many of
them failed and how long the slowest took, and how long what the phase waits for took. The model is paced, so nothing
here needs much of the machine.

The control store is lost twice: its process alone, which nothing in Ray starts again, so that is done here as a
supervisor would; and with the head, killed as a whole and started again with an empty disk. At last it is lost under
`ray start --block`, where Ray itself ends the head.
"""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.request
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any, Final

import psutil
import yaml

from tests.support.faults.fleet_stack import Part
from tests.support.mqtt.brokers import Mosquitto
from tests.support.ray.cluster import RayCluster
from tests.support.ray.load import MODEL, Load
from tests.support.ray.scaler import Scaler
from tests.support.stores import RedisServer
from tidegate import clock
from tidegate.tools.build.demo.paced import PacedCosts, add_paced

CONTROL_STORE: Final = "gcs_server"
WITHIN_S: Final = 90.0


class Scenario:
    """Runs once.

    Args:
        folder: for models, configurations and logs.
        control_away_s: how long the control store's process is away.
        head_away_s: how long the head is away, with all its processes; 0: it is not lost, which saves two minutes.
        rate: of requests a second. On a crowded machine a process may stand still for seconds, in which a gateway
            refuses more than it lets in at once: tests ask for few, and give each much time.
        budget_s: of each request.
    """

    def __init__(self, folder: Path, control_away_s: float, head_away_s: float, rate: float, budget_s: float) -> None:
        self._folder, self._rate, self._budget_s = folder, rate, budget_s
        self._control_away_s, self._head_away_s = control_away_s, head_away_s
        self._args = {"config": str(folder / "pool.yaml"), "replicas": 1, "cpus": 0.2}
        self.told: dict[str, Any] = {}

    async def run(self) -> dict[str, Any]:
        folder = self._folder
        add_paced(MODEL, PacedCosts(pool_ms=((1.0, 5.0), (1024.0, 20.0))), folder / "models")
        with Mosquitto(folder) as broker, RedisServer(folder) as store:
            mqtt = f"mqtt://127.0.0.1:{broker.port}"
            pool = {"name": "pool", "grpc_port": 18101, "mqtt": mqtt, "model_repository": str(folder / "models")}
            (folder / "pool.yaml").write_text(yaml.safe_dump({**pool, "threads": 1, "drain_s": 5}))
            common = {"model_repository": str(folder / "models"), "mqtt": mqtt, "grpc_port": 0, "log_level": "warning"}
            ports = {"http_port": 0, "metrics_port": 0, "admin_port": 0}
            gateway = Part("gateway", "gateway", {**common, **ports, "discovery": [{"source": "announce"}]}, folder)
            gateway.start()
            try:
                with RayCluster(folder, f"127.0.0.1:{store.port}") as cluster:
                    gateway.wait_ready()
                    await self._phases(cluster, gateway.addresses)
                self._look_for_what_is_left(cluster)
            finally:
                gateway.kill()
        return self.told

    async def _phases(self, cluster: RayCluster, addresses: dict[str, str]) -> None:
        self._cluster, self._admin = cluster, addresses["admin"]
        cluster.deploy(**self._args)
        await self._until("first_s", lambda: self._whole(1))
        load = self._load = Load(f"{addresses['http']}/v2/models/{MODEL}/infer", self._rate, self._budget_s)
        async with Scaler(1) as scaler:
            loading = asyncio.create_task(load.run(), name="load")
            await clock.sleep(2.0)
            await self._lose_the_control_store(scaler)
            await self._lose_a_replica()
            await self._update()
            if self._head_away_s:
                await self._lose_the_head(scaler)
            load.phase, scaler.replicas = "fewer", 1
            await self._until("fewer_s", lambda: self._whole(1))
            await clock.sleep(1.0)
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
        cluster.ask("/api/serve/applications/", method="DELETE")
        await self._until("ended_s", lambda: self._ready() == 0)
        if cluster.head.supervised:
            cluster.head.program(CONTROL_STORE).kill()
            await self._until("ended_by_ray_s", lambda: not cluster.head.alive)
        self.told |= {"sent": load.sent, "failed": load.failed, "slowest_s": load.slowest_s}
        self.told |= {"scaler": {"code": scaler.code, "events": scaler.events}}

    async def _lose_the_control_store(self, scaler: Scaler) -> None:
        head, before = self._cluster.head, await asyncio.to_thread(self._processes)
        store = head.program(CONTROL_STORE)
        words, environment = store.cmdline(), store.environ()
        self._load.phase = "control_away"
        store.kill()
        await clock.sleep(self._control_away_s)
        self._load.phase = "control_back"
        self.told["control_stayed_away"] = not store.is_running() or store.status() == psutil.STATUS_ZOMBIE
        await asyncio.to_thread(head.add, words, environment)
        await self._until("control_back_s", lambda: self._whole(1))
        self.told["control_same"] = await asyncio.to_thread(self._processes) == before
        scaler.replicas = 2
        await self._until("scaled_s", lambda: self._whole(2))

    async def _lose_a_replica(self) -> None:
        self._load.phase = "killed"
        victim, process = next(iter((await asyncio.to_thread(self._processes)).items()))
        process.kill()
        await self._until("back_s", lambda: self._whole(2, gone={victim}))

    async def _update(self) -> None:
        self._load.phase = "updated"
        before = set(await asyncio.to_thread(self._processes))
        await asyncio.to_thread(
            lambda: self._cluster.deploy(**{**self._args, "replicas": 2}, max_message_bytes=32 << 20)
        )
        await self._until("updated_s", lambda: self._whole(2, gone=before))

    async def _lose_the_head(self, scaler: Scaler) -> None:
        head, before = self._cluster.head, await asyncio.to_thread(self._processes)
        self._load.phase = "head_away"
        await asyncio.to_thread(head.kill)
        await clock.sleep(self._head_away_s)
        self._load.phase = "head_back"
        head.supervised = True
        began_at = clock.now()
        await asyncio.to_thread(self._cluster.start_head)
        await self._until("head_whole_s", lambda: self._whole(2))
        self.told["head_back_s"] = round(clock.now() - began_at, 2)
        self.told["head_same"] = await asyncio.to_thread(self._processes) == before
        scaler.replicas = 3
        await self._until("scaled_after_head_s", lambda: self._whole(3))

    def _processes(self) -> dict[str, psutil.Process]:
        """Of the replicas, by Serve's own id; blocks, and must not stop the load."""
        assert self._cluster.behind is not None
        return {id: self._cluster.behind.process(pid) for id, (pid, _) in self._cluster.replicas().items()}

    def _whole(self, replicas: int, gone: Set[str] = frozenset()) -> bool:
        """So many run and none of those that are to be gone, as Serve says, and as the gateway does."""
        there = self._cluster.replicas()
        states = [state for _, state in there.values()]
        return states == ["RUNNING"] * replicas and not gone & set(there) and self._ready() == replicas

    def _ready(self) -> int:
        """Targets that the gateway can use."""
        with urllib.request.urlopen(f"{self._admin}/v1/state", timeout=5) as answer:
            targets = json.load(answer)["targets"]
        return sum(one["state"] == "ready" for one in targets)

    async def _until(self, name: str, true: Callable[[], bool]) -> None:
        """Note how long it takes; a head that does not answer yet is waited for."""
        began_at, why = clock.now(), ""
        while clock.now() < began_at + WITHIN_S:
            try:
                if await asyncio.to_thread(true):
                    self.told[name] = round(clock.now() - began_at, 2)
                    return
            except (OSError, ValueError) as error:
                why = f"{type(error).__name__}: {error}"
            await clock.sleep(0.1)
        raise AssertionError(f"{name}: not within {WITHIN_S:g} s {why}; so far {self.told}\n{self._cluster.log}")

    def _look_for_what_is_left(self, cluster: RayCluster) -> None:
        nodes = [cluster.head] if cluster.behind is None else [cluster.head, cluster.behind]
        sessions = [session for node in nodes for session in node.sessions]
        running = [" ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])]
        self.told["left"] = [str(one) for one in sessions if one.exists()]
        self.told["left"] += [line for line in running if any(str(one) in line for one in sessions) or "ray::" in line]

    def __repr__(self) -> str:
        return f"<Scenario {self.told}>"


if __name__ == "__main__":
    chosen_s = [float(word) for word in sys.argv[2:6]] or [5.0, 0.0, 10.0, 20.0]
    print(json.dumps(asyncio.run(Scenario(Path(sys.argv[1]), *chosen_s).run())))
