"""Real processes: a region's gateway over two sites, each a Mosquitto, a gateway and an edge, while parts die.

region ── simulated link ──▶ north: gateway · broker · edge        a site goes on by itself, whatever dies around it
   └──────────────────────▶ south: gateway · broker · edge
"""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.e2e.stack import eventually
from tests.support.faults.fleet_stack import FleetStack, Part
from tests.support.models.talking import talker_repository
from tests.support.mqtt.brokers import MOSQUITTO
from tidegate.testing.links import LinkThread, SimLink
from tidegate.testing.ports import free_port
from tidegate.tools.build.demo.paced import PacedCosts, add_paced

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.needs_mosquitto,
    pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed"),
    pytest.mark.timeout(300),
]

COSTS = PacedCosts(edge_ms=((1, 5), (100, 30)), pool_ms=((1, 10),), edge_max_units=100)
TENSORS = (("input_ids", [101, 2051, 102]), ("attention_mask", [1, 1, 1]))
BODY = {"inputs": [{"name": name, "shape": [1, 3], "datatype": "INT64", "data": data} for name, data in TENSORS]}


class Region:
    """The running system."""

    def __init__(self, north: FleetStack, south: FleetStack, gateway: Part, link: SimLink) -> None:
        self.north, self.south, self.gateway, self.link = north, south, gateway, link

    def targets(self) -> dict[str, str]:
        """The state of each site, as the region sees it."""
        admin = self.gateway.addresses["admin"].removeprefix("http://")
        with urllib.request.urlopen(f"http://{admin}/v1/state", timeout=30) as answer:
            return {one["id"]: one["state"] for one in json.load(answer)["targets"]}

    def whole(self) -> bool:
        """Whether both sites are used; a request each time, for what was left alone is tried by requests."""
        ask(self.gateway)
        return set(self.targets().values()) == {"ready"}


@pytest.fixture(scope="module")
def region(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Region]:
    folder = tmp_path_factory.mktemp("sites")
    models = talker_repository(folder / "models", step_ms=20.0)
    add_paced("encoder", COSTS, models)
    links = LinkThread()
    with contextlib.ExitStack() as stack:
        sites = []
        for name in ("north", "south"):
            edges = {f"{name}-edge": {"warmup_budget_s": 0.5}}
            own = {"name": name, "site_port": free_port()}
            fleet = FleetStack(folder / name, models, edges=edges, gateway=own)
            sites.append(stack.enter_context(fleet))
        stack.callback(links.close)
        link = links.link(sites[0].gateway.addresses["site"], name="north")
        targets = [
            {"name": "north", "tier": "site", "address": link.address},
            {"name": "south", "tier": "site", "address": sites[1].gateway.addresses["site"]},
        ]
        ports = {f"{door}_port": free_port() for door in ("http", "grpc", "metrics", "admin")}
        keys = {"name": "region", "model_repository": str(models), "targets": targets, "log_level": "warning"}
        gateway = Part("region", "gateway", {**keys, **ports}, folder)
        stack.callback(gateway.kill)
        gateway.start()
        gateway.wait_ready()
        running = Region(*sites, gateway, link)
        eventually(running.whole, 30.0, "the region sees both sites")
        yield running


@pytest.fixture(autouse=True)
def _mended(region: Region) -> Iterator[None]:
    yield
    region.link.clear()
    eventually(region.whole, 60.0, "both sites are back")


def ask(part: Part, **headers: str) -> tuple[str, str]:
    """Who answered, and the site's own route; the status and nothing where nobody did."""
    told = {"tidegate-budget-ms": "5000", **headers}
    request = urllib.request.Request(
        f"{part.addresses['http']}/v2/models/encoder/infer", json.dumps(BODY).encode(), told
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return str(answer.headers["tidegate-served-by"]), str(answer.headers.get("tidegate-site-route", ""))
    except urllib.error.HTTPError as error:
        return str(error.code), error.read().decode(errors="replace")


def answers(part: Part, seconds: float, **headers: str) -> Counter[str]:
    """Who answered, at twenty requests a second."""
    found: Counter[str] = Counter()
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        found[ask(part, **headers)[0]] += 1
        time.sleep(0.05)
    return found


def test_an_answer_names_its_site_and_the_place_in_it(region: Region) -> None:
    by, inner = ask(region.gateway)

    assert by in ("site/north", "site/south")
    assert inner.startswith(f"edge/{by.removeprefix('site/')}-edge; ")
    assert ask(region.gateway, **{"tidegate-pin": "edge"})[0].startswith("site/")


def test_tokens_come_through_a_site_as_they_are_made_and_stop_when_their_caller_leaves(region: Region) -> None:
    body = {"input_ids": [5, 6, 7], "parameters": {"max_tokens": 200}}
    request = urllib.request.Request(
        f"{region.gateway.addresses['http']}/v2/models/talker/generate_stream",
        json.dumps(body).encode(),
        {"content-type": "application/json", "tidegate-budget-ms": "30000"},
    )
    began_at = time.perf_counter()
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.headers["tidegate-served-by"].startswith("site/")
        for _ in range(6):
            answer.readline()
        took_s = time.perf_counter() - began_at
    assert took_s < 3.0  # all of it takes four

    def busy() -> int:
        found = 0
        for site in (region.north, region.south):
            found += sum(one.get("in_flight", 0) for one in site.state()["targets"])
        return found

    eventually(lambda: busy() == 0, 2.0, "no device goes on with it")


def test_a_site_whose_broker_is_gone_serves_on(region: Region) -> None:
    region.north.broker.kill()
    try:
        seen = answers(region.gateway, 6.0)
        own = answers(region.north.gateway, 2.0)
    finally:
        region.north.broker.start()

    assert set(seen) <= {"site/north", "site/south"}
    assert set(own) == {"edge/north-edge"}


def test_a_site_whose_link_is_cut_serves_its_own_callers_and_the_region_serves_on(region: Region) -> None:
    region.link.partition("blackhole")
    seen = answers(region.gateway, 8.0)
    own = answers(region.north.gateway, 2.0)

    assert set(own) == {"edge/north-edge"}
    assert set(seen) <= {"site/north", "site/south"}  # none is lost, even of those that were under way
    assert region.targets()["site/north"] == "down"

    region.link.clear()
    eventually(region.whole, 30.0, "the site is back")


def test_the_region_goes_on_while_a_site_gateway_is_killed_and_finds_it_again(region: Region) -> None:
    region.north.gateway.kill()
    seen = answers(region.gateway, 4.0)
    assert set(seen) == {"site/south"}

    region.north.gateway.start()
    region.north.gateway.wait_ready()
    eventually(region.whole, 30.0, "the site is back")
    region.south.gateway.kill()
    try:
        assert "site/north" in answers(region.gateway, 3.0)
    finally:
        region.south.gateway.start()
        region.south.gateway.wait_ready()


def test_a_region_that_is_gone_is_nothing_to_its_sites(region: Region) -> None:
    region.gateway.kill()
    try:
        assert set(answers(region.north.gateway, 1.0)) == {"edge/north-edge"}
    finally:
        region.gateway.start()
        region.gateway.wait_ready()
