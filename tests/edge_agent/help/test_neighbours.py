"""Whole edge agents that ask each other, without a gateway: who may, what is refused, and what is never sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import grpc
import numpy as np
import pytest

from edge_agent.app import EdgeApp
from edge_agent.config import EdgeConfig
from tests.edge_agent.help.test_helping import edge, x
from tests.edge_agent.test_app import eventually
from tests.support.certificates import FleetPki
from tests.support.models.tiny_models import tiny_repository
from tests.support.models.unsure_model import UNSURE, kinds_repository
from tidegate import clock
from tidegate.arrays import array_to_tensor
from tidegate.config import ConfigError, load
from tidegate.link.client import LinkClient
from tidegate.link.frames import Greeting
from tidegate.link.link_inference import infer_over_link
from tidegate.link.origin import Origin
from tidegate.link.session import KeepaliveTiming, first_of
from tidegate.link.streams import ASKER_KEY, HELP_METHOD, NEIGHBOUR_SERVICE, PATH, DialledStream
from tidegate.outcome import InvalidRequest, ModelNotFound, ServeError
from tidegate.placement_pin import Pin
from tidegate.security.certificate_identity import CertificateIdentity
from tidegate.tools.build.demo.paced import PacedCosts, add_paced
from tidegate.types import Datatype, InferRequest, LoadReport, Reply

pytestmark = pytest.mark.slow
ANSWERS: dict[str, Any] = {"devices": ["kiosk*"], "models": ["double", "kinds", "rounds"]}


class Two(NamedTuple):
    """A device that asks, and its neighbour."""

    device: EdgeApp
    neighbour: EdgeApp
    session: aiohttp.ClientSession

    async def ask(self, model: str, inputs: list[dict[str, Any]], **headers: str) -> tuple[int, Any, Any]:
        url = f"{self.device.addresses['http']}/v2/models/{model}/infer"
        said = {"tidegate-budget-ms": "30000", **headers}
        async with self.session.post(url, json={"inputs": inputs}, headers=said) as answer:
            return answer.status, answer.headers, await answer.json()

    def told(self) -> dict[str, Any]:
        assert self.device.help is not None
        lines = self.device.help.told(clock.now())  # none until the first look
        return lines[0] if lines else {"helps": False, "why_not": ""}


@asynccontextmanager
async def two(
    folder: Path, models: Path, theirs: Path, answers: dict[str, Any] | None = None, **keys: Any
) -> AsyncIterator[Two]:
    """Args: models: of the device that asks; theirs: of its neighbour; keys: of both."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        neighbour = await enter(edge("near", theirs, folder, answer_neighbours=answers or ANSWERS, **keys.get("n", {})))
        help = {"neighbours": [f"near@{neighbour.addresses['grpc']}"]}
        device = await enter(edge("kiosk", models, folder, help=help, **keys.get("d", {})))
        yield Two(device, neighbour, await enter(aiohttp.ClientSession()))


def empty(folder: Path) -> Path:
    """A repository without the models of these tests."""
    add_paced("encoder", PacedCosts(edge_ms=((1, 5),)), folder)
    return folder


