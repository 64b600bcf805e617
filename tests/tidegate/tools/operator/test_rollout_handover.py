"""A rollout is sent once, whatever becomes of the operator, to a gateway that its command line names."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from gateway.delivery.rollouts.routes import SteeringRequest
from tests.support.operator.resources import body, stored
from tidegate.admin_client import AdminError
from tidegate.tools.operator.resource import Refused
from tidegate.tools.operator.rollout_handover import RolloutHandover

ORDER = json.dumps({"spec": {"id": "c-1"}, "documents": {}})


class Conductor:
    """The rollout routes of a gateway's admin port, with one rollout at most."""

    def __init__(self) -> None:
        self.phase = ""  # "": it knows no rollout
        self.reason = ""
        self.begin_status = 201
        self.posts: list[tuple[str, str, str]] = []  # path, body, credential
        conductor = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(200 if conductor.phase else 404)

            def do_POST(self) -> None:
                sent = self.rfile.read(int(self.headers["Content-Length"])).decode()
                conductor.posts.append((self.path, sent, self.headers.get("Authorization", "")))
                status = conductor.begin_status if self.path == "/v1/rollouts" else 200
                if status < 400:
                    verb = self.path.split("/")[-1]
                    conductor.phase = {"pause": "paused", "abort": "returning"}.get(verb, "running")
                    conductor.reason = SteeringRequest(json.loads(sent)["why"]).words if verb == "pause" else ""
                self.answer(status)

            def answer(self, status: int) -> None:
                known = {"id": "c-1", "phase": conductor.phase, "reason": conductor.reason, "wave": 1,
                         "waves": [0.1, 1.0], "counts": {"asked": 3}}  # fmt: skip
                raw = json.dumps(known if status < 400 else {"error": f"words of {status}"}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_: Any) -> None:
                return None

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def conductor() -> Iterator[Conductor]:
    made = Conductor()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


def handover(conductor: Conductor) -> RolloutHandover:
    return RolloutHandover({"main": conductor.url})


def rollout(order: str = ORDER, **spec: Any) -> Any:
    return stored(body("TidegateRollout", "queues", **{"gateway": "main", "order": order, **spec}))


async def test_an_order_is_sent_as_it_is_and_once(conductor: Conductor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_API_KEY", "tg-key")
    first = await handover(conductor).carry(rollout())
    again = await handover(conductor).carry(rollout())

    assert conductor.posts == [("/v1/rollouts", ORDER, "Bearer tg-key")]
    assert first == again
    assert (first.fields["phase"], first.fields["wave"], first.fields["waves"], first.over) == ("running", 1, 2, False)


@pytest.mark.parametrize(
    ("phase", "state", "sent"),
    [
        ("running", "paused", "pause"), ("running", "aborted", "abort"), ("paused", "aborted", "abort"),
        ("succeeded", "aborted", "abort"), ("paused", "running", ""), ("paused", "paused", ""),
        ("returned", "aborted", ""), ("returning", "aborted", ""),
    ],
)  # fmt: skip
async def test_what_a_resource_wants_is_said_once(conductor: Conductor, phase: str, state: str, sent: str) -> None:
    conductor.phase = phase
    await handover(conductor).carry(rollout(state=state))

    assert [path for path, _, _ in conductor.posts] == ([f"/v1/rollouts/c-1/{sent}"] if sent else [])


async def test_what_a_resource_has_paused_it_sets_running_again(conductor: Conductor) -> None:
    conductor.phase = "running"
    await handover(conductor).carry(rollout(state="paused"))
    report = await handover(conductor).carry(rollout(state="running"))

    assert [path for path, _, _ in conductor.posts] == [f"/v1/rollouts/c-1/{verb}" for verb in ("pause", "resume")]
    assert report.fields["phase"] == "running"


@pytest.mark.parametrize("reason", ["3 of 40 devices returned", "operator: lunch", "operator"])
async def test_what_others_have_paused_waits_for_a_person(conductor: Conductor, reason: str) -> None:
    conductor.phase, conductor.reason = "paused", reason
    await handover(conductor).carry(rollout(state="running"))

    assert conductor.posts == []


async def test_what_was_aborted_before_it_began_never_begins(conductor: Conductor) -> None:
    report = await handover(conductor).carry(rollout(state="aborted"))

    assert (conductor.posts, report.over) == ([], True)


async def test_an_order_that_is_wrong_is_not_sent_again_and_one_that_comes_early_is(conductor: Conductor) -> None:
    conductor.begin_status = 422
    with pytest.raises(Refused, match="words of 422"):
        await handover(conductor).carry(rollout())
    conductor.begin_status = 409
    with pytest.raises(AdminError, match="words of 409"):
        await handover(conductor).carry(rollout())


@pytest.mark.parametrize("order", ["no JSON", "{}", '{"spec": {"id": "../../v1/devices"}}', '{"spec": []}'])
async def test_an_order_without_a_name_goes_nowhere(conductor: Conductor, order: str) -> None:
    with pytest.raises(Refused) as refused:
        await handover(conductor).carry(rollout(order))
    assert (refused.value.reason, conductor.posts) == ("InvalidOrder", [])


async def test_the_key_goes_only_where_the_command_line_says(conductor: Conductor) -> None:
    with pytest.raises(Refused, match="no --conductor"):
        await handover(conductor).carry(rollout(gateway="other"))
    assert conductor.posts == []
