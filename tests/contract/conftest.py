"""What the contracts hold on: each kind of broker, one process for the whole run, and each kind of target."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.support.gateway.targets import Bench, connected
from tests.support.mqtt.brokers import MOSQUITTO, BrokerProcess, Embedded, Mosquitto, running

KINDS = [
    pytest.param(Mosquitto, marks=[pytest.mark.needs_mosquitto, pytest.mark.slow], id="mosquitto"),
    pytest.param(Embedded, marks=pytest.mark.slow, id="embedded"),
]


def _needs(kind: type[BrokerProcess]) -> None:
    if kind is Mosquitto and MOSQUITTO is None:
        pytest.skip("the Mosquitto broker is not installed")


@pytest.fixture(scope="session", params=KINDS)
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """Shared by all tests; each uses a fleet or topics of its own."""
    _needs(request.param)
    with running(request.param, tmp_path_factory.mktemp("broker")) as started:
        yield started


@pytest.fixture(params=KINDS)
def own_broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """For tests that kill it."""
    _needs(request.param)
    with running(request.param, tmp_path_factory.mktemp("broker")) as started:
        yield started


@pytest_asyncio.fixture(params=["link", "dialled", "relayed", "unary", "foreign"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    async with connected(request.param) as bench:
        yield bench


@pytest_asyncio.fixture(params=["link", "dialled", "relayed"])
async def link(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    async with connected(request.param) as bench:
        yield bench
