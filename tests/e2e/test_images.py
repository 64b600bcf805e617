"""The images, built from nothing but packages and driven as containers: read-only, without rights, without a shell.

`make image-test` runs this; it takes some minutes and two gigabytes, so `make test` leaves it out. Images are kept in
TIDEGATE_IMAGE_STORE (by default .tidegate/images) for the next run.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePath

import pytest
import yaml

from tests.e2e.stack import eventually
from tests.e2e.test_chart_processes import infer, status_of
from tests.support.containers import ROOT, Podman, missing, podman
from tests.tidegate.test_sbom import TOOL, complaints
from tidegate.testing.ports import free_ports

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.skipif(not os.environ.get("TIDEGATE_IMAGE_TEST"), reason="takes minutes: make image-test"),
    pytest.mark.skipif(bool(missing()), reason=f"not here: {', '.join(missing())}"),
    pytest.mark.timeout(3600),
]
USER = 65532
# Of the whole image, as podman counts it: more has to be meant.
MOST_BYTES = {"gateway": 300e6, "edge": 330e6, "pool-cpu": 950e6}
FILES = {"gateway": "site", "edge": "device", "pool-cpu": "cloud"}
READY_WITHIN_S = 180.0


def tag(image: str) -> str:
    return f"localhost/tidegate-{image}:test"


@pytest.fixture(scope="module")
def engine() -> Iterator[Podman]:
    store = Path(os.environ.get("TIDEGATE_IMAGE_STORE") or ROOT / ".tidegate" / "images")
    with podman(store) as one:
        for image in MOST_BYTES:
            if os.environ.get("TIDEGATE_IMAGE_TEST") != "built":
                environment = os.environ | {
                    "ENGINE": " ".join(one.command),
                    "BUILD_FLAGS": "--isolation=chroot --layers",
                }
                script = ROOT / "deploy" / "containers" / "build.sh"
                subprocess.run([script, image, tag(image)], check=True, env=environment, timeout=3000)
        yield one


@pytest.fixture
def running(engine: Podman, models: Path, tmp_path: Path) -> Iterator[int]:
    """Pool, edge and gateway as containers; yields the first of their ports, the gateway's HTTP port."""
    port = free_ports(8)
    mine = tmp_path / "models"
    shutil.copytree(models, mine)
    configs = {
        "gateway": {"http_port": port, "grpc_port": port + 1, "metrics_port": port + 2, "admin_port": port + 3,
                    "targets": [{"name": "main", "address": f"127.0.0.1:{port + 4}"}]},
        "pool-cpu": {"name": "main", "grpc_port": port + 4, "warmup_budget_s": 0.5},
        "edge": {"name": "edge-1", "grpc_port": port + 6, "http_port": port + 7,
                 "state_dir": "/var/lib/tidegate/state"},
    }  # fmt: skip
    (tmp_path / "config").mkdir()
    for image, config in configs.items():
        config["model_repository"] = "/models"
        (tmp_path / "config" / f"{FILES[image]}.yaml").write_text(yaml.safe_dump(config))
    for path in [mine, *mine.rglob("*")]:
        os.chown(path, USER, USER)  # its list of trusted files is readable by its owner alone
    os.chmod(tmp_path, 0o755)
    mounts = (f"--volume={tmp_path}/config:/etc/tidegate:ro", f"--volume={mine}:/models:ro")
    try:
        for image in ("pool-cpu", "edge", "gateway"):
            engine.run(image, tag(image), *mounts)
        yield port
    finally:
        for image in configs:
            engine("rm", "--force", "--time=1", image, check=False)


def health(engine: Podman, image: str) -> int:
    """What the image's own health check says; the check itself, for podman's needs systemd."""
    command = engine.inspect(tag(image))["Healthcheck"]["Test"]
    assert command[0] == "CMD"
    return engine("exec", image, *command[1:], check=False).returncode


def is_ready(engine: Podman, image: str) -> bool:
    state = engine.inspect(image)["State"]
    assert state["Running"], engine("logs", image).stdout
    return health(engine, image) == 0


