"""A client and a link service on the two ends of one stream in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.support.loop import settle
from tests.support.serving.duplex import MemoryStream, stream_pair
from tests.support.serving.hosts import EchoHost, echo_request
from tidegate import clock
from tidegate.fleet.offers import ModelOffer
from tidegate.link.client import LinkClient, Question
from tidegate.link.frames import NEWEST, AnswerFrame, Greeting
from tidegate.link.outbox import Outbox
from tidegate.link.service import LinkService
from tidegate.link.session import KeepaliveTiming
from tidegate.oip.grpc.codec import message_from_request
from tidegate.rpc import oip_pb2
from tidegate.token_sink import TokenSink
from tidegate.types import Accepted, LoadReport

OFFERS = (ModelOffer("echo", "3", ()),)
BEAT = KeepaliveTiming(interval_s=1.0, silent_ticks=3)
CLIENT_MAX_BYTES = 5000


class Heard:
    """A `Listener` that keeps what it was told."""

    def __init__(self) -> None:
        self.greetings: list[Greeting] = []
        self.loads: list[tuple[int, tuple[ModelOffer, ...] | None]] = []
        self.rtts: list[float] = []
        self.goodbyes: list[str] = []

    def greeted(self, greeting: Greeting) -> None:
        self.greetings.append(greeting)

    def loaded(self, load: LoadReport, offers: tuple[ModelOffer, ...] | None) -> None:
        self.loads.append((load.sequence, offers))

    def measured(self, rtt_s: float) -> None:
        self.rtts.append(rtt_s)

    def leaving(self, reason: str) -> None:
        self.goodbyes.append(reason)


class Pair:
    """A client and a service on the two ends of one stream in memory."""

    def __init__(
        self,
        client_max_bytes: int = CLIENT_MAX_BYTES,
        host: EchoHost | None = None,
        client_protocol: int = NEWEST,
        **service_options: Any,
    ) -> None:
        self.asking, self.answering = stream_pair()
        self.host = host or EchoHost()
        self.heard = Heard()
        self.offers: tuple[ModelOffer, ...] = OFFERS
        self.sequence = 0
        outbox = service_options.pop("outbox", None)
        self.client = client_on(
            self.asking, self.heard, outbox=outbox, max_message_bytes=client_max_bytes, protocol=client_protocol
        )
        self.service = LinkService(
            self.host,
            name="edge/attic",
            epoch=lambda: 9,
            offers=lambda: self.offers,
            load=self.load,
            heartbeat=BEAT,
            **service_options,
        )
        self.ends: list[asyncio.Task[str]] = []

    def load(self) -> LoadReport:
        self.sequence += 1
        return LoadReport(9, self.sequence, queued=0, in_flight=0, queue_delay_s=0.0)

    async def ask(self, raw: bytes = b"abc", *, budget_s: float = 10.0, **words: Any) -> AnswerFrame:
        return await self.client.ask(question(raw, budget_s=budget_s, **words))


def client_on(
    stream: MemoryStream,
    heard: Heard,
    *,
    outbox: Outbox | None = None,
    max_message_bytes: int = CLIENT_MAX_BYTES,
    protocol: int = NEWEST,
) -> LinkClient:
    greeting = Greeting("gateway/test", 0, "0", protocol=protocol)
    return LinkClient(stream, greeting, heard, heartbeat=BEAT, outbox=outbox, max_message_bytes=max_message_bytes)


def question(
    raw: bytes = b"abc",
    *,
    budget_s: float = 10.0,
    model: str = "echo",
    variant: str = "",
    on_accepted: Callable[[Accepted], None] = lambda _ack: None,
    tokens: TokenSink | None = None,
) -> Question:
    message = message_from_request(echo_request(raw, model=model)).SerializeToString()
    return Question(message, clock.now() + budget_s, 2, variant, "00-ab-cd-01", on_accepted, tokens=tokens)


def tensor_of(answered: AnswerFrame) -> bytes:
    return oip_pb2.ModelInferResponse.FromString(answered.message).raw_output_contents[0]


@asynccontextmanager
async def running(client_max_bytes: int = CLIENT_MAX_BYTES, **service_options: Any) -> AsyncIterator[Pair]:
    pair = Pair(client_max_bytes, **service_options)
    pair.ends = [asyncio.create_task(pair.client.run()), asyncio.create_task(pair.service.serve(pair.answering))]
    await settle(20)  # greeted, and the first pings answered
    yield pair
    for end in pair.ends:
        end.cancel()
    await asyncio.gather(*pair.ends, return_exceptions=True)
