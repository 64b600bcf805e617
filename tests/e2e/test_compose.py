"""`deploy/compose` by its own words: its fields are Compose's, and each service's command runs, over TLS, as a process.

No engine of containers is needed for that. Changed is what a container would give: the folders that are mounted, the
names of the other services, and ports that are free on this machine. `tests/e2e/test_images.py` runs the images.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import jsonschema
import pytest
import yaml

from tests.e2e.stack import eventually
from tests.support.mqtt.brokers import MOSQUITTO
from tidegate.testing.ports import free_ports

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "deploy" / "compose"
OURS: Final = {"pool": "pool", "edge-1": "edge", "edge-2": "edge", "gateway": "gateway"}
PROGRAM: Final = (sys.executable, "-m", "tidegate")
pytestmark = [pytest.mark.slow, pytest.mark.e2e]


def composed() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
    return found


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """What is mounted where: the host's side by the container's."""
    found = {}
    for one in service.get("volumes", ()):
        source, where = re.fullmatch(r"(\$\{.*\}|[^:]+):([^:]+)(?::ro)?", one).groups()  # type: ignore[union-attr]
        found[where] = source
    return found


def test_its_fields_are_those_of_compose() -> None:
    schema = yaml.safe_load((ROOT / "tests" / "support" / "compose.schema.yaml").read_text())
    validator = jsonschema.Draft202012Validator(schema)

    assert [one.message for one in validator.iter_errors(composed())] == []
    wrong = composed()
    wrong["services"]["gateway"]["ports"] = ["8000:8000"]  # which everybody could reach
    wrong["services"]["pool"]["readonly"] = True
    assert len(list(validator.iter_errors(wrong))) == 2


def test_what_it_names_is_there() -> None:
    found = composed()
    services, volumes = found["services"], set(found["volumes"])

    for name, service in services.items():
        assert set(service.get("depends_on", ())) <= set(services)
        assert set(service["networks"]) <= set(found["networks"])
        for source in mounts(service).values():
            if source.startswith(("./", "../")) and not source.startswith("./state"):
                assert (COMPOSE / source).exists(), f"{name}: {source}"
            elif not source.startswith((".", "$")):
                assert source in volumes, f"{name}: {source}"
    for name in OURS:
        service = services[name]
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
        assert "localhost/tidegate-" in service["image"]


def test_prometheus_asks_where_the_services_tell_their_metrics() -> None:
    scraped = yaml.safe_load((COMPOSE / "prometheus.yaml").read_text())["scrape_configs"]
    ports = {
        "gateway": 8002,
        "pool": yaml.safe_load((COMPOSE / "config" / "cloud.yaml").read_text())["metrics_port"],
        "edge": yaml.safe_load((COMPOSE / "config" / "device.yaml").read_text())["metrics_port"],
    }
    asked = {target for one in scraped for group in one["static_configs"] for target in group["targets"]}

    assert asked == {f"{name}:{ports[role]}" for name, role in OURS.items()}
    assert {one["job_name"] for one in scraped} == {f"tidegate-{role}" for role in ports}


def program_in(folder: Path) -> Path:
    """The command `tidegate` as one file, which the script wants."""
    program = folder / "tidegate"
    program.write_text(f'#!/bin/sh\nexec {" ".join(PROGRAM)} "$@"\n')
    program.chmod(0o755)
    return program


def prepare(state: Path, program: Path) -> None:
    subprocess.run(
        [COMPOSE / "prepare.sh", state],
        check=True, capture_output=True, timeout=200, env=os.environ | {"TIDEGATE": str(program)},
    )  # fmt: skip


class Site:
    """The services of ours and the broker as processes."""

    def __init__(self, folder: Path, models: Path) -> None:
        self.folder, self.models, self.state = folder, models, folder / "state"
        self.first = free_ports(12)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def ports(self) -> dict[str, int]:
        """By service and the port that it has in its container."""
        wanted = ("broker:8883", "pool:8101", "pool:8012", "edge-1:9001", "edge-1:9000", "edge-1:8022", "edge-2:9001",
                  "edge-2:9000", "edge-2:8022", "gateway:8000", "gateway:8001", "gateway:8002")  # fmt: skip
        return {name: self.first + place for place, name in enumerate(wanted)}

    def prepare(self) -> None:
        for _ in range(2):  # the second run changes nothing
            prepare(self.state, program_in(self.folder))

    def here(self, service: str, text: str) -> str:
        """A file of a container, as it has to be on this machine."""
        for name, port in self.ports.items():
            text = text.replace(name, f"127.0.0.1:{port}")
        for where, source in mounts(composed()["services"][service]).items():
            if source.startswith("./state/"):
                text = text.replace(where, str(self.state / source.removeprefix("./state/")))
        text = text.replace("/var/lib/tidegate/models", str(self.models))
        text = text.replace("/var/lib/tidegate", str(self.folder / service))
        return text.replace("0.0.0.0", "127.0.0.1")

    def configure(self) -> None:
        own = {"pool": ("grpc_port", 8101), "gateway": ("http_port", 8000), "edge": ("grpc_port", 9001)}
        for service, role in OURS.items():
            path = self.path(service)
            config = yaml.safe_load(self.here(service, path.read_text()))
            more = {"metrics_port": 8002, "grpc_port": 8001} if role == "gateway" else {}
            more |= {"http_port": 9000} if role == "edge" else {}
            for key, port in (own[role], *more.items()):
                config[key] = self.ports[f"{service}:{port}"]
            if "metrics_port" in config and role != "gateway":
                config["metrics_port"] = self.ports[f"{service}:{8012 if role == 'pool' else 8022}"]
            config |= {"admin_port": 0} if role == "gateway" else {}
            config |= {"warmup_budget_s": 0.5} if role == "pool" else {}
            path.write_text(yaml.safe_dump(config))
        conf = self.state / "broker" / "mosquitto.conf"
        text = self.here("broker", conf.read_text()).replace("/var/lib/mosquitto", str(self.folder))
        text = text.replace("listener 8883", f"listener {self.ports['broker:8883']} 127.0.0.1")
        conf.write_text(f"{text}\nuser root\n" if os.geteuid() == 0 else text)

    def path(self, service: str) -> Path:
        """The configuration that the service's command names."""
        inside = Path(composed()["services"][service]["command"][-1])
        return self.state / service / inside.name

    def start(self, service: str) -> None:
        command = [self.here(service, word) for word in composed()["services"][service]["command"]]
        program = [str(MOSQUITTO), *command[1:]] if service == "broker" else [*PROGRAM, *command]
        with open(self.folder / f"{service}.log", "wb") as log:
            self.processes[service] = subprocess.Popen(program, stdout=log, stderr=log)

    def wait_healthy(self, service: str) -> None:
        """By the command of the image's health check."""
        words = ["health", OURS[service], "--config", str(self.path(service)), "--timeout", "20", "--wait", "120"]
        done = subprocess.run([*PROGRAM, *words], capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr + (self.folder / f"{service}.log").read_text()

    def stop(self) -> dict[str, int]:
        for process in self.processes.values():
            process.terminate()
        codes = {}
        for name, process in self.processes.items():
            try:
                codes[name] = process.wait(60)
            finally:
                process.kill()
        return codes


@pytest.mark.timeout(300)
def test_preparing_again_keeps_what_was_edited_and_hands_out_renewed_certificates(tmp_path: Path) -> None:
    state, program = tmp_path / "state", program_in(tmp_path)
    prepare(state, program)
    edited = [state / name for name in ("gateway/site.yaml", "pool/cloud.yaml", "edge-1/device.yaml")]
    for path in edited:
        path.write_text(f"{path.read_text()}auth: {{keys: /etc/tidegate/keys}}\n")
    subprocess.run([program, "pki", "renew", "broker/main", "--force", "--dir", state / "pki"], check=True, timeout=100)
    prepare(state, program)

    assert all("auth: " in path.read_text() for path in edited), "the site would be open again"
    for given, kept in (("broker/broker.crt", "broker/main.crt"), ("broker/broker.key", "broker/main.key"),
                        ("broker/ca.crt", "ca.crt"), ("gateway/pki/tls.crt", "gateway/main.crt")):  # fmt: skip
        assert (state / given).read_bytes() == (state / "pki" / kept).read_bytes(), given


@pytest.fixture
def site(tmp_path: Path, digits: Path) -> Iterator[Site]:
    one = Site(tmp_path, digits)
    try:
        yield one
    finally:
        one.stop()


@pytest.mark.needs_mosquitto
@pytest.mark.skipif(MOSQUITTO is None, reason="the Mosquitto broker is not installed")
@pytest.mark.timeout(600)
def test_the_services_commands_make_a_site(site: Site) -> None:
    site.prepare()
    site.configure()
    for service in ("broker", "pool", "edge-1", "edge-2"):
        site.start(service)
    for service in ("pool", "edge-1", "edge-2"):
        site.wait_healthy(service)
    site.start("gateway")
    site.wait_healthy("gateway")

    trust = ssl.create_default_context(cafile=str(site.state / "pki" / "ca.crt"))
    base = f"https://localhost:{site.ports['gateway:8000']}"
    eventually(lambda: targets_up(base, trust) == 3, 90, "the gateway has the pool and both devices")
    image = {"name": "image", "datatype": "FP32", "shape": [1, 1, 8, 8], "data": [0.5] * 64}
    request = urllib.request.Request(
        f"{base}/v2/models/digits/infer", json.dumps({"inputs": [image]}).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30, context=trust) as answer:
        assert json.load(answer)["outputs"][0]["shape"] == [1, 10]
        assert answer.headers["tidegate-served-by"] in {"edge/edge-1", "edge/edge-2", "pool/main"}
    with urllib.request.urlopen(f"http://127.0.0.1:{site.ports['pool:8012']}/metrics", timeout=30) as answer:
        assert b"tidegate_" in answer.read()

    codes = site.stop()
    assert all(codes[service] == 0 for service in OURS), codes


def targets_up(base: str, trust: ssl.SSLContext) -> int:
    """How many targets the gateway's metrics say are up."""
    address = base.rpartition(":")[0] + f":{int(base.rpartition(':')[2]) + 2}/metrics"
    with urllib.request.urlopen(address, timeout=30, context=trust) as answer:
        text = answer.read().decode()
    return sum(
        float(line.rpartition(" ")[2]) == 1.0 for line in text.splitlines() if line.startswith("tidegate_target_up{")
    )


@pytest.mark.skipif(
    shutil.which("promtool") is None and not Path(sys.executable).with_name("promtool").exists(),
    reason="promtool is not installed here",
)
def test_prometheus_takes_its_configuration(tmp_path: Path) -> None:
    promtool = shutil.which("promtool") or str(Path(sys.executable).with_name("promtool"))
    text = (COMPOSE / "prometheus.yaml").read_text()
    (tmp_path / "ca.crt").write_text("")
    (tmp_path / "prometheus.yaml").write_text(text.replace("/etc/prometheus/", f"{tmp_path}/"))
    shutil.copy(ROOT / "deploy" / "prometheus" / "tidegate-rules.yaml", tmp_path)

    done = subprocess.run(
        [promtool, "check", "config", str(tmp_path / "prometheus.yaml")], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
