"""`tidegate config check` finds what would keep a process from starting here, all of it at once."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from tidegate.tools.config_cli import config

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
