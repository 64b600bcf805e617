"""The Debian package of a device, installed by dpkg into a fresh Debian without a network, and started as by its unit.

`make image-test` runs this, since it makes a Debian first. systemd is not there: the unit's command is run as its user.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.e2e.stack import eventually
from tests.e2e.test_chart_processes import infer
from tests.support.containers import ROOT
from tidegate.testing.ports import free_ports

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.skipif(not os.environ.get("TIDEGATE_IMAGE_TEST"), reason="takes minutes: make image-test"),
    pytest.mark.skipif(
        os.geteuid() != 0 or any(shutil.which(one) is None for one in ("mmdebstrap", "dpkg-deb", "unshare")),
        reason="needs root, mmdebstrap and dpkg-deb",
    ),
    pytest.mark.timeout(3600),
]
NEEDED = "python3,adduser,libstdc++6"


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small Debian with the package in it."""
    folder = tmp_path_factory.mktemp("debian")
    root, built = folder / "root", Path(os.environ.get("TIDEGATE_PACKAGES") or folder)
    if not list(built.glob("tidegate-edge_*.deb")):
        subprocess.run([ROOT / "deploy" / "debian" / "build.sh", "edge", built], check=True, timeout=3000)
    subprocess.run(
        ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={NEEDED}", "bookworm", root], check=True, timeout=900
    )
    package = next(built.glob("tidegate-edge_*.deb"))
    shutil.copy(package, root / "tmp" / package.name)
    # In a network of its own, which has nothing: all that it needs is in the package.
    inside = ["unshare", "--net", "chroot", str(root), "dpkg", "--install", f"/tmp/{package.name}"]
    done = subprocess.run(inside, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    yield root
    shutil.rmtree(root)


def in_debian(root: Path, *command: str) -> list[str]:
    """A command of the unit's user, with /proc, which ends with whoever started it."""
    mounts = (
        f"mount -t proc proc {root}/proc && mount --bind /dev {root}/dev && exec chroot --userspec=tidegate:tidegate"
    )
    return ["unshare", "--mount", "sh", "-c", f'{mounts} {root} "$@"', "sh", *command]


def test_an_installed_device_starts_as_its_unit_says_and_answers(debian: Path, digits: Path) -> None:
    port = free_ports(2)
    profile = debian / "etc" / "tidegate" / "device.yaml"
    config = yaml.safe_load(profile.read_text())
    for key in ("tls", "mqtt", "advertise"):  # which are the site's
        del config[key]
    profile.write_text(yaml.safe_dump(config | {"host": "127.0.0.1", "grpc_port": port, "http_port": port + 1}))
    shutil.copytree(digits, debian / "var" / "lib" / "tidegate" / "models")
    given = ["chroot", debian, "chown", "--recursive", "tidegate:tidegate", "/var/lib/tidegate/models"]
    subprocess.run(given, check=True, timeout=60)
    unit = (debian / "usr" / "lib" / "systemd" / "system" / "tidegate-edge.service").read_text()
    command = re.search(r"^ExecStart=(.*)$", unit, re.M)
    assert command is not None

    with subprocess.Popen(in_debian(debian, *command[1].split()), stdout=subprocess.DEVNULL) as process:
        try:
            words = ["/opt/tidegate/bin/tidegate", "health", "edge", "--config", "/etc/tidegate/device.yaml"]
            ask = in_debian(debian, *words, "--timeout", "20", "--wait", "120")
            done = subprocess.run(ask, capture_output=True, text=True, timeout=300, check=False)
            assert done.returncode == 0, done.stderr
            assert infer(f"http://127.0.0.1:{port + 1}")[0]["outputs"][0]["shape"] == [1, 10]
            status = Path(f"/proc/{process.pid}/status").read_text()
            assert re.search(r"^Uid:\s+(\d+)", status, re.M)[1] != "0"  # type: ignore[index]
        finally:
            process.terminate()
            eventually(lambda: process.poll() is not None, 60, "the agent ends")
    assert process.returncode == 0


def test_a_restart_after_an_upgrade_says_that_it_is_one(debian: Path) -> None:
    state = debian / "var" / "lib" / "tidegate" / "state"
    state.mkdir(exist_ok=True)
    subprocess.run(["chroot", debian, "chown", "tidegate:tidegate", "/var/lib/tidegate/state"], check=True, timeout=60)
    (package,) = (debian / "tmp").glob("tidegate-edge_*.deb")  # the same once more is an upgrade to dpkg
    again = ["chroot", str(debian), "dpkg", "--install", f"/tmp/{package.name}"]
    done = subprocess.run(again, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (state / "leaving").read_text() == "update\n"


def test_it_is_removed_without_a_trace_but_what_is_the_operators(debian: Path) -> None:
    done = subprocess.run(
        ["chroot", debian, "dpkg", "--remove", "tidegate-edge"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert not (debian / "opt" / "tidegate" / "bin" / "tidegate").exists()
    assert (debian / "etc" / "tidegate" / "device.yaml").exists(), "it was changed, so it stays"
