"""A real language model comes to a real agent by rollout, and one that says other things goes back, under traffic."""

from __future__ import annotations

import json
import os
import shutil
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from gateway.commands.keys import keys
from tests.support.faults.fleet_stack import FleetStack
from tests.support.mqtt.brokers import MOSQUITTO
from tidegate.models.digest import sha256_of
from tidegate.models.manifest import ArtefactFile, Manifest
from tidegate.models.repository import Repository, save_manifest
from tidegate.tools.build.cli import model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(600),  # it may wait for the build of the model
    pytest.mark.needs_mosquitto,
    pytest.mark.skipif(MOSQUITTO is None, reason="needs Mosquitto"),
]
WEIGHTS = "model.onnx.data"
LONG = 400


class Shipper:
    """A device, a gateway, and an operator beside them with a key and a repository."""

    def __init__(self, folder: Path, source: Repository) -> None:
        self.folder = folder
        self.models, self.own = folder / "models", folder / "own"
        manifest = source.manifest("smollm2")
        self.first = self._version(self.models, source.folder(manifest), manifest, "1")
        shutil.copytree(self.models, self.own, copy_function=os.link)
        (self.own / "smollm2" / "1" / "model.yaml").unlink()
        save_manifest(self.own / "smollm2" / "1", self.first)
        made_key = CliRunner().invoke(keys, ["signing", "create", "operator", "--dir", str(folder)])
        assert made_key.exit_code == 0, made_key.output
        edge = {"models": ["smollm2"], "sensors": None, "store": None}
        self.fleet = FleetStack(
            folder / "fleet",
            self.models,
            edges={"kiosk": {**edge, "rollout": {"keys": [str(folder / "operator.pub")], "recheck_s": 0.1}}},
            gateway={"artifacts": {"folder": str(folder / "artifacts"), "port": 0}},
        )

    def made(self, version: str, *, break_weights: bool = False) -> None:
        """A version in the operator's repository, of the same weights or of some that were damaged on their way."""
        source = self.own / "smollm2" / "1"
        manifest = Repository(self.own).manifest("smollm2", "1")
        made = self._version(self.own, source, manifest, version)
        if not break_weights:
            return
        place = self.own / "smollm2" / version
        raw = bytearray((source / WEIGHTS).read_bytes())
        middle = len(raw) // 2
        raw[middle : middle + 4_000_000] = bytes(4_000_000)
        (place / WEIGHTS).unlink()
        (place / WEIGHTS).write_bytes(raw)
        (variant,) = made.variants
        files = tuple(
            ArtefactFile(WEIGHTS, sha256_of(place / WEIGHTS), len(raw)) if one.name == WEIGHTS else one
            for one in variant.files
        )
        save_manifest(place, replace(made, variants=(replace(variant, files=files),)))

    def run(self, *words: str) -> Result:
        return CliRunner().invoke(model, list(words))

    def rollout(self, version: str, *words: str) -> Result:
        usual = ("--repository", str(self.own), "--key", str(self.folder / "operator.key"), "--soak", "0s")
        admin = ("--admin", self.fleet.gateway.addresses["admin"], "--json")
        return self.run("rollout", "smollm2", "--version", version, *usual, *admin, *words)

    def device(self) -> dict[str, Any]:
        """Its row in the status."""
        admin = ("--admin", self.fleet.gateway.addresses["admin"], "--json")
        (row,) = json.loads(self.run("status", "smollm2", *admin).stdout)["devices"]
        found: dict[str, Any] = row
        return found

    @staticmethod
    def _version(root: Path, source: Path, manifest: Manifest, version: str) -> Manifest:
        """The device's part of a version, its files linked."""
        place = root / "smollm2" / version
        place.mkdir(parents=True)
        variants = tuple(one for one in manifest.variants if "edge" in one.where)
        made = replace(manifest, version=version, variants=variants)
        generative = manifest.generative
        assert generative is not None and generative.chat_template is not None
        names = {generative.tokenizer, generative.chat_template}
        for one in variants:
            names |= {one.artefact, *(file.name for file in one.files), *([one.golden.name] if one.golden else [])}
        for name in names:
            os.link(source / name, place / name)
        save_manifest(place, made)
        return made


