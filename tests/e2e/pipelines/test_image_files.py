"""Files of images through a gateway to a device and to a pool: real digits, real clients, and files that are none."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from click.testing import CliRunner

from tests.support.faults.fleet_stack import FleetStack
from tests.support.models.images import Pixels, as_file, as_tensor, scanned_digits
from tests.support.mqtt.brokers import MOSQUITTO
from tidegate.cli import cli
from tidegate.models.repository import Repository

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.needs_mosquitto,
    pytest.mark.timeout(300),
    pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed"),
]

DOCS = Path(__file__).parents[3] / "docs" / "pipelines.md"


# Functions, since what reads the digits imports for seconds, and every process of a run collects this file.
@cache
def scans() -> list[Pixels]:
    return scanned_digits(40)


@cache
def pngs() -> list[bytes]:
    return [as_file(one) for one in scans()]


@cache
def jpegs() -> list[bytes]:
    return [as_file(one, "JPEG", quality=98) for one in scans()]


@cache
def broken_files() -> list[bytes]:
    png = pngs()[0]
    return [png[:-40], jpegs()[0][:-60], b"", b"GIF89a", png[:20] + b"\x7f" + png[21:], b"\xff\xd8\xff" + bytes(99)]


def command_of_the_docs() -> list[str]:
    """The arguments of `tidegate model add` in the section on images."""
    (found,) = re.findall(r"^tidegate (model add digit-files (?:.*\\\n)*.*)$", DOCS.read_text(), re.MULTILINE)
    return shlex.split(found.replace("\\\n", " "))


@pytest.fixture(scope="module")
def stack(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetStack]:
    """One device and a pool, with the model that the docs' command makes of the demo's artefacts."""
    folder = tmp_path_factory.mktemp("images")
    repository = Repository(digits)
    artefacts = repository.folder(repository.manifest("digits"))
    words = [
        str(artefacts / word) if word.endswith((".onnx", ".pt2")) else word
        for word in [*command_of_the_docs(), "--repository", str(folder / "models")]
    ]
    added = CliRunner().invoke(cli, words)
    assert added.exit_code == 0, added.output
    with FleetStack(folder / "run", folder / "models", edges={"a": {}}, pool={}) as running:
        yield running


def places(stack: FleetStack, *files: bytes, pin: str = "any") -> list[int]:
    """The places of the best classes, by tritonclient over gRPC."""
    with triton_grpc.InferenceServerClient(stack.gateway.addresses["grpc"]) as client:
        sent = triton_grpc.InferInput("file", [len(files)], "BYTES")
        sent.set_data_from_numpy(as_tensor(*files))
        answer = client.infer("digit-files", [sent], headers={"tidegate-pin": pin, "tidegate-budget-ms": "20000"})
    return [int(one) for one in np.asarray(answer.as_numpy("place")).ravel()]


def expected(digits: Path, variant: str) -> list[int]:
    """What the artefact itself says of the same pixels as a tensor."""
    from tidegate.engines.engine import load_engine

    repository = Repository(digits)
    manifest = repository.manifest("digits")
    (one,) = [one for one in manifest.variants if one.name == variant]
    engine = load_engine(one.engine, repository.artefact(manifest, one), outputs=("probabilities",))
    pixels = np.stack(scans())[:, None].astype(np.float32) / np.float32(255)
    found = [engine.infer({"image": row[None]})["probabilities"][0] for row in pixels]
    return [int(one) for one in np.argmax(found, axis=1)]


def curl(stack: FleetStack, folder: Path, file: bytes) -> tuple[int, str, bytes]:
    """Status, who answered, and the body, of the docs' request."""
    (folder / "digit.png").write_bytes(file)
    command = ["curl", "-s", "-D", "-", "--data-binary", f"@{folder / 'digit.png'}"]
    command += ["-H", "Inference-Header-Content-Length: 0", "-H", "tidegate-budget-ms: 20000"]
    done = subprocess.run(
        [*command, f"{stack.http}/v2/models/digit-files/infer"], check=True, capture_output=True, timeout=60
    )
    head, _, body = done.stdout.partition(b"\r\n\r\n")
    words = head.decode().lower()
    by = re.search(r"tidegate-served-by: (\S+)", words)
    return int(words.split()[1]), by[1] if by else "", body


def test_files_are_answered_as_their_pixels_by_the_device_and_by_the_pool(
    stack: FleetStack, digits: Path, tmp_path: Path
) -> None:
    of_edge = [places(stack, one, pin="edge")[0] for one in pngs()]
    assert of_edge == expected(digits, "int8")
    of_jpeg = places(stack, *jpegs()[:8], pin="edge")
    assert sum(one == other for one, other in zip(of_jpeg, of_edge, strict=False)) >= 7

    status, by, _ = curl(stack, tmp_path, pngs()[3])
    assert (status, by.partition("/")[0] in ("edge", "pool")) == (200, True)
    with triton_http.InferenceServerClient(stack.http.removeprefix("http://")) as client:
        sent = triton_http.InferInput("file", [2], "BYTES")
        sent.set_data_from_numpy(as_tensor(pngs()[5], jpegs()[5]), binary_data=True)
        answer = client.infer("digit-files", [sent], headers={"tidegate-pin": "edge"})
        assert answer.as_numpy("place").ravel().tolist() == [of_edge[5]] * 2

    stack.part("a").kill()
    try:
        assert [places(stack, one)[0] for one in pngs()] == expected(digits, "fp32")
        assert curl(stack, tmp_path, jpegs()[3])[1] == "pool/pool"
    finally:
        stack.part("a").start()
        stack.part("a").wait_ready()
        stack.wait_whole()


def test_each_broken_file_is_its_senders_error_while_others_are_answered(stack: FleetStack, tmp_path: Path) -> None:
    good = {pin: [places(stack, one, pin=pin)[0] for one in pngs()[:6]] for pin in ("edge", "any")}
    workers = sorted(one.pid for name in ("a", "pool") for one in stack.part(name).everyone())

    def ask(number: int) -> object:
        pin, broken = ("edge", "any")[number % 2], number % 3 == 0
        try:
            return places(stack, broken_files()[number // 3 % 6] if broken else pngs()[number % 6], pin=pin) == [
                good[pin][number % 6]
            ]
        except triton_grpc.InferenceServerException as error:
            return str(error.message())

    with ThreadPoolExecutor(8) as callers:
        found = list(callers.map(ask, range(120)))
    for number, one in enumerate(found):
        if number % 3 == 0:
            assert isinstance(one, str) and "step image_decode (image): image 0 " in one, one
        elif number % 2 == 0:
            assert one is True, one  # the pool and the device may differ in what is open to either
        else:
            assert isinstance(one, bool), one
    assert sorted(one.pid for name in ("a", "pool") for one in stack.part(name).everyone()) == workers

    status, _, body = curl(stack, tmp_path, broken_files()[0])
    assert status == 400 and "image file is truncated" in json.loads(body)["error"]
    bomb = pngs()[0][:16] + (60_000).to_bytes(4, "big") * 2 + pngs()[0][24:]
    status, _, body = curl(stack, tmp_path, bomb)
    assert status == 400 and "at most 16777216 (max_pixels)" in json.loads(body)["error"]
    assert all(target["state"] == "ready" for target in stack.targets().values())
