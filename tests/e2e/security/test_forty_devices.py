"""The guide `docs/forty-devices.md` is followed to the letter, with `docs/edge-device.md`, on machines of their own.

A machine is a set of namespaces: its own /etc, /opt, /var/lib, processes, and a network that all of them share. Every
command comes from the documents' code blocks. Two things are not what they are elsewhere: the virtual environment in
/opt/tidegate is a program that runs this checkout, and `systemctl enable --now` is a program that does with a unit's
User, Group, StateDirectory and ExecStart what systemd does.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.mqtt.brokers import MOSQUITTO
from tests.support.processes import has_ended
from tidegate import clock

ROOT = Path(__file__).resolve().parents[3]
VENV = "python3 -m venv /opt/tidegate && /opt/tidegate/bin/pip install '.[edge]'"
TRIED = 3  # of the forty devices
_TOOLS = ("unshare", "nsenter", "setpriv", "systemd-sysusers", "ip")
_PATH = "/opt/stubs:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_TIDEGATE = f"""#!/bin/sh
PYTHONDONTWRITEBYTECODE=1 PYTHONPATH={ROOT} exec {sys.executable} -P -m tidegate.cli "$@"
"""
_SYSTEMCTL = f"""#!{sys.executable}
import os, re, shlex, subprocess, sys
assert sys.argv[1:3] == ["enable", "--now"], sys.argv
unit = open(f"/etc/systemd/system/{{sys.argv[3]}}.service").read()
keys = dict(re.findall(r"^([A-Za-z]+)=(.*)$", unit, re.M))
user, group = keys["User"], keys["Group"]
state = "/var/lib/" + keys["StateDirectory"]
subprocess.run(["install", "-d", "-m", "755", "-o", user, "-g", group, state], check=True)
environment = [f"PATH={_PATH}", *(f"{{k}}={{v}}" for k, v in os.environ.items() if k.startswith("TIDEGATE_"))]
become = ["setpriv", "--reuid", user, "--regid", group, "--init-groups", "--no-new-privs", "env", "-i", *environment]
out = open("unit.out", "wb")
subprocess.Popen(become + shlex.split(keys["ExecStart"]), cwd="/", stdin=subprocess.DEVNULL, stdout=out, stderr=out)
"""


def namespaces_work() -> bool:
    if os.geteuid() != 0 or MOSQUITTO is None or any(shutil.which(tool) is None for tool in _TOOLS):
        return False
    trial = "mount -t tmpfs t /mnt && mkdir /mnt/u /mnt/w && "
    trial += "mount -t overlay o -o lowerdir=/etc,upperdir=/mnt/u,workdir=/mnt/w /etc"
    tried = subprocess.run(["unshare", "-mnp", "--fork", "sh", "-ec", trial], capture_output=True, check=False)
    return tried.returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.needs_mosquitto,
    pytest.mark.skipif(
        not namespaces_work(), reason="needs root, namespaces with overlays, Mosquitto, and systemd-sysusers"
    ),
]


def opened() -> list[str]:
    """Commands that let every user of a machine run this interpreter, also where only root may enter its folder."""
    needed = {Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), ROOT}
    above = {parent for path in needed for parent in path.parents if not parent.stat().st_mode & stat.S_IXOTH}
    closed = min(above, key=lambda path: len(path.parts), default=None)
    if closed is None:
        return []
    held = [path for path in sorted(needed) if path.is_relative_to(closed)]
    commands = []
    for number, path in enumerate(held):
        commands += [f"mkdir /mnt/h{number}", f"mount --bind {path} /mnt/h{number}"]
    commands += [f"mount -t tmpfs -o mode=755 t {closed}"]
    for number, path in enumerate(held):
        commands += [f"mkdir -p {path}", f"mount --bind /mnt/h{number} {path}"]
    return commands


def blocks(page: str, kind: str) -> list[str]:
    """The code blocks of this kind, as they stand."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)


def install_block() -> str:
    return next(one for one in blocks("docs/edge-device.md", "sh") if one.startswith(VENV))