@pytest.fixture(scope="module")
def shipper(smollm2_repository: Repository, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shipper]:
    shipper = Shipper(tmp_path_factory.mktemp("ship"), smollm2_repository)
    recorded = shipper.run("golden", "smollm2", "--version", "1", "--repository", str(shipper.own))
    assert recorded.exit_code == 0, recorded.output
    with shipper.fleet:
        yield shipper


def said(event: bytes) -> tuple[str, int]:
    """The version that said it, and how many tokens it has."""
    answer = json.loads(event)
    assert "error" not in answer, answer
    return answer["model_version"], len(answer["output_ids"])


def whole(events: list[tuple[str, int]]) -> bool:
    return sum(tokens for _, tokens in events) == LONG


def asked(shipper: Shipper, path: str, **parameters: Any) -> urllib.request.Request:
    body = {"text_input": "The tide comes in", "parameters": parameters}
    headers = {"Content-Type": "application/json", "tidegate-budget-ms": "120000"}
    return urllib.request.Request(f"{shipper.fleet.http}/v2/models/smollm2/{path}", json.dumps(body).encode(), headers)


def version_now(shipper: Shipper) -> str:
    with urllib.request.urlopen(asked(shipper, "generate", max_tokens=2), timeout=120) as answer:
        return said(answer.read())[0]


@contextmanager
def long_answer(shipper: Shipper) -> Iterator[list[tuple[str, int]]]:
    """A stream that goes on meanwhile; at the end all that it said."""
    events: list[tuple[str, int]] = []
    begun = threading.Event()

    def read() -> None:
        request = asked(shipper, "generate_stream", max_tokens=LONG, ignore_eos=True)
        with urllib.request.urlopen(request, timeout=120) as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    events.append(said(line.removeprefix(b"data: ")))
                    begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert begun.wait(120)
        yield events
    finally:
        reader.join()


def test_a_device_proves_what_was_recorded_before_it_serves_it(shipper: Shipper) -> None:
    assert version_now(shipper) == "1"
    shipper.made("2")
    with long_answer(shipper) as events:
        done = shipper.rollout("2")
        assert done.exit_code == 0, done.output + shipper.fleet.logs
        assert "at least 0.9 of the golden tokens that were recorded with it" in done.stderr
    assert whole(events) and {version for version, _ in events} == {"1"}
    assert shipper.device()["running"] == "2" and version_now(shipper) == "2"


def test_weights_that_were_damaged_never_answer_and_the_report_has_the_numbers(shipper: Shipper) -> None:
    before = version_now(shipper)
    shipper.made("3", break_weights=True)
    with long_answer(shipper) as events:
        done = shipper.rollout("3")
        assert done.exit_code == 1, done.output
    assert whole(events) and {version for version, _ in events} == {before}
    reason = json.loads(done.stdout)["reason"]
    assert "probe_accuracy: int4: " in reason and " golden tokens agree (0." in reason, reason
    assert "below 0.9; " in reason
    assert shipper.device()["running"] == before and version_now(shipper) == before


def test_golden_prompts_that_are_none_are_refused_before_anything_is_shipped(shipper: Shipper, tmp_path: Path) -> None:
    wrong = tmp_path / "cases.npz"
    wrong.write_bytes(b"PK")
    done = shipper.rollout("1", "--golden", str(wrong))
    assert done.exit_code == 1 and "`tidegate model golden smollm2 --out FILE` writes golden prompts" in done.output
    done = shipper.rollout("1", "--atol", "0.1")
    assert done.exit_code == 2 and "--atol is of numbers, and smollm2 answers in tokens: give --top1-min" in done.output
