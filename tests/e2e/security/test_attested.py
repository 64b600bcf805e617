"""Attested placement between real processes: a gateway, an attested edge, and an edge without evidence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from tests.e2e.stack import eventually
from tests.support.certificates import FleetPki
from tests.support.models.tiny_models import tiny_repository
from tidegate.tools.attest_cli import attest

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

WITHIN_S = 20.0
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}]}
ATTESTED = {"tidegate-require": "attested"}


class Part:
    """A running process; `addresses` are those of its ready event."""

    def __init__(self, folder: Path, module: str, name: str, keys: dict[str, Any]) -> None:
        config, self._log = folder / f"{name}.yaml", folder / f"{name}.log"
        config.write_text(yaml.safe_dump({"name": name} | keys))
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, "--config", str(config)],
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"SSL_CERT_FILE": str(folder / "pki" / "ca.crt")},
            )
        self.addresses: dict[str, str] = self._ready()["addresses"]

    def _ready(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == "ready":
                return event
        pytest.fail(f"ended with {self.process.wait()} before it was ready:\n{self._log.read_text()}", pytrace=False)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Fleet:
    """Two edges, of which one has an attestation key, and a gateway."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pki = FleetPki(folder / "pki")
        self.allowed = folder / "attested.keys"
        self.parts: list[Part] = []
        tiny_repository(folder / "models")
        self.allowed.write_text(self.init("proven"))
        self.init("stranger")  # a key that nobody allows
        self.plain, self.proven = self.edge("plain"), self.edge("proven", key="proven")
        edges = {"plain": self.plain, "proven": self.proven}
        self.ports = {name: int(edge.addresses["grpc"].rpartition(":")[2]) for name, edge in edges.items()}
        ports = {f"{door}_port": 0 for door in ("http", "grpc", "metrics", "admin")}
        targets = [{"name": name, "tier": "edge", "address": f"127.0.0.1:{port}"} for name, port in self.ports.items()]
        attestation = {"allowed": str(self.allowed)}
        keys = {"targets": targets, "attestation": attestation, "tls": self.tls("gateway/main"), **ports}
        gateway = self.start("gateway", "main", keys)
        self.http, self.admin = gateway.addresses["http"], gateway.addresses["admin"]

    def init(self, name: str) -> str:
        """Make a key; the line that allows it."""
        made = CliRunner().invoke(attest, ["init", str(self.folder / f"{name}.key")])
        assert made.exit_code == 0, made.output
        return made.stdout

    def tls(self, who: str) -> dict[str, str]:
        section = self.pki.config(who)
        return {"cert": str(section.cert), "key": str(section.key), "ca": str(section.ca)}

    def start(self, module: str, name: str, keys: dict[str, Any]) -> Part:
        part = Part(self.folder, module, name, {"model_repository": str(self.folder / "models")} | keys)
        self.parts.append(part)
        return part

    def edge(self, name: str, *, port: int = 0, key: str = "") -> Part:
        keys = {"grpc_port": port, "http_port": None, "models": ["double"], "warmup_budget_s": 0.3}
        keys |= {"state_dir": str(self.folder / f"{name}.state"), "tls": self.tls(f"edge/{name}")}
        if key:
            keys["attestation"] = {"key": str(self.folder / f"{key}.key")}
        return self.start("edge_agent", name, keys)

    def ask(self, **headers: str) -> tuple[int, dict[str, str], str]:
        request = urllib.request.Request(
            f"{self.http}/v2/models/double/infer",
            json.dumps(BODY).encode(),
            {"content-type": "application/json", **headers},
        )
        try:
            with urllib.request.urlopen(request, timeout=10, context=self.pki.client()) as answer:
                return answer.status, dict(answer.headers), answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, dict(error.headers), error.read().decode()

    def evidence(self, name: str) -> str:
        with urllib.request.urlopen(f"{self.admin}/v1/state", timeout=10, context=self.pki.client()) as answer:
            targets = {one["id"]: one for one in json.load(answer)["targets"]}
        return str(targets[f"edge/{name}"]["attestation"])

    def until(self, name: str, words: str) -> None:
        try:
            eventually(lambda: words in self.evidence(name), WITHIN_S, f"of edge/{name}: {words}")
        except AssertionError as error:
            raise AssertionError(f"{error}; but: {self.evidence(name)}") from error

    def close(self) -> None:
        for part in reversed(self.parts):
            part.close()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    one = Fleet(tmp_path_factory.mktemp("attested"))
    yield one
    one.close()


def served_by(fleet: Fleet) -> str:
    status, headers, body = fleet.ask(**ATTESTED)
    assert status == 200, body
    return headers["tidegate-served-by"]


def test_only_the_edge_that_proves_itself_gets_marked_requests_until_its_key_is_revoked(fleet: Fleet) -> None:
    fleet.until("proven", "software; key=")
    assert {served_by(fleet) for _ in range(10)} == {"edge/proven"}
    assert fleet.ask(**ATTESTED)[1]["tidegate-attested"] == fleet.evidence("proven")

    line = fleet.allowed.read_text()
    fleet.allowed.write_text(f"# {line}")
    fleet.until("proven", "is not among those allowed")
    status, headers, body = fleet.ask(**ATTESTED)
    assert (status, headers["tidegate-refused"]) == (503, "nothing_alive")
    assert "edge/proven is not attested: its attestation key" in body
    assert "edge/plain is not attested: it has no evidence" in body
    assert fleet.ask()[0] == 200  # whoever requires nothing is served

    fleet.allowed.write_text(line)
    fleet.until("proven", "software; key=")
    assert served_by(fleet) == "edge/proven"


def test_an_edge_that_comes_back_with_a_strangers_key_is_attested_no_more(fleet: Fleet) -> None:
    fleet.until("proven", "software; key=")
    for key, words in (("stranger", "is not among those allowed"), ("proven", "software; key=")):
        fleet.proven.close()
        fleet.until("proven", "ended with the connection" if key == "stranger" else "not among")
        fleet.proven = fleet.edge("proven", port=fleet.ports["proven"], key=key)
        fleet.until("proven", words)
        assert fleet.ask(**ATTESTED)[0] == (503 if key == "stranger" else 200)