class Machine:
    """One machine; `run` runs a script there as root, in its folder."""

    def __init__(self, folder: Path, network: Machine | None) -> None:
        self.folder = folder
        folder.mkdir()
        shutil.copytree(ROOT / "deploy", folder / "deploy")
        overlays = ("/etc", "/usr/lib/sysusers.d", "/var/lib")
        setup = ["mount -t tmpfs t /mnt", "mount -t tmpfs t /opt", "ip link set lo up"]
        setup += opened()
        for number, path in enumerate(overlays):
            setup += [f"mkdir /mnt/u{number} /mnt/w{number}"]
            setup += [f"mount -t overlay o -o lowerdir={path},upperdir=/mnt/u{number},workdir=/mnt/w{number} {path}"]
        setup += ["mkdir -p /opt/stubs /opt/tidegate/bin", "chmod 755 /opt /opt/stubs /opt/tidegate /opt/tidegate/bin"]
        setup += ["cp stubs/systemctl stubs/tidegate /opt/stubs/", "cp stubs/tidegate /opt/tidegate/bin/"]
        setup += ["echo 127.0.0.1 broker.internal pool.internal gateway.internal >> /etc/hosts", "echo up"]
        stubs = folder / "stubs"
        stubs.mkdir()
        for name, text in (("tidegate", _TIDEGATE), ("systemctl", _SYSTEMCTL)):
            (stubs / name).write_text(text)
            (stubs / name).chmod(0o755)
        unshare = ["unshare", "-mp", "--fork", "--kill-child", "--mount-proc", *([] if network else ["-n"])]
        script = "\n".join([*setup, "exec sleep infinity"])
        self._holder = subprocess.Popen(
            [*(network.enter("-n") if network else []), *unshare, "sh", "-ec", script],
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "up\n"

    def enter(self, *namespaces: str) -> list[str]:
        inside = psutil.Process(self._holder.pid).children()[0].pid
        return ["nsenter", "-t", str(inside), *namespaces]

    def run(self, script: str, **environment: str) -> str:
        ran = subprocess.run(
            [*self.enter("-m", "-n", "-p"), f"--wd={self.folder}", "sh", "-ec", f"umask 022\n{script}"],
            env={"PATH": _PATH, "HOME": "/root", **environment},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=120, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, f"{script}\n{ran.stdout}"
        return ran.stdout

    def ready(self) -> dict[str, Any]:
        """The event by which the unit's process says that it serves."""
        until = clock.now() + 60
        while clock.now() < until:
            lines = (self.folder / "unit.out").read_text(errors="replace").splitlines()
            for line in lines:
                if line.startswith("{") and json.loads(line).get("event") == "ready":
                    return dict(json.loads(line))
            if not self.units():
                break
            self.run("sleep 0.2")
        raise AssertionError("\n".join(lines))

    def units(self) -> list[psutil.Process]:
        """What runs there, but for the machine's own first process."""
        found = psutil.Process(self._holder.pid).children()[0].children(recursive=True)
        return [one for one in found if not has_ended(one)]

    def users_of_the_unit(self) -> set[str]:
        return {str(one.uids().real) for one in self.units()}

    def passwd(self, user: str) -> str:
        return self.run(f"id -u {user}").strip()

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait(timeout=30)
        if self._holder.stdout is not None:
            self._holder.stdout.close()


class Site:
    """The machines of the guide, made one after another."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.operator = Machine(folder / "operator", None)
        self.machines = [self.operator]

    def machine(self, name: str, *copied: str) -> Machine:
        """A further machine, with these things of the operator's copied there."""
        made = Machine(self._folder / name, self.operator)
        self.machines.append(made)
        for one in copied:
            source, target = self.operator.folder / one, made.folder / Path(one).name
            if source.is_dir():
                shutil.copytree(source, target)
            else:
                shutil.copy2(source, target)
        return made


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("site"))
    try:
        making, listing, _ = blocks("docs/forty-devices.md", "operator")
        made.operator.run(making + listing)
        made.operator.run("tidegate model paced encoder --edge-ms 8:8,512:250 --pool-ms 1:8,512:18 --repository models")
        yield made
    finally:
        for machine in reversed(made.machines):
            machine.close()


def test_forty_bundles_are_made_each_for_its_owner_alone(site: Site) -> None:
    bundles = list((site.operator.folder / "bundles").iterdir())
    assert len(bundles) == 40 and {stat.S_IMODE(one.stat().st_mode) for one in bundles} == {0o600}


def test_the_guide_leads_from_nothing_to_a_fleet_whose_units_run_as_their_own_user(site: Site) -> None:
    broker = site.machine("broker", "broker")
    (block,) = blocks("docs/forty-devices.md", "broker")
    *preparation, start = block.strip().splitlines()
    broker.run("\n".join(preparation))
    broker.run(f"{start} > broker.out 2>&1 &")
    services = [site.machine("pool", "pki", "models"), site.machine("gateway", "pki", "models")]
    for machine, kind in zip(services, ("pool", "gateway"), strict=True):
        (block,) = blocks("docs/forty-devices.md", kind)
        machine.run(block)
    for number in range(1, TRIED + 1):
        device = site.machine(f"device-{number}", "models")
        shutil.copy2(site.operator.folder / "bundles" / f"kiosk-{number:02}.tar", device.folder / "device-1.tar")
        # Only here do devices share one machine's ports.
        ports = {
            "TIDEGATE_EDGE_GRPC_PORT": str(9000 + 2 * number),
            "TIDEGATE_EDGE_HTTP_PORT": str(9001 + 2 * number),
        }
        device.run(install_block().replace(VENV, "test -x /opt/tidegate/bin/tidegate"), **ports)
        services.append(device)
    names = [machine.ready()["name"] for machine in services]
    assert names == ["cloud", "main", *(f"kiosk-{number:02}" for number in range(1, TRIED + 1))]
    for machine in services:
        assert machine.users_of_the_unit() == {machine.passwd("tidegate")} != {"0"}
    status = blocks("docs/forty-devices.md", "operator")[-1].strip()
    wanted = {"cloud", *(f"kiosk-{number:02}" for number in range(1, TRIED + 1))}
    until, seen = clock.now() + 60, ""
    while clock.now() < until:
        seen = site.operator.run(f"{status} --json")
        ready = {one["id"].rpartition("/")[2] for one in json.loads(seen)["targets"] if one["state"] == "ready"}
        if ready >= wanted:
            break
    assert ready >= wanted, seen