@pytest.mark.parametrize("image", sorted(MOST_BYTES))
def test_an_image_is_small_and_says_what_it_is(engine: Podman, image: str) -> None:
    found = engine.inspect(tag(image))
    config = found["Config"]

    assert found["Size"] <= MOST_BYTES[image]
    assert config["User"] == f"{USER}:{USER}"
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert config["Labels"]["org.opencontainers.image.version"] == "0.2.0"
    assert len(config["Labels"]["org.opencontainers.image.revision"]) == 40
    assert found["Healthcheck"]["Test"][-3] == {"pool-cpu": "pool"}.get(image, image)


@pytest.mark.parametrize("image", sorted(MOST_BYTES))
def test_an_image_has_no_shell_and_nothing_that_installs(engine: Podman, image: str) -> None:
    engine("create", f"--name=files-{image}", tag(image))
    try:
        exported = subprocess.run(
            [*engine.command, "export", f"files-{image}"], capture_output=True, timeout=300, check=True
        )
    finally:
        engine("rm", "--force", f"files-{image}")
    with tarfile.open(fileobj=io.BytesIO(exported.stdout)) as archive:
        files = [PurePath(name) for name in archive.getnames()]

    programs = {one.name for one in files if one.parent.name in ("bin", "sbin")}
    assert "tidegate" in programs
    assert not programs & {"sh", "bash", "dash", "apt", "dpkg", "perl", "pip", "pip3", "curl", "tar", "su", "mount"}


@pytest.mark.skipif(not TOOL.exists(), reason="`make checks` could not set up CycloneDX here")
@pytest.mark.parametrize("image", sorted(MOST_BYTES))
def test_an_image_carries_its_bill_of_materials(engine: Podman, image: str) -> None:
    engine("create", f"--name=bill-{image}", tag(image))
    try:
        done = engine("cp", f"bill-{image}:/opt/tidegate/share/sbom.cdx.json", "-", check=False)
    finally:
        engine("rm", "--force", f"bill-{image}")
    bill = json.loads(done.stdout[done.stdout.index("{") :].rstrip("\0"))

    assert complaints(bill) == [[]]
    addresses = {one["purl"].partition("@")[0] for one in bill["components"]}
    assert {"pkg:pypi/grpcio", "pkg:deb/debian/libssl3", "pkg:deb/debian/ca-certificates"} <= addresses
    assert ("pkg:pypi/torch" in addresses) is (image == "pool-cpu")
    assert ("pkg:pypi/onnxruntime" in addresses) is (image == "edge")


def test_containers_serve_drain_and_come_back(engine: Podman, running: int) -> None:
    base = f"http://127.0.0.1:{running}"
    for image in ("pool-cpu", "edge", "gateway"):
        eventually(lambda image=image: is_ready(engine, image), READY_WITHIN_S, f"{image} is ready")  # type: ignore[misc]

    answer, headers = infer(base)
    assert answer["outputs"][0]["shape"] == [1, 10]
    assert headers["tidegate-served-by"] == "pool/main"
    assert infer(f"http://127.0.0.1:{running + 7}")[0]["outputs"][0]["shape"] == [1, 10], "the edge, by itself"
    writes = "open('/opt/tidegate/x', 'w')"
    refused = engine("exec", "gateway", "/opt/tidegate/bin/python", "-c", writes, check=False)
    assert "Read-only file system" in refused.stderr
    rights = "print([one for one in open('/proc/self/status') if one.startswith(('CapEff', 'Uid', 'NoNewPrivs'))])"
    assert f"Uid:\\t{USER}" in (shown := engine("exec", "pool-cpu", "/opt/tidegate/bin/python", "-c", rights).stdout)
    assert "CapEff:\\t0000000000000000" in shown and "NoNewPrivs:\\t1" in shown
    admin = f"http://127.0.0.1:{running + 3}"
    assert "pool/main" in engine("exec", "gateway", "tidegate", "status", "--admin", admin).stdout

    engine("kill", "--signal=KILL", "pool-cpu")
    eventually(lambda: status_of(f"{base}/v2/health/ready") == 503, 60, "the gateway has nothing left")
    assert health(engine, "gateway") == 1
    engine("start", "pool-cpu")
    eventually(lambda: status_of(f"{base}/v2/health/ready") == 200, READY_WITHIN_S, "the pool is back")
    assert infer(base)[1]["tidegate-served-by"] == "pool/main"

    for image in ("gateway", "edge", "pool-cpu"):
        engine("stop", "--time=45", image)
        assert engine.inspect(image)["State"]["ExitCode"] == 0, engine("logs", image).stdout
