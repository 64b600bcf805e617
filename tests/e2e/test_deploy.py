"""`deploy/` works as it is: units that systemd takes, profiles that the processes take, generated broker files."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path, PurePath
from typing import Any

import pytest
import yaml

from tidegate.config import load
from tidegate.tools.broker.cli import ACL, CONF
from tidegate.tools.broker.mosquitto_config import MosquittoPlan, acl_text, conf_text
from tidegate.tools.config_cli import config_model

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
PROFILES_OF = ("site", "device", "cloud")
PROFILES = {"device": "edge", "site": "gateway", "cloud": "pool"}
pytestmark = [pytest.mark.slow, pytest.mark.e2e]


@pytest.mark.parametrize(("profile", "role"), PROFILES.items())
def test_a_profile_is_a_valid_configuration_of_its_process(
    profile: str, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in [key for key in os.environ if key.startswith("TIDEGATE_")]:
        monkeypatch.delenv(key)
    load(config_model(role), DEPLOY / "config" / f"{profile}.yaml")


def test_there_is_a_profile_for_each_unit_and_a_unit_for_each_profile() -> None:
    for profile, role in PROFILES.items():
        unit = (DEPLOY / "systemd" / f"tidegate-{role}.service").read_text()
        assert f"tidegate {role} --config /etc/tidegate/{profile}.yaml" in unit
    assert len(list((DEPLOY / "systemd").glob("*.service"))) == len(list((DEPLOY / "config").glob("*.yaml"))) == 3


@pytest.mark.parametrize(("profile", "role"), PROFILES.items())
def test_systemd_waits_until_a_process_has_drained(profile: str, role: str) -> None:
    unit = (DEPLOY / "systemd" / f"tidegate-{role}.service").read_text()
    waits_s = float(re.search(r"^TimeoutStopSec=(\d+)$", unit, re.M)[1])  # type: ignore[index]
    config: Any = load(config_model(role), DEPLOY / "config" / f"{profile}.yaml")
    assert waits_s >= config.drain_s + 5.0, "the parts close one after another after the drain"


@pytest.mark.parametrize("role", PROFILES.values())
def test_systemd_hears_of_a_process_when_it_serves_and_that_it_lives(role: str) -> None:
    unit = (DEPLOY / "systemd" / f"tidegate-{role}.service").read_text()
    assert "\nType=notify\n" in unit and re.search(r"^WatchdogSec=\d+$", unit, re.M) and "TimeoutStartSec=" in unit


@pytest.mark.parametrize("role", PROFILES.values())
def test_what_a_service_writes_is_readable_for_its_account_alone(role: str) -> None:
    unit = (DEPLOY / "systemd" / f"tidegate-{role}.service").read_text()
    assert re.search(r"^UMask=0077$", unit, re.M)


@pytest.mark.parametrize("page", ["edge-device", "accelerators"])
def test_what_the_unit_closes_and_a_key_needs_is_opened_by_the_drop_in_of_the_page(page: str) -> None:
    unit = (DEPLOY / "systemd" / "tidegate-edge.service").read_text()
    (drop_in,) = re.findall(r"^```ini\n(.*?)^```$", (DEPLOY.parent / "docs" / f"{page}.md").read_text(), re.M | re.S)
    opened = re.findall(r"^(\w+)=no$", drop_in, re.M)
    assert opened
    for option in opened:
        assert re.search(rf"^{option}=yes$", unit, re.M), "the page opens what the unit closes"
        assert f"{option}=no" in unit, "the unit says where that is a hindrance"


# As systemd does it: `socket` of any family but those given is answered with EAFNOSUPPORT, for good.
_ONLY_THESE_FAMILIES = """
import ctypes, errno, os, struct, sys
LOAD, EQUAL, RETURN, ALLOW, REFUSE = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050000 | errno.EAFNOSUPPORT
families = [int(one) for one in sys.argv[1].split(",")]
call = {"x86_64": 41, "aarch64": 198}[os.uname().machine]
code = [(LOAD, 0, 0, 0), (EQUAL, 0, len(families) + 2, call), (LOAD, 0, 0, 16)]
code += [(EQUAL, len(families) - at, 0, family) for at, family in enumerate(families)]
code += [(RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
code = b"".join(struct.pack("HBBI", *one) for one in code)
held = ctypes.create_string_buffer(code, len(code))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(held)))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
import ifaddr, socket
try:
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
except OSError as error:
    assert error.errno == errno.EAFNOSUPPORT, error
else:
    sys.exit("the filter is not in force")
print([one.ip for adapter in ifaddr.get_adapters() for one in adapter.ips if one.is_IPv4])
"""


@pytest.mark.skipif(os.uname().machine not in ("x86_64", "aarch64"), reason="the filter is written for two processors")
def test_a_device_finds_its_network_interfaces_under_the_unit_s_filter_of_sockets() -> None:
    unit = (DEPLOY / "systemd" / "tidegate-edge.service").read_text()
    named = re.search(r"^RestrictAddressFamilies=(.+)$", unit, re.M)[1].split()  # type: ignore[index]
    families = ",".join(str(int(getattr(socket, name))) for name in named)
    looked = subprocess.run(
        [sys.executable, "-c", _ONLY_THESE_FAMILIES, families], capture_output=True, text=True, check=False
    )
    assert "'127.0.0.1'" in looked.stdout, looked.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here")
@pytest.mark.parametrize("unit", sorted((DEPLOY / "systemd").glob("*.service")), ids=lambda path: path.stem)
def test_systemd_takes_each_unit_without_a_word(unit: Path, tmp_path: Path) -> None:
    # The only change: the program is looked for where this environment has it.
    installed = tmp_path / unit.name
    program = str(Path(sys.executable).parent / "tidegate")
    installed.write_text(unit.read_text().replace("/opt/tidegate/bin/tidegate", program))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(installed)], capture_output=True, text=True, check=False
    )
    # an unknown key is only a word on stderr, with exit code 0
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_the_brokers_files_are_what_the_generator_writes() -> None:
    # tidegate broker config --for mosquitto --fleet site --gateway main --dir deploy/mosquitto \
    #     --installed-at /etc/mosquitto/tidegate
    plan = MosquittoPlan("site", ("main",), PurePath("/etc/mosquitto/tidegate"))
    assert (DEPLOY / "mosquitto" / CONF).read_text() == conf_text(plan)
    assert (DEPLOY / "mosquitto" / ACL).read_text() == acl_text(plan)


def test_the_profiles_are_of_one_fleet_and_name_the_files_that_are_made_for_it() -> None:
    site, device, cloud = (yaml.safe_load((DEPLOY / "config" / f"{name}.yaml").read_text()) for name in PROFILES_OF)
    assert site["fleet"] == device["fleet"] == "site"
    assert (site["name"], site["targets"][0]["name"]) == ("main", cloud["name"])
    for profile in (site, device, cloud):
        assert profile["tls"] == {
            "cert": "/etc/tidegate/pki/tls.crt", "key": "/etc/tidegate/pki/tls.key", "ca": "/etc/tidegate/pki/ca.crt"
        }  # fmt: skip
    assert site["mqtt"].startswith("mqtts://") and device["mqtt"].startswith("mqtts://")
