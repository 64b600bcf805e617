"""Real processes: devices of one site that ask each other, known by a Mosquitto, with no gateway anywhere.

callers ──▶ kiosk-1 ◀──▶ kiosk-2 ──▶ depot, which answers and asks nobody
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.e2e.stack import eventually
from tests.support.faults.fleet_stack import Part
from tests.support.mqtt.brokers import Mosquitto
from tidegate.testing.ports import free_port
from tidegate.tools.build.demo.paced import PacedCosts, add_paced

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(240)]

TURN_S = 1.0  # of one request for `encoder`, at each kiosk
LONG_S = 5.0


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: dict[str, Any]
    took_s: float


class Device:
    """One running agent."""

    def __init__(self, part: Part) -> None:
        self.part = part

    def ask(self, model: str, budget_ms: float = 20_000.0, **headers: str) -> Answer:
        url = f"{self.part.addresses['http']}/v2/models/{model}/infer"
        said = {"tidegate-budget-ms": str(budget_ms), **{key.replace("_", "-"): one for key, one in headers.items()}}
        began_at = time.perf_counter()
        try:
            with urllib.request.urlopen(urllib.request.Request(url, _body(), said), timeout=60) as answer:
                status, told, raw = answer.status, dict(answer.headers), answer.read()
        except urllib.error.HTTPError as error:
            status, told, raw = error.code, dict(error.headers), error.read()
        lower = {name.lower(): value for name, value in told.items()}
        return Answer(status, lower, json.loads(raw), time.perf_counter() - began_at)

    def begin(self, model: str) -> http.client.HTTPConnection:
        """A caller that has asked and waits."""
        caller = http.client.HTTPConnection(self.part.addresses["http"].removeprefix("http://"), timeout=60)
        caller.request("POST", f"/v2/models/{model}/infer", _body(), {"tidegate-budget-ms": "40000"})
        return caller

    def metrics(self, name: str) -> Counter[str]:
        """The samples of a metric, by the label `outcome`."""
        with urllib.request.urlopen(f"{_whole(self.part.addresses['metrics'])}/metrics", timeout=30) as answer:
            lines = [one for one in answer.read().decode().splitlines() if one.startswith((f"{name}{{", f"{name} "))]
        found: Counter[str] = Counter()
        for line in lines:
            labels, _, value = line.rpartition(" ")
            found[labels.partition('outcome="')[2].partition('"')[0]] += int(float(value))
        return found

    def work(self) -> int:
        """Requests that wait or are computed."""
        return sum(self.metrics(f"tidegate_edge_{name}").total() for name in ("queued", "in_flight"))

    def asked(self) -> int:
        """Requests that it asked others for, whatever came of them."""
        rows = self.metrics("tidegate_edge_help_requests_total")
        return sum(rows.values()) - rows["not-asked"]

    def state(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{_whole(self.part.addresses['http'])}/v1/state", timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def helped_by(self) -> dict[str, str]:
        """The neighbours, with why each cannot be asked."""
        return {one["neighbour"]: one["why_not"] for one in self.state()["help"]}

    def models_of(self, neighbour: str) -> list[str]:
        """What a neighbour has, as far as it is known here."""
        return [model for one in self.state()["help"] if one["neighbour"] == neighbour for model in one["models"]]


class Site(NamedTuple):
    one: Device
    two: Device
    depot: Device


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("neighbours")
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(Mosquitto(folder))
        parts = [Part(name, "edge_agent", keys, folder) for name, keys in _keys(folder, broker.url)]
        for part in parts:
            stack.callback(part.kill)
            part.start()
        for part in parts:
            part.wait_ready()
        running = Site(*map(Device, parts))
        _wait_until_they_ask(running)
        yield running


@pytest.fixture(autouse=True)
def _mended(site: Site) -> Iterator[None]:
    yield
    for device in site:
        if not device.part.alive:
            device.part.start()
            device.part.wait_ready()
    eventually(lambda: not any(one.work() for one in site), 60.0, "nothing is left of the test before")
    _wait_until_they_ask(site)


def _wait_until_they_ask(site: Site) -> None:
    logs = lambda: "\n".join(one.part.log[-1500:] for one in site)  # noqa: E731
    eventually(lambda: not site.one.helped_by().get("edge/kiosk-2", "none"), 60.0, f"kiosk-1 can ask\n{logs()}")
    eventually(lambda: not any(site.two.helped_by().values()), 60.0, f"kiosk-2 can ask\n{logs()}")
    eventually(lambda: len(site.two.helped_by()) == 2, 60.0, "kiosk-2 knows both")
    # A device that starts again answers before all of its models are warm, and tells of each with its load.
    eventually(lambda: len(site.one.models_of("edge/kiosk-2")) == 3, 60.0, "kiosk-1 knows what kiosk-2 has")
    eventually(lambda: site.two.models_of("edge/kiosk-1") == ["encoder"], 60.0, "kiosk-2 knows what kiosk-1 has")
    eventually(lambda: site.two.models_of("edge/depot") == ["deep"], 60.0, "and what the depot has")


def _keys(folder: Path, broker: str) -> Iterator[tuple[str, dict[str, Any]]]:
    turn = PacedCosts(edge_ms=((1, TURN_S * 1e3),))
    for name, models in {"kiosk-1": {"encoder": turn}, "kiosk-2": {"encoder": turn}, "depot": {}}.items():
        for model, costs in models.items():
            add_paced(model, costs, folder / name / "models")
    add_paced("far", PacedCosts(edge_ms=((1, 5),)), folder / "kiosk-2" / "models")
    add_paced("slow", PacedCosts(edge_ms=((1, LONG_S * 1e3),)), folder / "kiosk-2" / "models")
    add_paced("deep", PacedCosts(edge_ms=((1, 5),)), folder / "depot" / "models")
    for name in ("kiosk-1", "kiosk-2", "depot"):
        keys: dict[str, Any] = {
            "name": name,
            "model_repository": str(folder / name / "models"),
            "state_dir": str(folder / name / "state"),
            "mqtt": broker,
            "grpc_port": free_port(),
            "http_port": free_port(),
            "metrics_port": free_port(),
            "warmup_budget_s": 0.5,
            "log_level": "info",
            "answer_neighbours": {"devices": ["kiosk-*"]},
        }
        if name != "depot":
            # kiosk-1 asks the depot as well, at an address where nobody is: that one must not matter.
            far = {"kiosk-1": f"nobody@127.0.0.1:{free_port()}", "kiosk-2": "depot"}[name]
            keys["help"] = {"neighbours": ["kiosk-1", "kiosk-2", far]}
        yield name, keys


def test_an_overloaded_device_is_answered_by_its_neighbour_and_the_answer_says_so(site: Site) -> None:
    with ThreadPoolExecutor(8) as callers:
        answers = list(callers.map(lambda _: site.one.ask("encoder", budget_ms=4.5e3 * TURN_S), range(8)))

    served = Counter(one.headers.get("tidegate-served-by", "") for one in answers if one.status == 200)
    assert served["edge/kiosk-1"] >= 1 and served["edge/kiosk-2"] >= 1, [one.body for one in answers]
    [helped, *_] = [one for one in answers if one.headers.get("tidegate-served-by") == "edge/kiosk-2"]
    assert helped.headers["tidegate-helped-by"] == "edge/kiosk-2; because=late; chosen=only"
    assert helped.headers["tidegate-route"].startswith("helped; ")
    assert all(one.took_s < 4.5 * TURN_S + 1.0 for one in answers)
    assert site.two.metrics("tidegate_edge_neighbour_requests_total")["ok"] >= 1


def test_a_model_that_only_the_neighbour_has_is_answered_there_and_state_and_doctor_say_whom_one_would_ask(
    site: Site,
) -> None:
    far = site.one.ask("far")
    assert (far.status, far.headers["tidegate-served-by"]) == (200, "edge/kiosk-2"), far.body
    assert "because=no-model" in far.headers["tidegate-helped-by"]

    [told] = [one for one in site.one.state()["help"] if one["neighbour"] == "edge/kiosk-2"]
    assert told["asked_first_for"] == ["encoder", "far", "slow"] == told["models"]
    assert told["queue_delay_ms"] is not None and told["report_age_s"] < 5.0


def test_a_pinned_request_never_leaves_the_device(site: Site) -> None:
    before = site.one.asked()
    for pin in ("edge", "edge-input", "site"):
        refused = site.one.ask("far", tidegate_pin=pin)
        assert refused.status >= 400, refused.headers
        assert "a neighbour was asked" not in json.dumps(refused.body)
    assert site.one.asked() == before


def test_a_request_makes_one_hop_and_no_second(site: Site) -> None:
    """kiosk-1 asks kiosk-2, which has not the model, and could ask the depot for its own callers."""
    own = site.two.ask("deep")
    assert (own.status, own.headers["tidegate-served-by"]) == (200, "edge/depot"), own.body
    before = site.depot.metrics("tidegate_edge_neighbour_requests_total").total()

    assert site.one.ask("deep").status == 404

    assert site.depot.metrics("tidegate_edge_neighbour_requests_total").total() == before


def test_two_overloaded_devices_that_ask_each_other_make_no_circle(site: Site) -> None:
    before = [(one.asked(), one.metrics("tidegate_edge_neighbour_requests_total").total()) for one in site[:2]]

    with ThreadPoolExecutor(24) as callers:
        waiting = [callers.submit(one.ask, "encoder", 4e3 * TURN_S) for _ in range(12) for one in site[:2]]
        answers = [one.result() for one in waiting]

    assert {one.status for one in answers} <= {200, 429, 503, 504}
    assert all(one.took_s < 4.0 * TURN_S + 1.5 for one in answers), "each ends with its budget"
    after = [(one.asked(), one.metrics("tidegate_edge_neighbour_requests_total").total()) for one in site[:2]]
    (asked_1, taken_1), (asked_2, taken_2) = [(a[0] - b[0], a[1] - b[1]) for a, b in zip(after, before, strict=True)]
    assert asked_1 <= 12 and asked_2 <= 12, "each of twelve callers' requests is sent once at most"
    assert taken_2 <= asked_1 and taken_1 <= asked_2, "and what a neighbour sent is not sent again"


def test_a_neighbour_that_is_killed_in_the_middle_ends_the_request_in_words_and_the_device_goes_on_alone(
    site: Site,
) -> None:
    waiting = site.one.begin("slow")
    eventually(lambda: site.two.metrics("tidegate_edge_in_flight").total() == 1, 30.0, "it is computed")
    began_at = time.perf_counter()

    site.two.part.kill()

    with contextlib.closing(waiting):
        answer = waiting.getresponse()
        told = json.loads(answer.read())
    assert (answer.status, answer.headers["tidegate-refused"]) == (503, "nothing_alive"), told
    assert "a neighbour was asked" in told["error"]
    assert time.perf_counter() - began_at < 30.0
    eventually(lambda: bool(site.one.helped_by()["edge/kiosk-2"]), 30.0, "it is seen to be away")
    assert site.one.ask("encoder").headers["tidegate-served-by"] == "edge/kiosk-1"
    assert site.one.ask("far").status == 404  # at once, as without help


def test_a_caller_who_leaves_frees_the_neighbours_queue(site: Site) -> None:
    first, second = site.one.begin("slow"), site.one.begin("slow")
    eventually(lambda: site.two.metrics("tidegate_edge_queued").total() == 1, 30.0, "one is computed, and one waits")

    second.close()
    first.close()

    eventually(lambda: site.two.metrics("tidegate_edge_queued").total() == 0, 30.0, "the queue is free")
    eventually(lambda: site.two.metrics("tidegate_edge_neighbour_in_flight").total() == 0, 30.0, "and its places")


def test_an_own_caller_of_the_neighbour_goes_before_what_waits_for_others(site: Site) -> None:
    with ThreadPoolExecutor(2) as callers:
        waiting = [callers.submit(site.one.ask, "slow", 40_000.0) for _ in range(2)]
        eventually(
            lambda: site.two.metrics("tidegate_edge_queued").total() == 1, 30.0, "one is computed, and one waits"
        )

        own = site.two.ask("far", 40_000.0)

        assert (own.status, own.headers["tidegate-served-by"]) == (200, "edge/kiosk-2")
        assert "tidegate-helped-by" not in own.headers
        assert not all(one.done() for one in waiting), "the one that waited before it comes after it"
        assert [one.result().status for one in waiting] == [200, 200]


def _body() -> bytes:
    inputs = [
        {"name": name, "shape": [1, 3], "datatype": "INT64", "data": [1, 1, 1]}
        for name in ("input_ids", "attention_mask")
    ]
    return json.dumps({"inputs": inputs}).encode()


def _whole(url: str) -> str:
    return url if url.startswith("http") else f"http://{url}"
