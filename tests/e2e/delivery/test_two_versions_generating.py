"""Two versions of a generating model side by side: a stream keeps the version that began it, whatever is changed."""

from __future__ import annotations

import json
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.faults.fleet_stack import FleetStack
from tests.support.models.text_side import text_side_folder
from tests.support.mqtt.brokers import MOSQUITTO
from tests.support.paced_generation import write_pace
from tidegate.models.digest import sha256_of
from tidegate.models.repository import save_manifest
from tidegate.servers.operator_token import token_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.needs_mosquitto,
    pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed"),
]
LONG = 200


def talkers(root: Path) -> Path:
    """Versions 1 and 2 of a paced model with a text side, which say the same."""
    for version in ("1", "2"):
        folder = root / "talker" / version
        folder.mkdir(parents=True)
        manifest = text_side_folder(folder)
        path = write_pace(folder, ids=(5, 250), step_ms=((1.0, 10.0),), slots=8, context=512)
        (variant,) = manifest.variants
        variant = replace(variant, artefact=path.name, sha256=sha256_of(path), size_bytes=path.stat().st_size)
        save_manifest(folder, replace(manifest, version=version, variants=(variant,)))
    return root


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[FleetStack]:
    usual = {"store": None, "sensors": None}
    edges = {"one": {"models": ["talker:1"], **usual}, "two": {"models": ["talker:2"], **usual}}
    with FleetStack(tmp_path / "run", talkers(tmp_path / "models"), edges=edges) as running:
        yield running


def asked(stack: FleetStack, path: str, headers: dict[str, str], **parameters: Any) -> urllib.request.Request:
    body = {"text_input": "the tide", "parameters": {"ignore_eos": True, **parameters}}
    usual = {"Content-Type": "application/json", "tidegate-budget-ms": "30000"}
    return urllib.request.Request(
        f"{stack.http}/v2/models/talker/{path}", json.dumps(body).encode(), {**usual, **headers}
    )


def version_now(stack: FleetStack) -> str:
    with urllib.request.urlopen(asked(stack, "generate", {}, max_tokens=1), timeout=60) as answer:
        return str(json.load(answer)["model_version"])


@contextmanager
def stream(stack: FleetStack, *, version: str) -> Iterator[list[dict[str, Any]]]:
    """A long answer that goes on meanwhile; at the end its events."""
    events: list[dict[str, Any]] = []
    begun = threading.Event()

    def read() -> None:
        request = asked(stack, "generate_stream", {"tidegate-version": version} if version else {}, max_tokens=LONG)
        with urllib.request.urlopen(request, timeout=60) as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    events.append(json.loads(line.removeprefix(b"data: ")))
                    begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert begun.wait(60)
        yield events
    finally:
        reader.join()


def tokens(events: list[dict[str, Any]]) -> int:
    return sum(len(one["output_ids"]) for one in events)


def told(stack: FleetStack, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    admin = stack.gateway.addresses["admin"]
    request = urllib.request.Request(
        f"{admin}/v1/versions{path}",
        json.dumps(body).encode() if body is not None else None,
        {"Content-Type": "application/json", "Authorization": f"Bearer {token_for(admin)}"},
        method=method,
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_stream_ends_in_the_version_that_began_it_while_trials_begin_and_end(stack: FleetStack) -> None:
    status, words = told(stack, "PUT", "/talker/trial", {"standing": "1", "candidate": "2", "compare": 0.1})
    assert status == 422 and "talker generates: " in words and "Leave --compare out" in words
    assert told(stack, "PUT", "/talker/trial", {"standing": "1", "candidate": "2"})[0] == 200
    assert version_now(stack) == "1"
    with stream(stack, version="candidate") as candidate, stream(stack, version="standing") as standing:
        assert told(stack, "POST", "/talker/promote")[0] == 200
        assert version_now(stack) == "2"
        assert told(stack, "PUT", "/talker/trial", {"standing": "2", "candidate": "1", "share": 1.0})[0] == 200
        assert version_now(stack) == "1"
        assert told(stack, "POST", "/talker/return")[0] == 200
        assert tokens(candidate) < LONG and tokens(standing) < LONG, "they go on"
    for version, events in (("2", candidate), ("1", standing)):
        assert tokens(events) == LONG and {one["model_version"] for one in events} == {version}
    assert "".join(one["text_output"] for one in candidate) == "".join(one["text_output"] for one in standing)


def test_a_candidate_that_dies_ends_its_streams_declared_and_no_other_version_goes_on(stack: FleetStack) -> None:
    assert told(stack, "PUT", "/talker/trial", {"standing": "1", "candidate": "2", "share": 1.0})[0] == 200
    assert version_now(stack) == "2"
    with stream(stack, version="") as events:
        stack.part("two").signal_all(signal.SIGKILL)
    *said, last = events
    assert 0 < tokens(said) < LONG and {one["model_version"] for one in said} == {"2"}
    assert "error" in last, last
    assert version_now(stack) == "1", "what has not begun is answered by the other one"
