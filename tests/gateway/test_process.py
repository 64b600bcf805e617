"""The gateway as a process and its commands: configuration, events, signals, status."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from gateway.catalog import Catalog
from gateway.cli import gateway
from gateway.commands.status import MOST_ROWS, models_table, status, targets_table
from gateway.config.gateway import GatewayConfig
from tests.support.serving.host import digits, minilm
from tidegate.config import ConfigError, load
from tidegate.outcome import ModelNotFound

PORTS = "http_port: 0\ngrpc_port: 0\nmetrics_port: 0\nadmin_port: 0\n"


def config_file(folder: Path, text: str = "") -> Path:
    path = folder / "gateway.yaml"
    path.write_text(PORTS + text)
    return path


def test_a_target_of_the_configuration_knows_its_id_and_way() -> None:
    config = GatewayConfig.model_validate(
        {"targets": [{"name": "main", "address": "h:1"}, {"name": "t", "address": "h:2", "foreign": True}]}
    )
    main, triton = (target.spec for target in config.targets)
    assert (main.id, main.transport, main.static) == ("pool/main", "link", True)
    assert (triton.id, triton.transport, triton.foreign) == ("pool/t", "unary", True)


def test_a_pool_of_several_servers_is_a_target_for_each() -> None:
    config = GatewayConfig.model_validate({"targets": [{"name": "main", "address": "[::1]:8101", "servers": 3}]})
    assert [(one.id, one.address) for one in (target.spec for target in config.targets)] == [
        ("pool/main-0", "[::1]:8101"), ("pool/main-1", "[::1]:8102"), ("pool/main-2", "[::1]:8103")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("{name: t, address: 'h:1', foreign: true, servers: 2}", "only a Tidegate pool with transport: link"),
        ("{name: t, address: 'h:1', tier: edge, servers: 2}", "only a Tidegate pool with transport: link"),
        ("{name: t, address: 'h:65535', servers: 2}", "must end in the port of the first of 2"),
        ("{name: t, address: 'h', servers: 2}", "must end in the port of the first of 2"),
        ("{name: t, address: 'h:1', tls: true, servers: 2}", "needs the gateway's own section tls"),
        ("{name: t, address: 'h:1', servers: 2}, {name: t-1, address: 'h:9'}", "two targets are called pool/t-1"),
    ],
)
def test_several_servers_where_there_are_none_are_an_error(tmp_path: Path, target: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(GatewayConfig, config_file(tmp_path, f"targets: [{target}]\n"))


def test_a_gateway_with_tls_is_told_that_several_servers_have_none(tmp_path: Path) -> None:
    tls = "tls: {cert: c, key: k, ca: a}\n"
    with pytest.raises(ConfigError, match=r"target 't' has servers, .* set tls: false"):
        load(GatewayConfig, config_file(tmp_path, tls + "targets: [{name: t, address: 'h:1', servers: 2}]\n"))
    plain = "targets: [{name: t, address: 'h:1', servers: 2, tls: false}]\n"
    assert not any(one.spec.encrypted for one in load(GatewayConfig, config_file(tmp_path, tls + plain)).targets)


def test_two_targets_of_one_name_are_an_error_that_names_it(tmp_path: Path) -> None:
    target = "{name: main, address: 'h:1'}"
    with pytest.raises(ConfigError, match="two targets are called pool/main"):
        load(GatewayConfig, config_file(tmp_path, f"targets: [{target}, {target}]\n"))


def test_every_key_says_what_it_buys() -> None:
    assert [name for name, field in GatewayConfig.model_fields.items() if not field.description] == []


def test_the_catalog_knows_the_highest_version_and_prefers_its_own() -> None:
    two, ten = (msgspec.structs.replace(minilm(), version=version) for version in ("2", "10"))
    catalog = Catalog([ten, two])
    assert catalog.manifest("minilm") is ten
    assert catalog.manifest("minilm", "2") is two
    assert catalog.feature_of("digits", "1") == "items"

    catalog.learn([digits(), msgspec.structs.replace(two, summary="foreign")])
    assert catalog.feature_of("digits", "1") == "pixels"
    assert catalog.manifest("minilm", "2") is two
    assert [one.name for one in catalog.manifests] == ["digits", "minilm", "minilm"]
    with pytest.raises(ModelNotFound, match="has no version '3'; it has 2, 10"):
        catalog.manifest("minilm", "3")
    with pytest.raises(ModelNotFound, match="known models: digits, minilm"):
        catalog.manifest("nope")


def test_help_shows_examples() -> None:
    for command in (gateway, status):
        shown = CliRunner().invoke(command, ["--help"])
        assert shown.exit_code == 0
        assert "Examples:" in shown.output


def test_an_unknown_key_is_a_failed_event_and_an_exit_code(tmp_path: Path) -> None:
    result = CliRunner().invoke(gateway, ["--config", str(config_file(tmp_path, "htpp_port: 1\n"))])
    assert result.exit_code == 1
    event = json.loads(result.stdout)
    assert event["event"] == "failed"
    assert "did you mean 'http_port'" in event["reason"]


def test_status_without_a_process_says_where_it_looked() -> None:
    result = CliRunner().invoke(status, ["--admin", "http://127.0.0.1:1"])
    assert result.exit_code == 1
    assert "no gateway answers at http://127.0.0.1:1" in result.stderr


def test_the_tables_show_targets_and_models() -> None:
    target = {
        "id": "edge/a",
        "state": "down",
        "reason": "refused",
        "address": "h:1",
        "transport": "link",
        "models": [{"name": "minilm", "variants": ["int8"]}],
        "rtt_ms": 1.25,
        "queued": 0,
        "in_flight": 0,
    }
    assert list(targets_table([target]).columns[1].cells) == ["[red]down[/] (refused)"]
    model = {"name": "minilm", "version": "1", "ready": True, "targets": ["edge/a"]}
    assert list(models_table([model]).columns[3].cells) == ["edge/a"]


@pytest.mark.slow
def test_status_of_a_large_fleet_is_a_screenful_with_the_ill_first_and_all_where_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [f"edge/{number:04}" for number in range(1000)]
    told = {"reason": "", "address": "h:1", "transport": "link", "models": [], "rtt_ms": 1.0, "queued": 0}
    targets = [{"id": name, "state": "ready", "in_flight": 0, **told} for name in names]
    targets[777] |= {"state": "down", "reason": "no route"}
    models = [{"name": "minilm", "version": "1", "ready": True, "targets": names}]
    refused = [{"device": f"d-{number:03}", "reason": "no network"} for number in range(300)]
    whole = {"targets": targets, "models": models, "refused": refused}
    monkeypatch.setattr("gateway.commands.status.read_admin", lambda *_: whole)

    short, long = (CliRunner().invoke(status, words, env={"COLUMNS": "120"}).output for words in ([], ["--all"]))

    rows = [line for line in short.splitlines() if line.startswith("│ edge/")]
    assert "edge/0777" in rows[0] and len(rows) == MOST_ROWS
    assert f"and {1000 - MOST_ROWS} more, {1000 - MOST_ROWS} ready (--all shows them)" in short
    assert "edge/0003 and 996 more" in short
    assert "not dialled: and 290 more (--all shows them)" in short
    assert len(short.splitlines()) < 70
    assert all(name in long for name in names) and "d-299" in long and "--all" not in long


def test_status_on_80_columns_breaks_no_word_and_leaves_the_models_to_their_own_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = [{"name": "minilm", "variants": ["int8"]}, {"name": "digits", "variants": ["int8"]}]
    told = {"address": "127.0.0.1:9000", "transport": "link", "rtt_ms": 1.9, "queued": 0, "in_flight": 0}
    well = {"id": "edge/edge-1", "state": "ready", "reason": "", "models": models, **told}
    ill = {"id": "edge/edge-2", "state": "down", "reason": "nobody answers at its address", "models": models, **told}
    offered = [{"name": one["name"], "version": "1", "ready": True, "targets": ["edge/edge-1"]} for one in models]
    monkeypatch.setattr("gateway.commands.status.read_admin", lambda *_: {"targets": [well, ill], "models": offered})

    narrow, wide = (CliRunner().invoke(status, env={"COLUMNS": columns}).output for columns in ("80", "140"))

    words = ("target", "state", "address", "queued", "in flight", "edge/edge-2", "127.0.0.1:9000", "1.9 ms")
    assert all(word in narrow for word in words) and "…" not in narrow
    assert "minilm int8" in wide and "minilm int8" not in narrow and "minilm" in narrow


@pytest.mark.slow
def test_a_process_says_it_is_ready_answers_status_and_stops_on_sigterm(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gateway", "--config", str(config_file(tmp_path))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            shown = CliRunner().invoke(status, ["--json", "--admin", ready["addresses"]["admin"]])
            table = CliRunner().invoke(status, ["--admin", ready["addresses"]["admin"]])
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=30.0)
        finally:
            process.kill()

    assert ready["event"] == "ready"
    assert (ready["role"], ready["name"]) == ("gateway", "main")
    assert set(ready["addresses"]) == {"http", "grpc", "metrics", "admin"}
    assert json.loads(shown.stdout) == {
        "targets": [],
        "sources": [],
        "models": [],
        "refused": [],
        "broker_refusal": "",
        "ailing": [],
        "gateways": {"count": 1, "others": [], "has_namesake": False},
        "workers": [],
        "cache": [],
        "help": [],
        "configuration": {"devices": {}, "drifted": []},
    }
    assert "offered by" in table.stdout
    assert process.returncode == 0
    assert "warning" not in errors.lower()
    assert "serving without authentication" in errors


@pytest.mark.slow
def test_the_gateway_needs_neither_torch_nor_onnxruntime() -> None:
    blocked = "import sys; sys.modules.update(torch=None, onnxruntime=None, transformers=None, onnx=None)"
    done = subprocess.run([sys.executable, "-c", f"{blocked}; import gateway.cli"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
