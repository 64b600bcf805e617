"""Real processes: a device, its gateway and a pool; the link between the first two is cut, and callers leave.

caller ──▶ edge ── dialled out, over a simulated link ──▶ gateway ──▶ pool
"""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.e2e.stack import eventually
from tests.support.faults.fleet_stack import Part
from tidegate.testing.links import LinkThread, SimLink
from tidegate.testing.ports import free_port
from tidegate.tools.build.demo.paced import PacedCosts, add_paced

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(240)]

SMALL, LARGE = 3, 300  # tokens; the edge takes 100
BUDGET_MS = 20_000.0
LONG_S = 4.0  # what the slow model takes in the pool


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: dict[str, Any]
    took_s: float


class Help:
    """The running system."""

    def __init__(self, edge: Part, gateway: Part, pool: Part, link: SimLink) -> None:
        self.edge, self.gateway, self.pool, self.link = edge, gateway, pool, link

    def ask(self, model: str, tokens: int, *, pin: str = "any") -> Answer:
        """What the edge answers to a local caller."""
        url = f"{self.edge.addresses['http']}/v2/models/{model}/infer"
        said = {"tidegate-budget-ms": str(BUDGET_MS), "tidegate-pin": pin}
        began_at = time.perf_counter()
        try:
            with urllib.request.urlopen(urllib.request.Request(url, _body(tokens), said), timeout=60) as answer:
                status, told, raw = answer.status, dict(answer.headers), answer.read()
        except urllib.error.HTTPError as error:
            status, told, raw = error.code, dict(error.headers), error.read()
        lower = {name.lower(): value for name, value in told.items()}
        return Answer(status, lower, json.loads(raw), time.perf_counter() - began_at)

    def begin(self, model: str, tokens: int) -> http.client.HTTPConnection:
        """A caller that has asked and waits."""
        caller = http.client.HTTPConnection(self.edge.addresses["http"].removeprefix("http://"), timeout=60)
        caller.request("POST", f"/v2/models/{model}/infer", _body(tokens), {"tidegate-budget-ms": str(BUDGET_MS)})
        return caller

    def state(self) -> dict[str, Any]:
        return _json(f"{self.gateway.addresses['admin']}/v1/state")

    def at_pool(self) -> tuple[int, int]:
        """Requests that wait in the pool, and that it computes."""
        rows = _metrics(self.pool)
        return int(rows["tidegate_pool_queued"]), int(rows["tidegate_pool_in_flight"])

    def asked(self) -> int:
        """Requests that gateways were asked for, whatever came of them."""
        rows = _metrics(self.edge).items()
        told = [(name, count) for name, count in rows if name.startswith("tidegate_edge_help_requests_total{")]
        return sum(int(count) for name, count in told if 'outcome="not-asked"' not in name)

    def helps(self) -> bool:
        told = _json(f"{self.edge.addresses['http']}/v1/state")["help"]
        return any(one["helps"] for one in told)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Help]:
    folder = tmp_path_factory.mktemp("help")
    everything, own = folder / "models", folder / "edge-models"
    both = PacedCosts(edge_ms=((1, 5), (100, 30)), pool_ms=((1, 10),), edge_max_units=100)
    add_paced("encoder", both, everything)
    add_paced("far", PacedCosts(pool_ms=((1, 10),)), everything)  # of which the edge has not even heard
    slow_ms = ((1, LONG_S * 1e3),)
    slow = PacedCosts(edge_ms=((1, 5), (100, 30)), pool_ms=slow_ms, edge_max_units=100, max_batch=1)
    add_paced("slow", slow, everything)
    for name in ("encoder", "slow"):
        shutil.copytree(everything / name, own / name)
    links = LinkThread()
    with contextlib.ExitStack() as stack:
        stack.callback(links.close)
        link_port = free_port()
        link = links.link(link_port, name="uplink")
        usual = {"log_level": "info", "grpc_port": free_port()}
        pool_keys = {
            **usual,
            "model_repository": str(everything),
            "threads": 1,
            "metrics_port": free_port(),
            "warmup_budget_s": 1,
        }
        pool = Part("pool", "cloud_pool", pool_keys, folder)
        gateway_keys = {
            "model_repository": str(everything),
            "targets": [{"name": "pool", "address": f"127.0.0.1:{usual['grpc_port']}"}],
            "link_port": link_port,
            "help": {"devices": [{"name": "kiosk-*", "tenant": "kiosks"}]},
            "grpc_port": free_port(),
            **{f"{door}_port": free_port() for door in ("http", "metrics", "admin")},
        }
        gateway = Part("gateway", "gateway", gateway_keys, folder)
        edge_keys = {
            "name": "kiosk-1",
            "model_repository": str(own),
            "state_dir": str(folder / "state"),
            "gateways": [link.address],
            "dial_out": "always",
            "help": {},
            "grpc_port": free_port(),
            **{f"{door}_port": free_port() for door in ("http", "metrics")},
        }
        edge = Part("kiosk-1", "edge_agent", edge_keys, folder)
        for part in (pool, gateway, edge):
            stack.callback(part.kill)
            part.start()
        for part in (pool, gateway, edge):
            part.wait_ready()
        running = Help(edge, gateway, pool, link)
        eventually(running.helps, 60.0, f"the edge can ask\n{edge.log[-3000:]}\n{gateway.log[-3000:]}")
        yield running


