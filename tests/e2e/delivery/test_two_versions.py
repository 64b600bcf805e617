"""Two devices with a version each, a gateway that splits between them, and the commands that change the split."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support.faults.fleet_stack import FleetStack
from tests.support.models.tiny_models import tiny_repository
from tests.support.mqtt.brokers import MOSQUITTO
from tidegate.servers.operator_token import token_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.needs_mosquitto,
    pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed"),
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetStack]:
    folder = tmp_path_factory.mktemp("versions")
    models = tiny_repository(folder / "models", versions=("1", "2"))
    edges = {"one": {"models": ["double:1"]}, "two": {"models": ["double:2"]}}
    gateway = {"trials_file": str(folder / "trials.json")}
    with FleetStack(folder / "run", models, edges=edges, gateway=gateway) as running:
        yield running


def asked(stack: FleetStack, *, headers: dict[str, str] | None = None) -> tuple[int, str]:
    """The status, and the version that answered."""
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}]}
    request = urllib.request.Request(
        f"{stack.http}/v2/models/double/infer",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "tidegate-budget-ms": "10000", **(headers or {})},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)["model_version"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, ""


def told(stack: FleetStack, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"{stack.gateway.addresses['admin']}/v1/versions{path}",
        json.dumps(body).encode() if body is not None else None,
        {"Content-Type": "application/json", "Authorization": f"Bearer {token_for(stack.gateway.addresses['admin'])}"},
        method=method,
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_version_is_tried_by_share_header_and_tenant_promoted_and_kept_over_a_kill(stack: FleetStack) -> None:
    assert asked(stack, headers={"tidegate-version": "1"}) == (200, "1")
    status, found = told(stack, "PUT", "/double/trial", {"standing": "1", "candidate": "2", "tenants": ["acme"]})
    assert (status, found["meant"], found["trial"]["share"]) == (200, "1", 0.0)
    assert asked(stack) == (200, "1"), "the highest version is there, and is not meant"
    assert asked(stack, headers={"tidegate-version": "candidate"}) == (200, "2")
    assert asked(stack, headers={"tidegate-tenant": "acme"}) == (200, "2")

    told(stack, "PUT", "/double/trial", {"standing": "1", "candidate": "2", "share": 0.5, "compare": 1.0})
    seen = Counter(asked(stack) for _ in range(60))
    assert set(seen) == {(200, "1"), (200, "2")}, "by chance only one of them would be seen once in 10^17 runs"
    (model,) = [one for one in told(stack, "GET", "")[1]["models"] if one["name"] == "double"]
    figures = model["trial"]["figures"]
    assert sum(one["in_time"] for one in figures.values()) >= 60
    assert all(one["ms"]["p50"] > 0 and one["failed"] == 0 for one in figures.values())
    assert [one["edges"] for one in model["versions"]] == [1, 1]

    stack.gateway.kill()
    stack.gateway.start()
    stack.gateway.wait_ready()
    stack.wait_whole()
    assert told(stack, "POST", "/double/promote")[1]["meant"] == "2"
    assert asked(stack) == (200, "2")
    assert told(stack, "POST", "/double/return")[0] == 409


def test_the_commands_say_what_the_routes_do(stack: FleetStack) -> None:
    from tidegate.tools.build.cli import model

    def run(*words: str) -> tuple[int, str]:
        admin = ("--admin", stack.gateway.addresses["admin"])
        result = CliRunner().invoke(model, [*words, *admin], env={"COLUMNS": "200"})
        return result.exit_code, result.output

    code, said = run(
        "split", "double", "1", "--standing", "2", "--share", "25%", "--tenant", "acme", "--compare", "100%"
    )
    assert (code, "25 % and acme, candidate" in said, "75 %, standing" in said) == (0, True, True), said
    for _ in range(8):
        asked(stack, headers={"tidegate-version": "standing"})
    code, said = run("status", "double")
    assert (code, "75 %, standing" in said, "rounds" in said) == (0, True, False), said
    code, said = run("status", "--json")
    (double,) = [one for one in json.loads(said)["versions"] if one["name"] == "double"]
    assert double["trial"]["figures"]["2"]["asked"] == 8
    assert run("return", "double")[0] == 0
    code, said = run("promote", "double")
    assert (code, "no candidate of 'double' is on trial" in said) == (1, True)
    assert run("split", "double", "1", "--share", "half")[0] == 2


def test_a_trial_that_makes_no_sense_is_refused_with_the_reason(stack: FleetStack) -> None:
    for body, words in (
        ({"candidate": "9"}, "no version '9'"),
        ({"candidate": "2", "standing": "1", "share": 7}, "share must be a number from 0 to 1"),
        ({"candidate": "2", "shares": 0.1}, "shares"),
    ):
        status, text = told(stack, "PUT", "/double/trial", body)
        assert (status, words in text) == (422, True), text
    assert told(stack, "PUT", "/nobody/trial", {"candidate": "2"})[0] == 422


def test_a_device_serves_one_version_of_a_model_and_says_so(tmp_path: Path) -> None:
    from edge_agent.serving.catalogue import read_catalogue
    from tidegate.models.repository import Repository
    from tidegate.runtime.process import StartError

    repository = Repository(tiny_repository(tmp_path / "models", versions=("1", "2")))
    with pytest.raises(StartError, match="one version of a model"):
        read_catalogue(repository, ("double:1", "double:2"))
    assert [one.manifest.version for one in read_catalogue(repository, ("double:1",)).entries] == ["1"]
    assert [one.manifest.version for one in read_catalogue(repository, ("double",)).entries] == ["2"]
