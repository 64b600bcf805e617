"""A device whose language model has wrong weights is found by its tokens, demoted, and back once the file is right."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import onnx
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from tests.support.faults.fleet_stack import FleetStack
from tests.support.models.tiny_llama import VOCABULARY_SIZE
from tests.support.mqtt.brokers import MOSQUITTO
from tidegate.models.digest import sha256_of
from tidegate.models.repository import Repository, save_manifest
from tidegate.tools.build.cli import model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.needs_mosquitto,
    pytest.mark.timeout(300),
    pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed"),
]

EVERYTHING = {"share": 1.0, "every_s": 0.01, "pool_share": 1.0}
WEIGHTS = "model.onnx.data"


@pytest.fixture(scope="module")
def models(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the tiny model. Its devices have int8, since in int4 most of its tokens are others."""
    pytest.importorskip("onnxruntime_genai", reason="the extra edge-llm is not installed")
    root = tmp_path_factory.mktemp("token-agreement")
    shutil.copytree(tiny_llama, root / "source")
    repository = ["--repository", str(root / "models")]
    add = ["add", "tiny", "--generative", str(root / "source"), "--only", "pool", *repository]
    for words in (add, ["quantize", "tiny", "--precision", "int8", *repository]):
        result = CliRunner().invoke(model, words, catch_exceptions=False)
        assert result.exit_code == 0, result.output
    return root / "models"


@pytest.fixture(scope="module")
def stack(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetStack]:
    folder = tmp_path_factory.mktemp("stack")
    shutil.copytree(models, folder / "own")
    break_weights(folder / "own")
    edges = {"a": {"model_repository": str(folder / "own")}}
    gateway = {"agreement": EVERYTHING, "policy": "cheapest"}  # by value the better variant would answer
    with FleetStack(folder / "run", models, edges=edges, pool={}, gateway=gateway) as running:
        yield running


def break_weights(root: Path) -> None:
    """Move the bytes of each weight by a row, and let the manifest of this device name the file as it is now."""
    repository = Repository(root)
    manifest = repository.manifest("tiny")
    int8 = manifest.variant("int8")
    assert int8 is not None
    artefact = repository.artefact(manifest, int8)
    path = artefact.parent / WEIGHTS
    content = bytearray(path.read_bytes())
    for tensor in onnx.load(artefact, load_external_data=False).graph.initializer:
        if tensor.name.endswith("_Q8"):
            place = {one.key: one.value for one in tensor.external_data}
            begin, length = int(place["offset"]), int(place["length"])
            row = length // tensor.dims[0]
            content[begin : begin + length] = content[begin + row : begin + length] + content[begin : begin + row]
    path.write_bytes(content)
    files = [replace(one, sha256=sha256_of(path)) if one.name == WEIGHTS else one for one in int8.files]
    variants = [replace(int8, files=tuple(files)) if one is int8 else one for one in manifest.variants]
    save_manifest(artefact.parent, replace(manifest, variants=tuple(variants)))


class Caller:
    """Asks for another answer each time."""

    def __init__(self, stack: FleetStack) -> None:
        self._stack = stack
        self._random = Random(20)
        self.asked = 0

    def ask_both(self) -> None:
        """Whoever answers, greedily or not; and the pool, whose work allows for shadows."""
        self.asked += 1
        self.ask(temperature=0.8 * (self.asked % 2))
        assert self.ask(variant="bf16") == "pool/pool"

    def ask(self, *, temperature: float = 0.0, variant: str = "") -> str:
        """Who answered."""
        prompt = [self._random.randrange(3, VOCABULARY_SIZE) for _ in range(20)]
        tensor = {"name": "input_ids", "datatype": "INT32", "shape": [len(prompt)], "data": prompt}
        body = {"inputs": [tensor], "parameters": {"max_tokens": 12, "temperature": temperature}}
        request = urllib.request.Request(
            f"{self._stack.http}/v2/models/tiny/infer",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "tidegate-budget-ms": "20000", "tidegate-variant": variant},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            served_by: str = answer.headers["tidegate-served-by"]
            return served_by


def read(stack: FleetStack, path: str) -> Any:
    address = stack.gateway.addresses["admin"].removeprefix("http://")
    with urllib.request.urlopen(f"http://{address}{path}", timeout=30) as answer:
        return json.load(answer)


def drifts(stack: FleetStack) -> bool:
    return "answer_drift" in stack.targets()["edge/a"]["ails"]


def test_wrong_weights_are_found_by_their_tokens_demoted_and_forgiven_once_they_are_right(
    stack: FleetStack, models: Path
) -> None:
    caller = Caller(stack)

    # Found, by greedy answers and by those to the prompts of sampled ones.
    while not drifts(stack):
        caller.ask_both()
        assert caller.asked < 300, f"{read(stack, '/v1/agreement')}\n{stack.logs}"
    (source,) = read(stack, "/v1/agreement")["sources"]
    assert source["demoted"] and source["metric"] == "tokens" and source["compared"] <= 200
    assert "differ from pool/pool's bf16" in source["why"] and "tokens of output_ids" in source["why"]
    assert source["recent_mean"] > source["limit"] > source["recorded"] > 0.0
    assert [caller.ask() for _ in range(5)] == ["pool/pool"] * 5
    admin = f"http://{stack.gateway.addresses['admin'].removeprefix('http://')}"
    found = json.loads(CliRunner().invoke(model, ["disagreements", "tiny", "--json", "--admin", admin]).output)
    assert found["disagreements"][0]["metric"] == "tokens" and found["disagreements"][0]["score"] > source["limit"]

    # The file is right again: the device comes back by itself, by answers that the pool has given.
    edge = stack.part("a")
    edge.stop()
    edge.config["model_repository"] = str(models)
    edge.start()
    edge.wait_ready()
    stack.wait_whole()
    assert drifts(stack), "a new process is not taken at its word"
    before = caller.asked
    while drifts(stack):
        caller.ask_both()
        assert caller.asked < before + 500, f"{read(stack, '/v1/agreement')}\n{stack.logs}"
    (source,) = read(stack, "/v1/agreement")["sources"]
    assert not source["demoted"]
    assert caller.ask() == "edge/a"
