"""What the operator renders starts real processes, and a changed resource reaches them without a lost request.

A few lines take the place of a cluster's kubelet: they run pods of a Deployment, a StatefulSet and a DaemonSet as
processes on loopback addresses of their own, with the ConfigMap that is mounted, the command and the variables of the
container; and they say what controllers say. Changed is what a cluster gives: addresses and where files are.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.discovery.cluster_api import SERVICE, ClusterApi, endpoint, slice_of
from tests.support.operator.cluster import OperatorCluster
from tests.support.operator.operating import operating, until
from tests.support.operator.resources import body
from tidegate import clock
from tidegate.testing.ports import free_ports
from tidegate.tools.build.demo.paced import PacedCosts, add_paced

pytestmark = [pytest.mark.slow, pytest.mark.e2e]
MODULES = {"gateway": "gateway", "pool": "cloud_pool", "edge": "edge_agent"}
START_S = 90.0
COSTS = ((1, 2), (100, 10))


class Pod:
    """One process, as the template of a workload says; at an address of its own."""

    def __init__(self, cluster: OperatorCluster, workload: dict[str, Any], folder: Path, address: str, **changes: Any):
        template = workload["spec"]["template"]
        (container,) = template["spec"]["containers"]
        self.address = address
        self.name = f"{workload['metadata']['name']}-{address.rpartition('.')[2]}"
        self.checksum = template["metadata"]["annotations"]["checksum/config"]
        role, option, path = container["args"]
        assert option == "--config"
        volumes = {one["name"]: one["configMap"]["name"] for one in template["spec"]["volumes"] if "configMap" in one}
        self.folders = {mount["name"]: folder / self.name / mount["name"] for mount in container["volumeMounts"]}
        for volume, config_map in volumes.items():
            self.mount(volume, cluster.one("ConfigMap", config_map)["data"])
        file = self.folders["config"] / Path(path).name
        config = yaml.safe_load(file.read_text())
        own = {"host": address, **({"admin_host": address} if "admin_port" in config else {})}
        file.write_text(yaml.safe_dump({**config, **changes, **own}))
        self._log = (folder / self.name / "log").open("wb")
        variables = {one["name"]: one.get("value", self.name) for one in container["env"]}
        mounts = {one["mountPath"]: self.folders[one["name"]] for one in container["volumeMounts"]}
        for name, value in variables.items():
            parent = mounts.get(str(Path(value).parent))
            variables[name] = str(parent / Path(value).name) if parent else value
        self.command = [sys.executable, "-m", MODULES[role], "--config", str(file)]
        self.environment = os.environ | variables
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.DEVNULL, stderr=self._log, env=self.environment, cwd=folder
        )

    def mount(self, volume: str, data: dict[str, str]) -> None:
        self.folders[volume].mkdir(parents=True, exist_ok=True)
        for name, text in data.items():
            (self.folders[volume] / name).write_text(text)

    async def ended(self) -> int:
        """End it as a kubelet does; return its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return await asyncio.to_thread(self.process.wait, 40)
        finally:
            self.process.kill()
            self._log.close()

    def log(self) -> str:
        return Path(self._log.name).read_text(errors="replace")[-2000:]


def answers(url: str, body: bytes | None = None) -> int:
    """The status; 0 without an answer."""
    request = urllib.request.Request(url, body, {"content-type": "application/json"} if body else {})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return 0


async def ready(pod: Pod, port: int) -> None:
    for _ in range(int(START_S / 0.1)):
        assert pod.process.poll() is None, pod.log()
        if await asyncio.to_thread(answers, f"http://{pod.address}:{port}/v2/health/ready") == 200:
            return
        await clock.sleep(0.1)
    raise AssertionError(f"{pod.name} is not ready: {pod.log()}")


async def call_all_along(service: list[Pod], port: int, seen: Counter[int]) -> None:
    """A caller by the Service: each request to one of its pods in turn."""
    tensor = {"datatype": "INT64", "shape": [1, 4], "data": [1, 1, 1, 1]}
    sent = json.dumps({"inputs": [{"name": name, **tensor} for name in ("input_ids", "attention_mask")]}).encode()
    while True:
        pod = service[sum(seen.values()) % len(service)]
        url = f"http://{pod.address}:{port}/v2/models/encoder/infer"
        seen[await asyncio.to_thread(answers, url, sent)] += 1
        await clock.sleep(0.02)


