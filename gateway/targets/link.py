"""A target of our own, over a link stream that this side keeps up.

One task dials, greets, and runs the stream until it ends; then says `LinkDown` once and dials again, for as long as
the target exists. Each of those dials that fails is told by `RedialFailed`. Every dial is a new channel and so a new
connection: a stream that fell silent because its TCP connection is half open must not be put back on that same one.

A link that was steady is dialled again at once: what broke is most often the connection (a NAT, a proxy, a flap), and
requests wait. Further dials keep a full-jitter distance, counted from dial to dial: on a path that swallows packets
each try takes seconds already, and a wait on top would only be felt when the path is back. Where very many devices are
dialled they wait for one another (`dial_pace.py`).

While there is no stream, `infer` fails at once: the request machine has better uses for the time than to wait for a
link. A target that says goodbye takes nothing new, still answers what it has, and is dialled again when it has
closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from math import inf

import structlog

from gateway.core.fleet.link_events import LinkAttested, LinkDown, LinkEvent, LinkLoad, LinkRtt, LinkUp, RedialFailed
from gateway.targets.attestation_verifier import AttestationVerifier, TargetAttestation
from gateway.targets.dial_address import unchecked_address
from gateway.targets.dial_pace import DialPace
from tidegate import __version__, clock
from tidegate.fleet.offers import ModelOffer
from tidegate.link.client import MAX_MESSAGE_BYTES, LinkClient
from tidegate.link.frames import Greeting
from tidegate.link.link_inference import infer_over_link
from tidegate.link.origin import Origin
from tidegate.link.session import KeepaliveTiming
from tidegate.link.streams import DIAL_OPTIONS, DialledStream
from tidegate.outcome import BadCredential, Disconnected
from tidegate.runtime.backoff import Backoff
from tidegate.runtime.owned_task import OwnedTask
from tidegate.security.certificate_expiry import earliest_expiry_utc_s, until_expiry
from tidegate.security.tls import Dialler, PlainDialler, explain_dial_error
from tidegate.token_sink import TokenObjectives, TokenSink
from tidegate.types import Accepted, InferRequest, LoadReport, Reply

log = structlog.get_logger(__name__)

BACKOFF_BASE_S = 0.25
BACKOFF_CAP_S = 4.0  # a silent dial is given up after three seconds: within one more the next is on its way
STEADY_S = 1.0  # a link that was up for so long is no flapping one


class LinkTarget:
    """A `Target`. `async with` keeps the link up; events are reported in the order in which they happened."""

    def __init__(
        self,
        id: str,
        address: str,
        *,
        gateway_name: str,
        on_event: Callable[[LinkEvent], None],
        draw: Callable[[], float],
        ping_interval_s: float = 1.0,
        silent_pings: int = 3,
        backoff_cap_s: float = BACKOFF_CAP_S,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        dialler: Dialler | None = None,
        resolve: Callable[[str], Awaitable[str]] = unchecked_address,
        verifier: AttestationVerifier | None = None,
        pace: DialPace | None = None,
    ) -> None:
        """
        Args:
            backoff_cap_s: at most so long from one dial to the next, beyond what the dial itself takes.
            resolve: the address to dial for the one that is known; a ValueError or OSError says why there is none.
            dialler: opens each dial's channel, and checks the server's identity; None: without encryption.
            appraiser: verifies evidence, which is then asked for on each stream.
            pace: of all dials; None: this one waits for no other.
        """
        self.gateway_name = gateway_name
        self._id = id
        self._address = address
        self._dialler = dialler or PlainDialler()
        self._resolve = resolve
        self._verifier = verifier
        self._pace = pace
        self._in_vain = False  # the last dial led nowhere, and nothing was heard of the device since
        self._appraisal: TargetAttestation | None = None  # of this stream
        self._appraising: asyncio.Task[None] | None = None
        self._shown: bytes | None = None  # the certificate by which this stream was dialled
        self._on_event = on_event
        self._greeting = Greeting(f"gateway/{gateway_name}", 0, __version__)
        self._heartbeat = KeepaliveTiming(ping_interval_s, silent_pings)
        self._max_message_bytes = max_message_bytes
        self._backoff = Backoff(draw, BACKOFF_BASE_S, backoff_cap_s)
        self._client: LinkClient | None = None
        self._task = OwnedTask(self._keep_up, name=f"link to {id}")
        self._up = False
        self._up_at = inf
        self._down_reason: str | None = None  # None: not reported yet

    def __repr__(self) -> str:
        state = repr(self._client) if self._up else f"down: {self._down_reason or 'dialling'}"
        return f"<LinkTarget {self._id} at {self._address} {state}>"

    @property
    def id(self) -> str:
        return self._id

    @property
    def address(self) -> str:
        return self._address

    @property
    def client(self) -> LinkClient | None:
        """The requests under way on the stream; None while there is no stream."""
        return self._client

    @property
    def connected(self) -> bool:
        """Whether the target takes requests on its link now."""
        return self._client is not None and self._client.open

    async def __aenter__(self) -> LinkTarget:
        self._task.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._task.aclose()

    async def infer(
        self,
        request: InferRequest,
        *,
        variant: str,
        budget_s: float,
        priority: int,
        traceparent: str,
        on_accepted: Callable[[Accepted], None],
        tracestate: str = "",
        tokens: TokenSink | None = None,
        objectives: TokenObjectives | None = None,
        origin: Origin | None = None,
    ) -> Reply:
        client = self._client
        if client is None or not client.open:
            raise Disconnected(f"{self._id} has no link: {self._down_reason or 'dialling'}")
        return await infer_over_link(
            client,
            request,
            variant=variant,
            budget_s=budget_s,
            priority=priority,
            traceparent=traceparent,
            on_accepted=on_accepted,
            tracestate=tracestate,
            tokens=tokens,
            objectives=objectives,
            origin=origin,
        )

    def hurry(self) -> None:
        """Dial soon: the device is heard of again."""
        self._in_vain = False
        if self._pace is not None:
            self._pace.hurry(self._id)

    # Listener

    def greeted(self, greeting: Greeting) -> None:
        self._up, self._up_at, self._down_reason = True, clock.now(), None
        self._on_event(LinkUp(self._id, greeting.name, greeting.epoch, greeting.offers))
        if self._verifier is not None and self._client is not None:
            report = lambda one: self._on_event(LinkAttested(self._id, one))  # noqa: E731
            self._appraisal = TargetAttestation(self._verifier, self._id, report)
            keep = self._appraisal.keep(self._client, self._shown)
            self._appraising = asyncio.create_task(keep, name=f"appraisal of {self._id}")

    def loaded(self, load: LoadReport, offers: tuple[ModelOffer, ...] | None) -> None:
        self._on_event(LinkLoad(self._id, load, offers))
        if offers is not None and self._appraisal is not None:
            self._appraisal.ask_again()

    def measured(self, rtt_s: float) -> None:
        self._on_event(LinkRtt(self._id, rtt_s))

    def leaving(self, reason: str) -> None:
        self._down(f"leaving: {reason}", in_order=True)

    # the link

    async def _keep_up(self) -> None:
        while True:
            if self._pace is not None:
                await self._pace.turn(self._id, again=self._in_vain)
            dialled_at, self._up_at = clock.now(), inf
            await self._exchange()
            self._in_vain = clock.now() - self._up_at <= STEADY_S
            if not self._in_vain:
                self._backoff.reset()
            else:
                await clock.sleep_until(dialled_at + self._backoff.next_delay_s())

    async def _exchange(self) -> None:
        """Dial once and run the stream to its end."""
        try:
            address = await self._resolve(self._address)
        except (ValueError, OSError) as error:
            self._down(f"{self._address} is not dialled: {error}")
            return
        channel = self._dialler.open(address, DIAL_OPTIONS)
        self._shown = self._dialler.shown
        stream = DialledStream(channel)
        self._client = LinkClient(
            stream, self._greeting, self, heartbeat=self._heartbeat, max_message_bytes=self._max_message_bytes
        )
        reason = "the target is closed"
        try:
            async with until_expiry(earliest_expiry_utc_s((self._shown,)), "this gateway's"):
                reason = explain_dial_error(await self._client.run())
        except BadCredential as error:
            reason = str(error)
        except Exception as exc:  # a defect of ours must not cost the target for good
            log.exception("link failed", target=self._id)
            reason = f"internal error: {type(exc).__name__}"
        finally:
            self._client = None
            # Before anything is awaited: the requests that waited for an answer are placed next, and not here.
            self._down(reason)
            appraising, self._appraising, self._appraisal = self._appraising, None, None
            if appraising is not None:
                appraising.cancel()
            stream.close()
            await channel.close(None)
            if appraising is not None:
                await asyncio.gather(appraising, return_exceptions=True)

    def _down(self, reason: str, *, in_order: bool = False) -> None:
        """Report once per change: when an open link ends, and when the first dial fails; and that later ones do."""
        if self._up or self._down_reason is None:
            self._on_event(LinkDown(self._id, reason, in_order))
        else:
            self._on_event(RedialFailed(self._id))
        self._up, self._down_reason = False, reason
