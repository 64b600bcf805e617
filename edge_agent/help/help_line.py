"""A help line is the stream by which this device asks one peer for help, dialled and kept up by one task.

The peer is a gateway, or a neighbour: another device, at a service of its own (`neighbour_service.py`).

The frames, budgets, cancellation, chunks and heartbeats are those of any link stream (`tidegate/link/client.py`); here
the device is the side that asks. It is a stream of its own beside the one on which the device answers, so that either
of them may end without the other. While it is down nothing is asked by it: a request is refused, or kept, at once.

A line that was lost is dialled again as soon as the peer takes connections; a peer that refuses (it helps nobody, or
not this device) is dialled again after at most REFUSED_CAP_S. With each stream, and every MODELS_EVERY_S after that,
the device asks with which models it may be helped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import grpc
import msgspec
import structlog

from edge_agent.core.help.help_breaker import HelpBreaker
from edge_agent.core.help.help_choice import HelpingPeer
from edge_agent.core.help.help_times import HelpTimes
from edge_agent.core.help.neighbour_view import NeighbourView
from edge_agent.fleet.reachability import wait_until_open
from tidegate import clock
from tidegate.fleet.offers import ModelOffer
from tidegate.link.client import LinkClient
from tidegate.link.frames import Greeting
from tidegate.link.origin import printable
from tidegate.link.session import KeepaliveTiming, first_of
from tidegate.link.streams import (
    ASKER_KEY,
    DIAL_OPTIONS,
    HELP_METHOD,
    MODELS_METHOD,
    NEIGHBOUR_SERVICE,
    SERVICE,
    DialledStream,
)
from tidegate.models.manifest import Manifest
from tidegate.models.repository import version_key
from tidegate.runtime.backoff import Backoff
from tidegate.runtime.owned_task import cancel_and_wait
from tidegate.security.tls import Dialler, explain_dial_error
from tidegate.types import LoadReport

REDIAL_BASE_S: Final = 0.1
REDIAL_CAP_S: Final = 2.0
REFUSED_CAP_S: Final = 30.0
STEADY_S: Final = 1.0
MODELS_EVERY_S: Final = 60.0
MODELS_WITHIN_S: Final = 10.0
MOST_MANIFESTS: Final = 1024
_TOLD_MOST: Final = 200  # characters of a reason
_REFUSALS: Final = ("UNIMPLEMENTED", "PERMISSION_DENIED", "UNAUTHENTICATED", "RESOURCE_EXHAUSTED")
log = structlog.get_logger(__name__)


class HelpLine:
    """One peer that may be asked, from the first dial until `close`.

    Args:
        address: HOST:PORT of a gateway's `link_port`, or of a neighbour's gRPC port.
        greeting: what this device says of itself, made anew for each stream.
        key: API key for gateways that require one; "": none.
        neighbour: "edge/NAME" of the neighbour that is there; "": it is a gateway.
    """

    def __init__(
        self,
        address: str,
        dialler: Dialler,
        greeting: Callable[[], Greeting],
        *,
        draw: Callable[[], float],
        key: str,
        max_message_bytes: int,
        heartbeat: KeepaliveTiming = KeepaliveTiming(),  # noqa: B008 - frozen
        neighbour: str = "",
    ) -> None:
        self.neighbour = NeighbourView(neighbour) if neighbour else None
        self._service = NEIGHBOUR_SERVICE if neighbour else SERVICE
        self.breaker = HelpBreaker()
        self.times = HelpTimes()
        self.name = neighbour  # of a gateway "gateway/NAME", once it has answered
        self._address = address
        self._dialler = dialler
        self._greeting = greeting
        self._draw = draw
        self._metadata = (("authorization", f"Bearer {key}"),) if key else ()
        self._max_message_bytes = max_message_bytes
        self._heartbeat = heartbeat
        self._redials = Backoff(draw, REDIAL_BASE_S, REDIAL_CAP_S)
        self._refusals = Backoff(draw, 1.0, REFUSED_CAP_S)
        self._client: LinkClient | None = None
        self._manifests: dict[str, list[Manifest]] = {}
        self._why_not = "it has not answered yet"
        self._greeted = asyncio.Event()  # on the stream of now
        self._told = ""
        self._task = asyncio.create_task(self._keep_up(), name=f"help of {address}")

    @property
    def client(self) -> LinkClient | None:
        """The stream, where it takes questions."""
        return self._client if self._client is not None and self._client.open else None

    @property
    def label(self) -> str:
        """What it is called in logs and choices: its address until its name is known."""
        return self.name or self._address

    def seen(self, model: str, now: float) -> HelpingPeer:
        """What is known of it for a request to this model."""
        why_not, took_s = self._why_not_now(model, now), self.times.took_s(model, now)
        if self.neighbour is not None:
            took_s = self.neighbour.took_s(took_s)
        told = f"{self.label}: {why_not}" if why_not else ""
        return HelpingPeer(self._address, took_s, told, is_neighbour=self.neighbour is not None)

    def answered(self, model: str, took_s: float, queue_s: float, now: float) -> None:
        """An answer came. Args: queue_s: which it waited there."""
        self.breaker.answered(now)
        # A neighbour's wait is known when it is asked, so that it is no part of what is learned.
        self.times.answered(model, took_s if self.neighbour is None else max(0.0, took_s - queue_s))

    def manifest(self, name: str, version: str = "") -> Manifest | None:
        """The manifest of a model with which it helps now, in this or its highest version."""
        versions = self._manifests.get(name, ()) if self.client is not None else ()
        return next((one for one in versions if version in ("", one.version)), None)

    @property
    def models(self) -> frozenset[str]:
        """With which it says that it helps, while it can be asked."""
        return frozenset(self._manifests) if self.client is not None else frozenset()

    def told(self, now: float) -> dict[str, object]:
        """Its state, for people: whether it can be asked, and if not why."""
        why_not = self._why_not_now("", now)
        told = {"address": self._address, "helps": not why_not, "why_not": why_not}
        if self.neighbour is None:
            return {"gateway": self.label, **told}
        return {"neighbour": self.label, **told, **self.neighbour.told(now)}

    def _why_not_now(self, model: str, now: float) -> str:
        """Why it cannot be asked; "" where it can. Args: model: "" is any."""
        if self.client is None:
            return self._why_not
        return self.breaker.why_not(now) or ("" if self.neighbour is None else self.neighbour.why_not(model, now))

    async def close(self) -> None:
        await cancel_and_wait(self._task)

    async def _keep_up(self) -> None:
        while True:
            dialled_at = clock.now()
            reason, greeted = await self._exchange()
            self._tell(reason, greeted)
            if reason.startswith(_REFUSALS):
                await clock.sleep(1.0 + self._refusals.next_delay_s())
                continue
            await wait_until_open(self._address, self._draw)
            if greeted and clock.now() - dialled_at > STEADY_S:
                self._redials.reset()
                self._refusals.reset()
            else:
                await clock.sleep_until(dialled_at + self._redials.next_delay_s())

    async def _exchange(self) -> tuple[str, bool]:
        """Dial once and ask until the stream ends: why it ended, and whether the gateway had answered."""
        channel = self._dialler.open(f"dns:///{self._address}", DIAL_OPTIONS)
        greeting = self._greeting()
        metadata = (*self._metadata, (ASKER_KEY, greeting.name))
        stream = DialledStream(channel, metadata, f"/{self._service}/{HELP_METHOD}")
        client = self._client = LinkClient(
            stream, greeting, self, heartbeat=self._heartbeat, max_message_bytes=self._max_message_bytes
        )
        self._greeted = asyncio.Event()
        try:
            reason = await first_of(
                client.run(), self._follow_models(channel, metadata), names=("help stream", "models of help")
            )
        except Exception as error:  # a defect must not lose the gateway for good
            log.exception("a stream for help failed", address=self._address)
            reason = f"internal error: {type(error).__name__}"
        finally:
            self._client = None
            self._manifests = {}
            stream.close()
            await channel.close(None)
        self._why_not = _in_words(explain_dial_error(reason), is_neighbour=self.neighbour is not None)
        return reason, self._greeted.is_set()

    async def _follow_models(self, channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...]) -> str:
        """Ask again and again with which models this gateway helps; never ends."""
        ask = channel.unary_unary(f"/{self._service}/{MODELS_METHOD}", None, None)
        await self._greeted.wait()
        while True:
            try:
                self._manifests = _by_name(await ask(b"", metadata=metadata, timeout=MODELS_WITHIN_S))
            except (grpc.aio.AioRpcError, msgspec.MsgspecError, RecursionError) as error:
                words = error.code().name if isinstance(error, grpc.aio.AioRpcError) else str(error)
                log.warning("a peer does not tell its models", peer=self.label, reason=words)
            await clock.sleep(MODELS_EVERY_S)

    def _tell(self, reason: str, greeted: bool) -> None:
        """Log each reason once until a stream has stood."""
        words = explain_dial_error(reason)[:_TOLD_MOST]
        if greeted or words != self._told:
            log.info("a stream for help ended", address=self._address, peer=self.name or "no answer", ended=words)
        self._told = "" if greeted else words

    # Listener

    def greeted(self, greeting: Greeting) -> None:
        if self.neighbour is None:
            self.name = printable(greeting.name)  # it ends up in headers
            log.info("a gateway can be asked for help", gateway=self.name, address=self._address)
        else:
            self.neighbour.greeted(printable(greeting.name), greeting.offers)
            log.info("a neighbour can be asked for help", neighbour=self.name, address=self._address)
        self._greeted.set()

    def loaded(self, load: LoadReport, offers: tuple[ModelOffer, ...] | None) -> None:
        """A gateway's load is no queue that a request waits in: its answers show how long it takes."""
        if self.neighbour is not None:
            self.neighbour.loaded(load, offers, clock.now())

    def measured(self, rtt_s: float) -> None:
        """Of a gateway the round trip is a part of what answers take."""
        if self.neighbour is not None:
            self.neighbour.measured(rtt_s)

    def leaving(self, reason: str) -> None:
        self._why_not = f"leaving: {reason}"[:_TOLD_MOST]

    def __repr__(self) -> str:
        return (
            f"<HelpLine {self.label} {'up' if self.client is not None else f'down: {self._why_not}'}, {self.breaker!r}>"
        )


def _in_words(reason: str, *, is_neighbour: bool) -> str:
    if reason.startswith("UNIMPLEMENTED") and is_neighbour:
        return "it answers no neighbours: its configuration has no section `answer_neighbours`"
    if reason.startswith("UNIMPLEMENTED"):
        return "it helps no devices: its configuration has no section `help`"
    return reason[:_TOLD_MOST]


def _by_name(raw: bytes) -> dict[str, list[Manifest]]:
    """The manifests by model, the highest version first. Raises msgspec.MsgspecError."""
    found: dict[str, list[Manifest]] = {}
    told: Sequence[Manifest] = msgspec.json.decode(raw, type=tuple[Manifest, ...])[:MOST_MANIFESTS]
    for one in told:
        found.setdefault(one.name, []).append(one)
    for versions in found.values():
        versions.sort(key=lambda one: version_key(one.version), reverse=True)
    return found