async def test_a_changed_resource_reaches_processes_without_a_lost_request(tmp_path: Path) -> None:
    models = tmp_path / "models"
    add_paced("encoder", PacedCosts(edge_ms=COSTS, pool_ms=COSTS), models)
    port = free_ports(8)
    volume = {"modelsVolume": {"hostPath": {"path": str(models)}}}
    ports = dict(zip(("http_port", "grpc_port", "metrics_port", "admin_port"), range(port, port + 4), strict=True))
    pods: list[Pod] = []
    async with (
        OperatorCluster(controllers=False) as cluster,
        ClusterApi(service="cores-pool") as api,
        operating(cluster),
    ):
        cluster.send(body("TidegatePool", "cores", **volume, config={"grpc_port": port + 4, "metrics_port": None}))
        cluster.send(body("TidegateGateway", "main", **volume, replicas=1, pools=["cores"], config=ports))
        await until(lambda: {"main-gateway"} == cluster.names("Deployment"), "a Deployment")
        await until(lambda: {"cores-pool"} == cluster.names("StatefulSet"), "a StatefulSet")
        source = {
            "source": "kubernetes",
            "service": "cores-pool",
            "port_name": "grpc",
            "server": api.url,
            "namespace": "prod",
        }
        changes = {"model_repository": str(models), "discovery": [source]}
        try:
            pool = Pod(
                cluster, cluster.one("StatefulSet", "cores-pool"), tmp_path, "127.0.7.1", model_repository=str(models)
            )
            pods.append(pool)
            where = {"name": "cores-pool-1", "namespace": "prod", "labels": {SERVICE: "cores-pool"}}
            api.put(slice_of("cores-pool-1", port + 4, endpoint(pool.name, pool.address), metadata=where))
            first = Pod(cluster, cluster.one("Deployment", "main-gateway"), tmp_path, "127.0.7.2", **changes)
            pods.append(first)
            await ready(first, port)
            cluster.roll_out("Deployment", "main-gateway")

            service, seen = [first], Counter[int]()
            calling = asyncio.create_task(call_all_along(service, port, seen))
            await until(lambda: seen[200] >= 10, "answers")
            cluster.change("TidegateGateway", "main", config={**ports, "max_body_bytes": 1_048_576})
            await until(lambda: new_checksum(cluster) != first.checksum, "a new template")
            assert len([one for one in cluster.names("ConfigMap") if one.startswith("main-gateway")]) == 2
            second = Pod(cluster, cluster.one("Deployment", "main-gateway"), tmp_path, "127.0.7.3", **changes)
            pods.append(second)
            await ready(second, port)
            service.append(second)
            service.remove(first)
            await clock.sleep(0.5)
            assert await first.ended() == 0
            cluster.roll_out("Deployment", "main-gateway")
            before = seen[200]
            await until(lambda: seen[200] >= before + 10, "answers of the new one")
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)
            assert set(seen) == {200}, seen
            assert "1048576" in await asyncio.to_thread(
                refusal, f"http://{second.address}:{port}/v2/models/encoder/infer"
            )
            await until(
                lambda: len([one for one in cluster.names("ConfigMap") if one.startswith("main-gateway")]) == 1,
                "one left",
            )
        finally:
            codes = [await pod.ended() for pod in pods]
    assert codes == [0, 0, 0]


def new_checksum(cluster: OperatorCluster) -> str:
    template = cluster.one("Deployment", "main-gateway")["spec"]["template"]
    return str(template["metadata"]["annotations"]["checksum/config"])


def refusal(url: str) -> str:
    """What is said to a body of 2 MB."""
    try:
        urllib.request.urlopen(urllib.request.Request(url, b"x" * 2_000_000), timeout=20)
    except urllib.error.HTTPError as error:
        with error:
            return error.read().decode()
    raise AssertionError("it was taken")


async def test_settings_of_a_group_reach_its_agents_without_a_start(tmp_path: Path) -> None:
    models = tmp_path / "models"
    add_paced("encoder", PacedCosts(edge_ms=COSTS, pool_ms=COSTS), models)
    port = free_ports(3)
    config = {"grpc_port": port, "http_port": port + 1, "metrics_port": None}
    settings = {"max_queue_size": 32}
    async with OperatorCluster(controllers=False) as cluster, operating(cluster):
        groups = [{"name": "kiosks", "settings": settings}]
        cluster.send(body("TidegateFleet", "shops", groups=groups, config=config, pkiPath=""))
        await until(lambda: {"shops-edge-kiosks"} == cluster.names("DaemonSet"), "a DaemonSet")
        state = str(tmp_path / "state")
        workload = cluster.one("DaemonSet", "shops-edge-kiosks")
        agent = Pod(cluster, workload, tmp_path, "127.0.7.4", model_repository=str(models), state_dir=state)
        try:
            await ready(agent, port + 1)
            assert "max_queue_size" in await asyncio.to_thread(doctor, agent)
            cluster.change("TidegateFleet", "shops", groups=[{"name": "kiosks", "settings": {"max_queue_size": 8}}])
            await until(lambda: "max_queue_size: 8\n" in settings_of(cluster).values(), "the file says so")
            assert cluster.one("DaemonSet", "shops-edge-kiosks")["spec"] == workload["spec"]
            agent.mount("settings", settings_of(cluster))
            for _ in range(100):
                if "8" in (said := await asyncio.to_thread(doctor, agent)):
                    break
                await clock.sleep(0.2)
            assert "max_queue_size" in said and agent.process.poll() is None
        finally:
            code = await agent.ended()
    assert code == 0


def settings_of(cluster: OperatorCluster) -> dict[str, str]:
    found: dict[str, str] = cluster.one("ConfigMap", "shops-edge-settings")["data"]
    return found


def doctor(agent: Pod) -> str:
    done = subprocess.run(
        [*agent.command, "doctor"], env=agent.environment, capture_output=True, text=True, check=False
    )
    return "\n".join(line for line in done.stdout.splitlines() if "max_queue_size" in line)
