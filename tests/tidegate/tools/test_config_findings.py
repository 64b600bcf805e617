"""`tidegate config check` finds what would keep a process from starting here, all of it at once."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from tests.contract.pages.keys import ROLES
from tests.contract.pages.keys import keys as keys_of
from tests.support.certificates import FleetPki
from tidegate.tools.config_cli import config
from tidegate.tools.config_findings import FOLDERS, HOST_OF, MADE, MUST_EXIST, READ_IF_THERE

REPOSITORY = Path(__file__).parents[3]


def check(folder: Path, role: str, *more: str, **keys: Any) -> Result:
    file = folder / f"{role}.yaml"
    file.write_text(yaml.safe_dump(keys))
    return CliRunner().invoke(config, ["check", str(file), "--for", role, *more])


def test_everything_that_is_missing_is_named_with_its_key_value_and_way_out(tmp_path: Path) -> None:
    found = check(
        tmp_path,
        "edge",
        name="kiosk-1",
        mqtt="broker:1883",
        model_repository=str(tmp_path / "no-models"),
        tls={"cert": str(tmp_path / "d.crt"), "key": str(tmp_path / "d.key"), "ca": str(tmp_path / "ca.crt")},
    )
    assert found.exit_code == 1
    assert "key 'mqtt': 'broker:1883' is not a broker's address; it reads like mqtt://" in found.output
    assert f"key 'model_repository' = '{tmp_path / 'no-models'}': is not there; `tidegate model add`" in found.output
    for name in ("cert", "key", "ca"):
        assert f"key 'tls.{name}' = '{tmp_path}" in found.output
    assert found.output.count("`tidegate pki issue`") == 3


def test_elsewhere_leaves_this_machine_out_and_keeps_what_is_wrong_everywhere(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"name": "kiosk-1", "model_repository": str(tmp_path / "no-models")}
    assert check(tmp_path, "edge", "--elsewhere", **keys).exit_code == 0
    wrong = check(tmp_path, "edge", "--elsewhere", **keys, mqtt="http://broker", grpc_port=9000, http_port=9000)
    assert wrong.exit_code == 1
    assert "'http://broker' is not a broker's address" in wrong.output
    assert "keys 'grpc_port' and 'http_port' are both 9000" in wrong.output


def test_findings_and_a_file_that_cannot_be_read_come_as_json_too(tmp_path: Path) -> None:
    good = check(tmp_path, "edge", "--elsewhere", "--json", name="kiosk-1")
    assert good.exit_code == 0
    assert json.loads(good.stdout) == {
        "file": str(tmp_path / "edge.yaml"), "role": "edge", "problems": [], "notes": []
    }  # fmt: skip
    for wrong, words in (({"mqtt": "broker:1883"}, "key 'mqtt'"), ({"nmae": "kiosk-1"}, "nmae")):
        found = check(tmp_path, "edge", "--elsewhere", "--json", **{"name": "kiosk-1", **wrong})
        assert found.exit_code == 1
        (problem,) = json.loads(found.stdout)["problems"]
        assert words in problem


def test_no_password_of_the_broker_is_shown(tmp_path: Path) -> None:
    found = check(tmp_path, "gateway", name="main", mqtt="tcp://main:secret@broker:1883")
    assert found.exit_code == 1
    assert "secret" not in found.output


def test_a_port_on_two_addresses_is_no_clash_and_a_taken_one_is_a_note(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        keys = dict.fromkeys(("http_port", "grpc_port", "metrics_port"), 0)
        found = check(tmp_path, "gateway", name="main", admin_port=port, **keys)
        assert found.exit_code == 0, found.output
        assert f"note: key 'admin_port' = {port}" in found.output
    two = check(tmp_path, "gateway", "--elsewhere", host="127.0.0.2", http_port=8100, grpc_port=8101, admin_port=8100)
    assert two.exit_code == 0, two.output


def test_a_folder_in_a_files_place_and_a_file_in_a_folders_are_named(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("")
    found = check(tmp_path, "pool", model_repository=str(tmp_path / "models"))
    assert "is a file, not a folder" in found.output
    (tmp_path / "keys").mkdir()
    found = check(tmp_path, "edge", name="a", dial_key_file=str(tmp_path / "keys"), dial_out="always")
    assert "is a folder, not a file" in found.output


@pytest.mark.parametrize(
    ("one", "other", "meet"),
    [
        ("localhost", "127.0.0.1", True),
        ("localhost", "::1", True),
        ("LOCALHOST", "localhost", True),
        ("127.0.0.1", "127.0.0.2", False),
        ("0.0.0.0", "127.0.0.2", True),
        ("0.0.0.0", "::1", False),
        ("::", "127.0.0.1", True),
        ("", "10.0.0.1", True),
        ("::1", "0:0:0:0:0:0:0:1", True),
        ("0.0.0.0", "gateway.internal", True),
        ("gateway.internal", "Gateway.internal", True),
        ("gateway.internal", "127.0.0.1", False),
    ],
)
def test_two_ports_of_one_number_clash_where_their_addresses_meet(
    tmp_path: Path, one: str, other: str, meet: bool
) -> None:
    keys = {"host": one, "metrics_host": other, "http_port": 8100, "grpc_port": 8101, "metrics_port": 8100}
    found = check(tmp_path, "gateway", "--elsewhere", admin_port=8103, **keys)
    assert ("keys 'http_port' and 'metrics_port' are both 8100" in found.output) is meet, found.output
    assert found.exit_code == int(meet)


def test_a_section_with_a_host_of_its_own_is_no_clash_either(tmp_path: Path) -> None:
    artifacts = {"folder": str(tmp_path / "files"), "host": "127.0.0.3", "port": 8000}
    found = check(tmp_path, "gateway", "--elsewhere", mqtt="mqtt://broker", artifacts=artifacts)
    assert found.exit_code == 0, found.output


def test_an_address_that_is_not_this_machines_and_a_port_that_is_not_this_users_are_problems(tmp_path: Path) -> None:
    found = check(tmp_path, "pool", model_repository=str(tmp_path), host="203.0.113.7")
    assert found.exit_code == 1
    assert "'203.0.113.7' is no address of this machine; 0.0.0.0 listens on all" in found.output


@pytest.mark.parametrize(
    ("mqtt", "words"),
    [
        ("mqtt://broker", "without encryption though 'tls' is set; write mqtts://"),
        ("mqtts://broker:port", "'mqtts://broker:port' has no port from 1 to 65535; it reads like mqtt://host:1883"),
        ("mqtts://broker:70000", "has no port from 1 to 65535"),
        ("mqtts://broker?protocol=4", "protocol is 5, 3.1.1 or auto"),
    ],
)
def test_a_brokers_address_that_cannot_be_is_found(tmp_path: Path, mqtt: str, words: str) -> None:
    tls = {"cert": "tls.crt", "key": "tls.key", "ca": "ca.crt"}
    found = check(tmp_path, "edge", "--elsewhere", name="kiosk-1", mqtt=mqtt, tls=tls)
    assert (found.exit_code, words in found.output) == (1, True), found.output


@pytest.mark.slow
def test_a_certificate_of_another_name_and_a_key_of_another_certificate_are_found(tmp_path: Path) -> None:
    pki = FleetPki(tmp_path / "pki")
    (tmp_path / "models").mkdir()
    own, others = pki.config("edge/kiosk-1"), pki.config("edge/kiosk-2")
    ports = {"grpc_port": 0, "http_port": 0, "model_repository": str(tmp_path / "models")}
    files = {"cert": str(own.cert), "key": str(own.key), "ca": str(own.ca)}
    assert check(tmp_path, "edge", name="kiosk-1", tls=files, **ports).exit_code == 0
    found = check(tmp_path, "edge", name="kiosk-9", tls=files, **ports)
    assert found.exit_code == 1 and "edge/kiosk-1" in found.output and "kiosk-9" in found.output
    found = check(tmp_path, "edge", name="kiosk-1", tls={**files, "key": str(others.key)}, **ports)
    assert found.exit_code == 1 and "is not the key of" in found.output


def test_a_manifest_that_cannot_be_read_is_found(tmp_path: Path) -> None:
    (tmp_path / "models" / "encoder" / "1").mkdir(parents=True)
    (tmp_path / "models" / "encoder" / "1" / "model.yaml").write_text("name: [")
    found = check(tmp_path, "pool", model_repository=str(tmp_path / "models"))
    assert found.exit_code == 1
    assert "key 'model_repository': " in found.output and "encoder/1/model.yaml" in found.output


def test_what_the_process_writes_itself_needs_a_place_and_need_not_be_there(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "file").write_text("")
    ports = {"grpc_port": 0, "http_port": 0, "model_repository": str(tmp_path / "models")}
    assert check(tmp_path, "edge", state_dir=str(tmp_path / "new" / "state"), **ports).exit_code == 0
    for state, words in (
        (tmp_path / "file", "is a file, not a folder; name a folder"),
        (tmp_path / "file" / "state", f"cannot be made: '{tmp_path / 'file'}' is a file; name another path"),
    ):
        found = check(tmp_path, "edge", state_dir=str(state), **ports)
        assert found.exit_code == 1 and words in found.output


def test_a_file_that_is_missing_in_a_list_of_sections_is_found_and_their_ports_are_no_ports_of_ours(
    tmp_path: Path,
) -> None:
    key = tmp_path / "service.key"
    service = {"models": {"chat": "chat"}, "api_key_file": str(key)}
    target = {"name": "service", "transport": "openai", "address": "https://service.test/v1", "openai": service}
    file, dns = tmp_path / "targets.yaml", {"source": "dns", "name": "pools.test", "port": 8101}
    keys: dict[str, Any] = dict.fromkeys(("http_port", "grpc_port", "metrics_port", "admin_port"), 0)
    keys |= {"targets": [target], "discovery": [{"source": "file", "path": str(file)}, dns, {**dns, "name": "b.test"}]}
    found = check(tmp_path, "gateway", **keys)
    assert found.exit_code == 1
    assert f"key 'targets[].openai.api_key_file' = '{key}': is not there; the key that" in found.output
    assert f"key 'discovery[].path' = '{file}': is not there; the list of targets" in found.output
    key.write_text("secret")
    file.write_text("targets: []")
    assert check(tmp_path, "gateway", **keys).exit_code == 0


def test_every_key_with_a_path_is_in_one_of_the_three_sets() -> None:
    """A new key must say whether its file has to be there; one that is gone must not stay."""
    sets = (set(MUST_EXIST), set(MADE), set(READ_IF_THERE))
    known = {key.path for role in ROLES for key in keys_of(role) if key.is_path}
    assert sorted(path for one in sets for path in one) == sorted(known)
    assert known >= FOLDERS


def test_every_host_of_a_port_is_known() -> None:
    keys = {key.path for role in ROLES for key in keys_of(role)}
    own = {f"{path.removesuffix('host')}port": path for path in keys if path.endswith("host") and path != "host"}
    assert {port: host for port, host in own.items() if port in keys} == HOST_OF


def test_everything_that_is_not_there_says_what_brings_it(tmp_path: Path) -> None:
    assert all(MUST_EXIST.values())
    auth = {"keys_file": str(tmp_path / "keys.json")}
    keys = dict.fromkeys(("http_port", "grpc_port", "metrics_port", "admin_port"), 0)
    found = check(tmp_path, "gateway", model_repository=str(tmp_path / "none"), auth=auth, **keys)
    problems = [line for line in found.output.splitlines() if "key '" in line]
    assert len(problems) == 2 and all("is not there; `tidegate" in one for one in problems), found.output


def test_an_unknown_key_of_a_section_is_answered_with_that_sections_keys(tmp_path: Path) -> None:
    said = str(check(tmp_path, "edge", tls={"cert": "a", "key": "b", "caa": "c"}).exception)
    assert "unknown key 'tls.caa'; did you mean 'tls.ca'?" in said
    assert "key 'tls.ca' is missing: The CA that the other parts' certificates must come from" in said
    said = str(check(tmp_path, "gateway", targets=[{"name": "cloud", "adress": "a:1"}]).exception)
    assert "unknown key 'targets.0.adress'; did you mean 'targets.0.address'?" in said
    said = str(check(tmp_path, "gateway", tenants={"acme": {"xyzzy": 1}}).exception)
    assert "unknown key 'tenants.acme.xyzzy'; known keys: burst_s, bytes_per_s, " in said


def test_what_is_missing_is_told_without_the_secrets_beside_it(tmp_path: Path) -> None:
    said = str(check(tmp_path, "pool", tracing={"headers": {"authorization": "secret"}}).exception)
    assert "key 'tracing.endpoint' is missing: URL of a collector" in said
    assert "secret" not in said


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_this_user_may_not_read_is_named(tmp_path: Path) -> None:
    secret = tmp_path / "key"
    secret.touch(mode=0o000)
    found = check(tmp_path, "edge", name="a", dial_key_file=str(secret))
    assert "as the user that the service runs as" in found.output


@pytest.mark.parametrize("file", sorted((REPOSITORY / "deploy" / "config").glob("*.yaml")), ids=lambda path: path.name)
def test_the_deployed_examples_could_start_where_their_files_are(file: Path) -> None:
    role = {"site": "gateway", "cloud": "pool"}.get(file.stem, "edge")
    found = CliRunner().invoke(config, ["check", str(file), "--for", role, "--elsewhere"])
    assert found.exit_code == 0, found.output


def test_ports_of_several_servers_are_checked_each(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    keys: dict[str, Any] = {"model_repository": str(tmp_path / "models"), "servers": 3}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = int(taken.getsockname()[1])
        found = check(tmp_path, "pool", "--json", **keys, grpc_port=port - 2)
    assert any(
        one.startswith(f"key 'grpc_port' = {port - 2}, for server 2: 127.0.0.1:{port} is taken")
        for one in json.loads(found.stdout)["notes"]
    )
    meets = check(tmp_path, "pool", "--elsewhere", **keys, grpc_port=8101, metrics_port=8103)
    assert meets.exit_code == 1
    assert "key 'metrics_port' = 8103: 3 servers listen on 8101 to 8103 for gRPC" in meets.output


def test_a_variable_of_no_key_is_a_note_and_a_warning_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEGATE_EDGE_MAX_QUEUE_SZE", "4")
    file = tmp_path / "edge.yaml"
    file.write_text(f"model_repository: {tmp_path / 'none'}\n")
    words = "TIDEGATE_EDGE_MAX_QUEUE_SZE is not read: there is no such key; did you mean TIDEGATE_EDGE_MAX_QUEUE_SIZE?"

    found = CliRunner().invoke(config, ["check", str(file), "--for", "edge", "--elsewhere"])
    command = [sys.executable, "-m", "tidegate.cli", "edge", "--config", str(file)]
    started = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert found.exit_code == 0 and f"note: the environment variable {words}" in found.stderr
    assert started.returncode == 1 and words in started.stderr
