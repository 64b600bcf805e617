"""`tidegate ray-scale` between a gateway and Serve, each of which may say something else, or nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from click.testing import CliRunner

from tidegate.tools.ray_scale_cli import ScaleError, needed_of, ray_scale, target_of

LISTED = {"applications": {"pool": {"deployments": {"pool": {"target_num_replicas": 2}}}}}


class Sides:
    """Both sides on one port: what they answer, and what Serve was told."""

    def __init__(self) -> None:
        self.scaling: tuple[int, Any] = 200, {"pool_replicas_needed": 3, "known": True}
        self.listed: tuple[int, Any] = 200, LISTED
        self.scaled: tuple[int, Any] = 200, {}
        self.told: list[tuple[str, int]] = []
        sides = self

        class Answers(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._say(*(sides.scaling if self.path == "/scaling" else sides.listed))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                sides.told.append((self.path, body["target_num_replicas"]))
                self._say(*sides.scaled)

            def _say(self, status: int, words: Any) -> None:
                raw = words if isinstance(words, bytes) else json.dumps(words).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        # It looks for its end every so often: by default every half second, for each of these tests.
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), name="sides")

    def __enter__(self) -> Sides:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def sides() -> Iterator[Sides]:
    with Sides() as both:
        yield both


def once(sides: Sides, *words: str) -> tuple[int, str]:
    done = CliRunner().invoke(ray_scale, ["--once", "--gateway", sides.url, "--serve", sides.url, *words])
    return done.exit_code, done.output


def test_serve_is_aimed_at_the_need(sides: Sides) -> None:
    code, said = once(sides)
    assert code == 0 and json.loads(said) == {"event": "scaled", "replicas": 3}
    assert sides.told == [("/api/v1/applications/pool/deployments/pool/scale", 3)]


def test_where_it_aims_at_that_already_it_is_left_alone(sides: Sides) -> None:
    sides.scaling = 200, {"pool_replicas_needed": 2, "known": True}
    assert once(sides) == (0, "")
    assert sides.told == []


@pytest.mark.parametrize(
    ("side", "answer", "said"),
    [
        ("scaling", (503, {"pool_replicas_needed": 1, "known": False}), "the need is not known yet"),
        ("scaling", (404, b"no such page"), "HTTP 404: no such page"),
        ("scaling", (200, {"replicas": 3}), "is no need for replicas"),
        ("scaling", (200, b"<html>"), "/scaling: "),
        ("listed", (200, {"applications": {}}), "has no deployment 'pool' in an application 'pool'"),
        ("listed", (200, []), "has no deployment"),
        ("scaled", (400, b"external scaling is off"), "needs `external_scaler_enabled: true`"),
    ],
)
def test_what_goes_wrong_is_said_with_the_way_out(sides: Sides, side: str, answer: tuple[int, Any], said: str) -> None:
    setattr(sides, side, answer)
    code, words = once(sides)
    assert code == 1
    assert said in words


def test_nobody_there_is_said_with_the_address() -> None:
    done = CliRunner().invoke(ray_scale, ["--once", "--gateway", "http://127.0.0.1:9"])
    assert done.exit_code == 1 and "http://127.0.0.1:9/scaling" in done.output


def test_names_are_taken_as_they_are(sides: Sides) -> None:
    sides.listed = 200, {"applications": {"a/b": {"deployments": {"c d": {"target_num_replicas": 1}}}}}
    assert once(sides, "--application", "a/b", "--deployment", "c d")[0] == 0
    assert sides.told == [("/api/v1/applications/a%2Fb/deployments/c%20d/scale", 3)]


def test_a_need_that_is_not_known_is_none() -> None:
    assert needed_of({"pool_replicas_needed": 4}) == 4
    assert needed_of({"pool_replicas_needed": 4, "known": False}) is None
    with pytest.raises(ScaleError):
        needed_of([])
    assert target_of(LISTED, "pool", "pool") == 2