class Stranger:
    """Somebody who speaks the link by hand. Its listener's methods only note what they hear."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_greeted = asyncio.Event()

    async def asks(self, address: str, origin: Origin | None, *, service: str = NEIGHBOUR_SERVICE) -> Reply:
        """The answer to one request for `double`. Raises ServeError, and AssertionError with why there is no stream."""
        async with grpc.aio.insecure_channel(address) as channel:
            path = f"/{service}/{HELP_METHOD}" if service == NEIGHBOUR_SERVICE else PATH
            stream = DialledStream(channel, ((ASKER_KEY, self.name),), path)
            client = LinkClient(stream, Greeting(self.name, 1, "test"), self, heartbeat=KeepaliveTiming())
            answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

            async def ask() -> str:
                await self.is_greeted.wait()
                tensor = array_to_tensor("x", np.array([[1.0, 2.0]], np.float32), Datatype.FP32)
                try:
                    asked = InferRequest("double", inputs=(tensor,))
                    answer.set_result(
                        await infer_over_link(
                            client,
                            asked,
                            variant="",
                            budget_s=20.0,
                            priority=1,
                            traceparent="",
                            on_accepted=lambda _: None,
                            origin=origin,
                        )
                    )
                except ServeError as error:
                    answer.set_exception(error)
                return "answered"

            reason = await first_of(client.run(), ask(), names=("stream", "question"))
            stream.close()
            assert answer.done(), reason
            return answer.result()

    def greeted(self, greeting: Greeting) -> None:
        self.is_greeted.set()

    def loaded(self, load: LoadReport, offers: object) -> None: ...

    def measured(self, rtt_s: float) -> None: ...

    def leaving(self, reason: str) -> None: ...


async def test_what_the_device_cannot_do_its_neighbour_answers_at_the_last_priority(tmp_path: Path) -> None:
    async with two(tmp_path, empty(tmp_path / "none"), tiny_repository(tmp_path / "m")) as running:
        await eventually(lambda: running.told()["helps"])
        status, said, answer = await running.ask("double", x([[1.0, 2.0]]), priority="1")
        assert (status, said["tidegate-served-by"]) == (200, "edge/near"), answer
        assert said["tidegate-helped-by"] == "edge/near; because=no-model; chosen=only"
        assert answer["outputs"][0]["data"] == [2.0, 4.0]
        assert running.told()["models"] == ["double", "rounds"]
        assert running.neighbour.ready_event()["role"] == "edge"


@pytest.mark.parametrize(("by_model", "code"), [(False, "not_supported"), (True, "model_not_found")])
async def test_what_only_attested_targets_may_see_goes_to_no_neighbour(
    tmp_path: Path, by_model: bool, code: str
) -> None:
    models = tiny_repository(tmp_path / "m")
    if by_model:
        with (models / "double" / "1" / "model.yaml").open("a") as manifest:
            manifest.write("\nrequire: attested\n")
    headers = {} if by_model else {"tidegate-require": "attested"}
    async with two(tmp_path, empty(tmp_path / "none"), models) as running:
        await eventually(lambda: running.told()["helps"])
        _, said, answer = await running.ask("double", x([[1.0, 2.0]]), **headers)
        assert (answer.get("code"), "tidegate-helped-by" in said) == (code, False), answer


async def test_a_model_that_the_neighbour_does_not_share_is_not_known(tmp_path: Path) -> None:
    answers = {"devices": ["kiosk*"], "models": ["rounds"]}
    async with two(tmp_path, empty(tmp_path / "none"), tiny_repository(tmp_path / "m"), answers) as running:
        await eventually(lambda: running.told()["helps"])
        assert running.told()["models"] == ["rounds"]
        assert (await running.ask("double", x([[1.0, 2.0]])))[0] == 404
        with pytest.raises(ModelNotFound, match="does not answer neighbours"):
            await Stranger("edge/kiosk-9").asks(running.neighbour.addresses["grpc"], Origin(("edge/kiosk-9",)))


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"devices": ["till-*"]}, "has no entry for edge/kiosk"),
        ({}, "answers no neighbours"),
    ],
)
async def test_a_neighbour_that_does_not_allow_it_says_so_and_is_not_asked(
    tmp_path: Path, answers: dict[str, Any], words: str
) -> None:
    models = tiny_repository(tmp_path / "m")
    async with AsyncExitStack() as stack:
        keys = {"answer_neighbours": answers} if answers else {}
        near = await stack.enter_async_context(edge("near", models, tmp_path, **keys))
        help = {"neighbours": [f"near@{near.addresses['grpc']}"]}
        none = empty(tmp_path / "none")
        device = await stack.enter_async_context(edge("kiosk", none, tmp_path, help=help))
        running = Two(device, near, await stack.enter_async_context(aiohttp.ClientSession()))
        await eventually(lambda: words in running.told()["why_not"])
        assert not running.told()["helps"]
        assert (await running.ask("double", x([[1.0, 2.0]])))[0] == 404


async def test_another_device_at_the_neighbours_address_is_not_asked(tmp_path: Path) -> None:
    models = tiny_repository(tmp_path / "m")
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(edge("other", models, tmp_path, answer_neighbours=ANSWERS))
        help = {"neighbours": [f"near@{other.addresses['grpc']}"]}
        device = await stack.enter_async_context(edge("kiosk", empty(tmp_path / "none"), tmp_path, help=help))
        running = Two(device, other, await stack.enter_async_context(aiohttp.ClientSession()))
        await eventually(lambda: "another device answers there, edge/other" in running.told()["why_not"])


@pytest.mark.parametrize(
    ("path", "pin", "words"),
    [
        (("edge/till", "edge/kiosk-9"), "any", "is not passed on"),
        (("edge/till",), "any", "is not passed on"),
        (("edge/kiosk-9",), "edge", "pinned"),
        (("edge/kiosk-9",), "edge-input", "pinned"),
    ],
)
async def test_what_has_made_a_hop_or_must_not_make_one_is_refused_whoever_sends_it(
    tmp_path: Path, path: tuple[str, ...], pin: Pin, words: str
) -> None:
    async with two(tmp_path, empty(tmp_path / "none"), tiny_repository(tmp_path / "m")) as running:
        address = running.neighbour.addresses["grpc"]
        with pytest.raises(InvalidRequest, match=words):
            await Stranger("edge/kiosk-9").asks(address, Origin(path, pin=pin))
        assert (await Stranger("edge/kiosk-9").asks(address, Origin(("edge/kiosk-9",)))).variant


@pytest.mark.parametrize("name", ["gateway/main", "edge/near", "edge/", "", "edge/../kiosk", "edge/till"])
async def test_only_a_device_that_is_allowed_by_name_gets_a_stream(tmp_path: Path, name: str) -> None:
    async with two(tmp_path, empty(tmp_path / "none"), tiny_repository(tmp_path / "m")) as running:
        with pytest.raises(AssertionError, match="PERMISSION_DENIED"):
            await Stranger(name).asks(running.neighbour.addresses["grpc"], Origin((name or "x",)))


async def test_the_neighbours_own_callers_come_first_and_its_own_queue_decides(tmp_path: Path) -> None:
    models = tiny_repository(tmp_path / "m")
    async with two(tmp_path, empty(tmp_path / "none"), models, n={"max_queue_size": 1}) as running:
        await eventually(lambda: running.told()["helps"])
        running.neighbour.config = running.neighbour.config.model_copy(update={"max_queue_size": 0})
        host = running.neighbour.host
        held = [asyncio.create_task(_hold(running))]
        await eventually(lambda: host.load_report().in_flight == 1)
        await clock.sleep(0.1)  # it is overdue by then, and nobody is put behind it any more
        held.append(asyncio.create_task(_hold(running)))
        await eventually(lambda: host.queued == 1)
        status, said, answer = await running.ask("double", x([[1.0, 2.0]]))
        assert (status, said["tidegate-refused"]) == (429, "overloaded"), answer
        assert "the rest of the queue is for own callers" in answer["error"]
        for one in held:
            one.cancel()
        await asyncio.gather(*held, return_exceptions=True)


async def _hold(running: Two) -> None:
    url = f"{running.neighbour.addresses['http']}/v2/models/rounds/infer"
    rounds = [{"name": "rounds", "datatype": "INT64", "shape": [1], "data": [2_000_000_000]}]
    async with running.session.post(url, json={"inputs": rounds}, headers={"tidegate-budget-ms": "60000"}) as answer:
        await answer.read()


async def test_an_unsure_answer_of_a_neighbour_is_no_surer_than_an_own_one(tmp_path: Path) -> None:
    theirs = kinds_repository(tmp_path / "t", unsure="accept")
    async with two(tmp_path, empty(tmp_path / "none"), theirs) as running:
        await eventually(lambda: running.told()["helps"])
        status, said, answer = await running.ask("kinds", x(UNSURE))
        assert (status, said["tidegate-served-by"]) == (200, "edge/near"), answer
        assert "provisional=1" in said["tidegate-route"]


async def test_over_tls_a_neighbour_shows_the_certificate_of_its_name(tmp_path: Path) -> None:
    pki, models = FleetPki(tmp_path / "pki"), tiny_repository(tmp_path / "m")
    keys = {
        "n": {"tls": pki.config("edge/near").model_dump(exclude_none=True)},
        "d": {"tls": pki.config("edge/kiosk").model_dump(exclude_none=True)},
    }
    async with two(tmp_path, empty(tmp_path / "none"), models, **keys) as running:
        await eventually(lambda: running.told()["helps"])
        address = running.neighbour.addresses["grpc"]
        for who, claimed, words in (
            ("edge/till", "edge/kiosk", "shows the certificate of edge/till"),
            ("gateway/main", "gateway/main", "gateway"),
            ("client/app", "edge/kiosk", "client"),
        ):
            dialler = pki.tls(who).dialler(CertificateIdentity("edge", "near"))
            channel = dialler.open(f"dns:///{address}", [])
            try:
                stream = DialledStream(channel, ((ASKER_KEY, claimed),), f"/{NEIGHBOUR_SERVICE}/{HELP_METHOD}")
                told = await stream_end(stream)
                stream.close()
                assert "PERMISSION_DENIED" in told and words in told, told
            finally:
                await channel.close()
        # and a device opens the gateways' stream no more than before
        channel = pki.tls("edge/kiosk").dialler(CertificateIdentity("edge", "near")).open(f"dns:///{address}", [])
        stream = DialledStream(channel, ())
        assert "PERMISSION_DENIED" in await stream_end(stream)
        stream.close()
        await channel.close()


async def stream_end(stream: DialledStream) -> str:
    try:
        return str(await stream.read())
    except Exception as error:
        return str(error)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"help": {"neighbours": ["near"]}}, "is told over `mqtt`"),
        ({"help": {"neighbours": ["near@nowhere"]}}, "NAME@HOST:PORT"),
        ({"help": {"neighbours": ["a b"]}}, "neighbour's name"),
        ({"help": {"neighbours": ["n"] * 17}}, "neighbours"),
        ({"answer_neighbours": {}}, "answer_neighbours.devices"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_in_words(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(EdgeConfig, name="kiosk", **keys)


def test_a_device_may_have_neighbours_alone_and_dial_no_gateway() -> None:
    config = load(EdgeConfig, name="kiosk", dial_out="never", help={"neighbours": ["kiosk", "near@10.0.0.2:9001"]})
    assert config.help is not None and config.dial_out == "never"