@pytest.fixture(autouse=True)
def _mended(system: Help) -> Iterator[None]:
    yield
    system.link.heal()
    if not system.gateway.alive:
        system.gateway.start()
        system.gateway.wait_ready()
    eventually(lambda: system.ask("encoder", LARGE).status == 200, 90.0, "help is back")
    eventually(lambda: system.at_pool() == (0, 0), 60.0, "nothing is left at the pool")


def test_what_is_too_large_for_the_device_is_answered_by_the_pool_and_the_answer_says_how(system: Help) -> None:
    small, large = system.ask("encoder", SMALL), system.ask("encoder", LARGE)

    assert small.headers["tidegate-served-by"] == "edge/kiosk-1"
    assert "tidegate-helped-by" not in small.headers
    assert (large.status, large.headers["tidegate-served-by"]) == (200, "pool/pool")
    assert large.headers["tidegate-helped-by"] == "gateway/main; because=unfit; chosen=only"
    assert large.headers["tidegate-route"].startswith("helped; variant=fp32; attempts=1;")
    assert 0.0 < float(large.headers["tidegate-budget-left-ms"]) < BUDGET_MS
    number = large.headers["tidegate-request-id"].rpartition("-")[2]
    [explained] = _json(f"{system.gateway.addresses['admin']}/debug/decisions?id={number}")["decisions"]
    assert (explained["protocol"], explained["asked_by"], explained["tenant"]) == ("help", "edge/kiosk-1", "kiosks")


def test_a_model_that_the_device_does_not_have_is_answered_and_one_that_no_one_has_is_refused(system: Help) -> None:
    far = system.ask("far", SMALL)
    assert (far.status, far.headers["tidegate-served-by"]) == (200, "pool/pool"), far.body
    assert "because=no-model" in far.headers["tidegate-helped-by"]
    assert system.ask("nowhere", SMALL).status == 404


def test_a_pinned_request_never_leaves_the_device(system: Help) -> None:
    before = system.asked()
    for pin in ("edge", "site"):
        refused = system.ask("encoder", LARGE, pin=pin)
        assert (refused.status, refused.headers["tidegate-refused"]) == (501, "not_supported")
        assert "a gateway was asked" not in refused.body["error"]
    assert system.asked() == before


def test_without_the_link_the_device_refuses_at_once_as_without_help(system: Help) -> None:
    system.link.partition("reset")
    eventually(lambda: not system.helps(), 30.0, "the device sees that its link is cut")

    refused = system.ask("encoder", LARGE)

    assert (refused.status, refused.headers["tidegate-refused"]) == (501, "not_supported")
    assert refused.took_s < BUDGET_MS / 1e3 / 4
    assert system.ask("far", SMALL).status == 404
    assert system.ask("encoder", SMALL).headers["tidegate-served-by"] == "edge/kiosk-1"


def test_a_caller_who_leaves_frees_the_queue_of_the_pool(system: Help) -> None:
    first, second = system.begin("slow", LARGE), system.begin("slow", LARGE)
    eventually(lambda: system.at_pool() == (1, 1), 30.0, "one is computed, and the other waits")

    second.close()
    first.close()

    eventually(lambda: [one["under_way"] for one in system.state()["help"]] == [0], 30.0, "the gateway lets go")
    eventually(lambda: system.at_pool()[0] == 0, 30.0, "the pool's queue is free")
    eventually(lambda: system.at_pool() == (0, 0), 30.0, "what was computed cannot be stopped, and ends")


def test_a_gateway_that_is_killed_in_the_middle_ends_the_request_in_words_and_within_its_budget(system: Help) -> None:
    waiting = system.begin("slow", LARGE)
    eventually(lambda: system.at_pool() == (0, 1), 30.0, "it is computed")
    began_at = time.perf_counter()

    system.gateway.kill()

    with contextlib.closing(waiting):
        answer = waiting.getresponse()
        told = json.loads(answer.read())
    assert (answer.status, answer.headers["tidegate-refused"]) == (503, "nothing_alive"), told
    assert "a gateway was asked" in told["error"]
    assert time.perf_counter() - began_at < BUDGET_MS / 1e3
    assert system.ask("encoder", SMALL).headers["tidegate-served-by"] == "edge/kiosk-1"


def test_a_link_that_falls_silent_ends_the_request_in_words_and_within_its_budget(system: Help) -> None:
    waiting = system.begin("slow", LARGE)
    eventually(lambda: system.at_pool() == (0, 1), 30.0, "it is computed")
    began_at = time.perf_counter()

    system.link.partition("blackhole")

    with contextlib.closing(waiting):
        answer = waiting.getresponse()
        told = json.loads(answer.read())
    assert (answer.status, answer.headers["tidegate-refused"]) == (503, "nothing_alive"), told
    assert time.perf_counter() - began_at < BUDGET_MS / 1e3


def _body(tokens: int) -> bytes:
    shape = [1, tokens]
    inputs = [
        {"name": name, "shape": shape, "datatype": "INT64", "data": [value] * tokens}
        for name, value in (("input_ids", 101), ("attention_mask", 1))
    ]
    return json.dumps({"inputs": inputs}).encode()


def _metrics(part: Part) -> dict[str, float]:
    """The samples of a part's metrics, by name and labels."""
    with urllib.request.urlopen(f"{_whole(part.addresses['metrics'])}/metrics", timeout=30) as answer:
        rows = [one.rpartition(" ") for one in answer.read().decode().splitlines() if not one.startswith("#")]
    return {name: float(value) for name, _, value in rows}


def _whole(url: str) -> str:
    return url if url.startswith("http") else f"http://{url}"


def _json(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(_whole(url), timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
        return found
