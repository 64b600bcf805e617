"""A gateway before pools on Ray Serve, under load, while replicas are killed, scaled, updated and ended.

    python -m tests.support.ray.scenario FOLDER

Runs in a network of its own (`in_own_network`), since Ray takes ports and listens on every address that there is. The
last line of stdout is JSON: of each phase how many requests were sent and how many of them failed, and how long what
the phase waits for took. The model is paced, so nothing here needs much of the machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml
from aiohttp import web

from tests.support.faults.fleet_stack import Part
from tests.support.mqtt.brokers import Mosquitto
from tests.support.ray.cluster import DASHBOARD, PYTHON, RayCluster
from tidegate import clock
from tidegate.tools.build.demo.paced import PacedCosts, add_paced

MODEL: Final = "steps"
RATE: Final = 40.0  # requests a second
BUDGET_MS: Final = 4000
WITHIN_S: Final = 60.0


def in_own_network() -> list[str] | None:
    """What begins a command that runs with the loopback alone; None where the kernel or the account does not let."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return None
    alone = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    tried = subprocess.run([*alone, "true"], capture_output=True, check=False)
    return alone if tried.returncode == 0 and PYTHON.is_file() else None


class Load:
    """Requests at a rate, whatever becomes of them; counted by the phase in which they were sent."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.phase = "calm"
        self.sent: dict[str, int] = {}
        self.failed: dict[str, list[str]] = {}

    async def run(self) -> None:
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as calls:
            while True:
                calls.create_task(self._call(session))
                await clock.sleep(1.0 / RATE)

    async def _call(self, session: aiohttp.ClientSession) -> None:
        phase = self.phase
        self.sent[phase] = self.sent.get(phase, 0) + 1
        body = {
            "inputs": [
                {"name": name, "shape": [1, 4], "datatype": "INT64", "data": [1, 1, 1, 1]}
                for name in ("input_ids", "attention_mask")
            ]
        }
        try:
            async with session.post(self._url, json=body, headers={"tidegate-budget-ms": str(BUDGET_MS)}) as answer:
                if answer.status != 200:
                    self.failed.setdefault(phase, []).append(f"{answer.status}: {(await answer.text())[:200]}")
        except aiohttp.ClientError as error:
            self.failed.setdefault(phase, []).append(f"{type(error).__name__}: {error}")


class Scenario:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.told: dict[str, Any] = {}

    async def run(self) -> dict[str, Any]:
        folder = self._folder
        add_paced(MODEL, PacedCosts(pool_ms=((1.0, 5.0), (1024.0, 20.0))), folder / "models")
        with Mosquitto(folder) as broker:
            mqtt = f"mqtt://127.0.0.1:{broker.port}"
            pool = {"name": "pool", "grpc_port": 18101, "mqtt": mqtt, "model_repository": str(folder / "models")}
            (folder / "pool.yaml").write_text(yaml.safe_dump({**pool, "threads": 1, "drain_s": 5}))
            common = {"model_repository": str(folder / "models"), "mqtt": mqtt, "grpc_port": 0, "log_level": "warning"}
            ports = {"http_port": 0, "metrics_port": 0, "admin_port": 0}
            gateway = Part("gateway", "gateway", {**common, **ports, "discovery": [{"source": "announce"}]}, folder)
            gateway.start()
            try:
                with RayCluster(folder) as cluster:
                    gateway.wait_ready()
                    await self._phases(cluster, gateway.addresses)
            finally:
                gateway.stop()
        return self.told

    async def _phases(self, cluster: RayCluster, addresses: dict[str, str]) -> None:
        self._cluster, self._admin = cluster, addresses["admin"]
        load = Load(f"{addresses['http']}/v2/models/{MODEL}/infer")
        args: dict[str, Any] = {"config": str(self._folder / "pool.yaml"), "replicas": 1, "cpus": 0.2}
        cluster.deploy(**args)
        self.told["first_s"] = await self._until(lambda: self._ready() == 1)
        async with self._signal(2), self._scaler():
            self.told["scaled_s"] = await self._until(lambda: self._ready() == 2)
            loading = asyncio.create_task(load.run(), name="load")
            await clock.sleep(3.0)
            load.phase = "killed"
            victim, pid = next((id, pid) for id, (pid, state) in cluster.replicas().items() if state == "RUNNING")
            os.kill(pid, signal.SIGKILL)
            self.told["back_s"] = await self._until(lambda: self._whole({victim}))
            load.phase = "updated"
            before = set(cluster.replicas())
            cluster.deploy(**{**args, "replicas": 2}, max_message_bytes=32 << 20)
            self.told["updated_s"] = await self._until(lambda: self._whole(before))
        load.phase = "fewer"
        cluster.ask("/api/v1/applications/pool/deployments/pool/scale", {"target_num_replicas": 1}, "POST")
        self.told["fewer_s"] = await self._until(lambda: self._ready() == 1 and len(cluster.replicas()) == 1)
        await clock.sleep(1.0)
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        cluster.ask("/api/serve/applications/", method="DELETE")
        self.told["ended_s"] = await self._until(lambda: self._ready() == 0)
        self.told |= {"sent": load.sent, "failed": load.failed, "session": str(cluster.session)}

    def _whole(self, gone: set[str]) -> bool:
        """Two replicas run and none of those that are to be gone, as Serve says, and as the gateway does."""
        there = self._cluster.replicas()
        states = [state for _, state in there.values()]
        return states == ["RUNNING"] * 2 and not gone & set(there) and self._ready() == 2

    def _ready(self) -> int:
        """Targets that the gateway can use."""
        import urllib.request

        with urllib.request.urlopen(f"{self._admin}/v1/state", timeout=5) as answer:
            targets = json.load(answer)["targets"]
        return sum(one["state"] == "ready" for one in targets)

    async def _until(self, true: Callable[[], bool]) -> float:
        began_at = clock.now()
        while clock.now() < began_at + WITHIN_S:
            if await asyncio.to_thread(true):
                return round(clock.now() - began_at, 2)
            await clock.sleep(0.1)
        raise AssertionError(f"not within {WITHIN_S:g} s; Serve says {self._cluster.status()}\n{self._cluster.log}")

    @asynccontextmanager
    async def _signal(self, replicas: int) -> AsyncIterator[None]:
        """A gateway's `/scaling`, which the gateway itself would know after a minute of traffic."""
        app = web.Application()
        app.router.add_get("/scaling", lambda _: _answer({"pool_replicas_needed": replicas, "known": True}))
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 18262)
        await site.start()
        try:
            yield
        finally:
            await runner.cleanup()

    @asynccontextmanager
    async def _scaler(self) -> AsyncIterator[None]:
        words = ["-m", "tidegate", "ray-scale", "--every", "1s", "--gateway", "http://127.0.0.1:18262"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *words, "--serve", f"http://127.0.0.1:{DASHBOARD}", stdout=asyncio.subprocess.PIPE
        )
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)
            said, _ = await process.communicate()
            self.told["scaler"] = {"code": process.returncode, "said": said.decode()}


async def _answer(words: dict[str, Any]) -> web.Response:
    return web.json_response(words)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(Scenario(Path(sys.argv[1])).run())))
