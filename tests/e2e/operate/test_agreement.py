"""A device with wrong weights in a valid file is found by its answers, demoted, and back once the file is right."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from msgspec.structs import replace
from onnx import numpy_helper

from gateway.commands.status import status
from tests.support.faults.fleet_stack import FleetStack
from tests.support.mqtt.brokers import MOSQUITTO
from tidegate.models.digest import sha256_of
from tidegate.models.repository import Repository, save_manifest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.needs_mosquitto,
    pytest.mark.timeout(400),
    pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed"),
]

EVERYTHING = {"share": 1.0, "every_s": 0.01, "pool_share": 1.0}


@pytest.fixture(scope="module")
def stack(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetStack]:
    folder = tmp_path_factory.mktemp("agreement")
    own = folder / "own"
    shutil.copytree(digits, own)
    break_weights(own)
    gateway = {
        "agreement": {**EVERYTHING, "inputs_folder": str(folder / "inputs"), "inputs_bytes": 100_000},
        "tenants": {"private": {"shadow": False}},
    }
    edges = {"a": {"model_repository": str(own)}}
    with FleetStack(folder / "run", digits, edges=edges, pool={}, gateway=gateway) as running:
        yield running


def break_weights(root: Path) -> None:
    """Exchange the rows of the int8 weights, and let the manifest of this device name the file as it is now."""
    repository = Repository(root)
    manifest = repository.manifest("digits")
    (int8,) = [one for one in manifest.variants if one.name == "int8"]
    path = repository.artefact(manifest, int8)
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.INT8 and len(tensor.dims) > 1:
            rolled = np.ascontiguousarray(np.roll(numpy_helper.to_array(tensor), 1, axis=0))
            tensor.CopyFrom(numpy_helper.from_array(rolled, tensor.name))
    onnx.save(model, path)
    broken = replace(int8, sha256=sha256_of(path), size_bytes=path.stat().st_size)
    variants = tuple(broken if one is int8 else one for one in manifest.variants)
    save_manifest(path.parent, replace(manifest, variants=variants))


def images() -> Iterator[list[float]]:
    from tidegate.tools.build.demo.digits import held_out  # imports torch: slow, and only wanted here

    held, _ = held_out()
    while True:
        for image in held:
            yield [float(value) for value in image.reshape(-1)]


def asked(stack: FleetStack, image: list[float], **headers: str) -> dict[str, str]:
    """The headers of the answer."""
    body = {"inputs": [{"name": "image", "datatype": "FP32", "shape": [1, 1, 8, 8], "data": image}]}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(
        f"{stack.http}/v2/models/digits/infer",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "tidegate-budget-ms": "10000", **named},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return {name.lower(): value for name, value in answer.headers.items()}


def read(stack: FleetStack, path: str, door: str = "admin") -> Any:
    address = stack.gateway.addresses[door]
    with urllib.request.urlopen(f"http://{address.removeprefix('http://')}{path}", timeout=30) as answer:
        return json.load(answer) if door == "admin" else answer.read().decode()


def ails(stack: FleetStack) -> list[str]:
    found: list[str] = stack.targets()["edge/a"]["ails"]
    return found


def test_wrong_weights_are_found_demoted_and_forgiven_once_they_are_right(stack: FleetStack, digits: Path) -> None:
    image = images()

    # What must not be copied is not compared.
    for _ in range(20):
        assert asked(stack, next(image), tidegate_pin="edge")["tidegate-served-by"] == "edge/a"
        asked(stack, next(image), tidegate_tenant="private")
    assert read(stack, "/v1/agreement")["sources"] == []

    # Found, within 200 compared answers.
    served: Counter[str] = Counter()
    while "answer_drift" not in ails(stack):
        served[asked(stack, next(image))["tidegate-served-by"]] += 1
        assert served.total() < 400, f"{read(stack, '/v1/agreement')}\n{stack.logs}"
    (source,) = read(stack, "/v1/agreement")["sources"]
    assert source["demoted"] and source["compared"] <= 200
    assert "differ from pool/pool's fp32" in source["why"]

    # Placement goes round it, except for what nothing else may answer, and says so.
    assert [asked(stack, next(image))["tidegate-served-by"] for _ in range(5)] == ["pool/pool"] * 5
    pinned = asked(stack, next(image), tidegate_pin="edge")
    assert pinned["tidegate-served-by"] == "edge/a" and "degraded" in json.dumps(pinned)

    # Told: condition, status, metric, work list.
    (condition,) = [one for one in read(stack, "/debug/conditions")["conditions"] if one["condition"] == "answer_drift"]
    assert (condition["target"], condition["model"]) == ("edge/a", "digits")
    admin = ("--admin", f"http://{stack.gateway.addresses['admin'].removeprefix('http://')}")
    said = CliRunner().invoke(status, admin, env={"COLUMNS": "200"}).output
    assert "answer_drift" in said and "shadowed answers" in said
    metrics = read(stack, "/metrics", "metrics")
    drifts = [line for line in metrics.splitlines() if line.startswith("tidegate_answer_drift{")]
    assert len(drifts) == 1 and 'target="edge/a"' in drifts[0] and drifts[0].endswith(" 1.0")
    assert 'tidegate_shadow_answers_total{model="digits",outcome="compared"}' in metrics
    from tidegate.tools.build.cli import model

    found = json.loads(CliRunner().invoke(model, ["disagreements", "digits", "--json", *admin]).output)
    assert found["kept"] > 0 and found["disagreements"][0]["input_sha256"]
    with np.load(found["disagreements"][0]["file"]) as kept:
        assert kept["image"].shape == (1, 1, 8, 8)
    assert "demoted" in CliRunner().invoke(model, ["disagreements", *admin], env={"COLUMNS": "200"}).output

    # Shadows are nobody's requests: the gateway counts exactly what was asked.
    counted = sum(
        float(line.rpartition(" ")[2]) for line in metrics.splitlines() if line.startswith("tidegate_requests_total")
    )
    assert counted == 40 + served.total() + 6

    # The file is right again: the device comes back by itself.
    edge = stack.part("a")
    edge.stop()
    edge.config["model_repository"] = str(digits)
    edge.start()
    edge.wait_ready()
    stack.wait_whole()
    assert "answer_drift" in ails(stack), "a new process is not taken at its word"
    asks = 0
    while "answer_drift" in ails(stack):
        asked(stack, next(image))
        asks += 1
        assert asks < 1000, f"{read(stack, '/v1/agreement')}\n{stack.logs}"
    assert asked(stack, next(image))["tidegate-served-by"] == "edge/a"
