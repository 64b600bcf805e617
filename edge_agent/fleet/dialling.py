"""The gateway dialler dials the gateways that cannot dial this device, and answers on the streams that result.

    GatewayDialler    compares known gateways and open streams once a second (`core/dial_policy.py` decides), keeps …
    _DialledGateway   … one task for each gateway to dial: dial, answer until the stream ends, dial again

A stream that was lost is dialled again once the gateway takes connections (`reachability.py`), so that a device is back
within a second of its link. A gateway that takes connections and ends streams is dialled again after a full-jitter
wait of at most `REDIAL_CAP_S`. While a gateway has given this device's name to another agent, nothing is dialled
(`edge_agent/core/name_dispute.py`). A dial that hangs is ended by the stream's own heartbeat, as no hello arrives.
Every dial is a new connection.

The gateways are configured (`gateways`), or learned over MQTT, where each publishes the address at which it may be
dialled. Over TLS the other side must show the certificate of the named gateway; where only an address is configured,
one for that host. Without TLS the address is trusted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Self

import structlog

from edge_agent.config import EdgeConfig, is_gateway_address
from edge_agent.core.dial_policy import DialPlan
from edge_agent.core.name_dispute import NameDispute
from edge_agent.fleet.reachability import wait_until_open
from edge_agent.fleet.sync import log_name_taken
from tidegate import clock
from tidegate.fleet.messages import GatewayState
from tidegate.fleet.name_conflict import is_name_taken
from tidegate.link.server import LinkServer
from tidegate.link.service import LinkService
from tidegate.link.streams import DIAL_OPTIONS, DialledStream
from tidegate.runtime.backoff import Backoff
from tidegate.runtime.owned_task import OwnedTask, cancel_and_wait
from tidegate.runtime.process import StartError
from tidegate.security.certificate_identity import CertificateIdentity
from tidegate.security.tls import Dialler, PlainDialler, Tls, explain_dial_error

LOOK_S: Final = 1.0
REDIAL_BASE_S: Final = 0.1
REDIAL_CAP_S: Final = 2.0
STEADY_S: Final = 1.0
_TOLD_MOST: Final = 200  # characters of a reason in the log

log = structlog.get_logger(__name__)


class GatewayDialler:
    """`async with` keeps dialling until its end.

    Args:
        link: what answers on the streams.
        configured: address → "gateway/NAME", "" where only the address is configured.
        heard: the states that gateways published over MQTT, by name; read at each look.
        key: API key for gateways that require one.
        dispute: what gateways have said about another agent of this name.
    """

    def __init__(
        self,
        link: LinkService,
        plan: DialPlan,
        configured: Mapping[str, str],
        heard: Callable[[], Mapping[str, GatewayState]],
        *,
        tls: Tls | None,
        draw: Callable[[], float],
        key: str = "",
        dispute: NameDispute | None = None,
    ) -> None:
        self._dispute = NameDispute(draw) if dispute is None else dispute
        self._link = link
        self._plan = plan
        self._configured = configured
        self._heard = heard
        self._tls = tls
        self._draw = draw
        self._key = key
        self._open: dict[str, _DialledGateway] = {}
        self._names: dict[str, str] = {}  # address → the name that it answered as
        self._links: dict[str, tuple[str, ...]] = {}  # name → last known addresses
        self._task = OwnedTask(self._keep_looking, name="dial out")

    async def __aenter__(self) -> Self:
        self._task.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._task.aclose()
        for dialled in self._open.values():
            await dialled.close()

    @property
    def up(self) -> frozenset[str]:
        """The gateways that this device serves on streams it dialled, "gateway/NAME"."""
        return frozenset(dialled.peer for dialled in self._open.values() if dialled.peer)

    async def _keep_looking(self) -> None:
        while True:
            try:
                self._look()
            except Exception:
                log.exception("cannot look for gateways to dial")  # a defect must not end the task for good
            await clock.sleep_until_tick(LOOK_S)

    def _look(self) -> None:
        if self._link.draining:
            return
        if self._dispute.standing_down(clock.now()):
            for dialled in self._open.values():
                dialled.leave("another agent has this device's name")
        self._forget_done()
        if self._dispute.standing_down(clock.now()):
            return
        gateways = self.gateways()
        wanted = self._plan.addresses_to_dial(gateways, self._link.callers, clock.now())
        for address in wanted - self._open.keys():
            dialler = self.dialler(address, gateways[address])
            if dialler is not None:
                self._open[address] = _DialledGateway(
                    address, self._link, dialler, self._draw, self._key, names=self._names, dispute=self._dispute
                )
        for address in self._open.keys() - wanted:
            self._open[address].leave("this gateway reaches the device by itself")
        self._forget_done()

    def _forget_done(self) -> None:
        for address in [address for address, dialled in self._open.items() if dialled.done]:
            del self._open[address]

    def gateways(self) -> dict[str, str]:
        """Address → name of the gateways that report themselves online, or to which a stream stands."""
        for address, dialled in self._open.items():
            if dialled.peer:
                self._names[address] = dialled.peer
        found = {address: name or self._names.get(address, "") for address, name in self._configured.items()}
        heard = self._heard()
        self._links = {name: links for name, links in self._links.items() if name in heard}
        for name, state in heard.items():
            if state.online:  # a will carries no address
                self._links[name] = state.links
            for address in filter(is_gateway_address, self._links.get(name, ())):
                if state.online or (address in self._open and self._open[address].peer):
                    found.setdefault(address, f"gateway/{name}")
        return found

    def dialler(self, address: str, name: str) -> Dialler | None:
        """What opens connections to a gateway, which must prove to be the one of this name; None: it cannot be dialled.

        Args: name: "gateway/NAME"; "" where it is not known.
        """
        if self._tls is None:
            return PlainDialler()
        try:
            named = self._configured.get(address, name)
            return self._tls.dialler(CertificateIdentity.parse(named) if named else None)
        except ValueError as error:
            log.warning("a gateway is not dialled", address=address, reason=str(error))
            return None

    def __repr__(self) -> str:
        return f"<GatewayDialler {self._plan!r} {list(self._open.values())}>"


class _DialledGateway:
    """One gateway that is dialled, from the first dial until `leave` has taken effect or `close`."""

    def __init__(
        self,
        address: str,
        link: LinkService,
        dialler: Dialler,
        draw: Callable[[], float],
        key: str,
        names: dict[str, str],
        dispute: NameDispute,
    ) -> None:
        self._dispute = dispute
        self._address = address
        self._link = link
        self._dialler = dialler
        self._metadata = (("authorization", f"Bearer {key}"),) if key else ()
        self._draw = draw
        self._backoff = Backoff(draw, REDIAL_BASE_S, REDIAL_CAP_S)
        self._names = names
        self._server: LinkServer | None = None
        self._leaving = ""
        self._told = ""
        self._task = asyncio.create_task(self._keep_up(), name=f"dial {address}")

    @property
    def peer(self) -> str:
        """The gateway that answers on the stream now; "" where there is none."""
        return self._server.peer if self._server else ""

    @property
    def done(self) -> bool:
        return self._task.done()

    def leave(self, reason: str) -> None:
        """Take no new requests, answer those under way, end, and dial no more."""
        if not self._leaving:
            self._leaving = reason
            if self._server is not None and self._server.peer:
                self._server.leave(reason)
            else:
                self._task.cancel()

    async def close(self) -> None:
        await cancel_and_wait(self._task)

    async def _keep_up(self) -> None:
        while not self._leaving and not self._link.draining:
            dialled_at = clock.now()
            peer, reason = await self._exchange()
            self._tell(peer, reason)
            if is_name_taken(reason):
                now = clock.now()
                log_name_taken(self._link.name, self._link.epoch, reason, self._dispute.refused(reason, now))
                return  # the next look dials again once the dispute allows
            if self._leaving or self._link.draining:
                return
            await wait_until_open(self._address, self._draw)
            if peer and clock.now() - dialled_at > STEADY_S:
                self._backoff.reset()
            else:
                await clock.sleep_until(dialled_at + self._backoff.next_delay_s())

    async def _exchange(self) -> tuple[str, str]:
        """Dial once and answer until the stream ends; the gateway's name, if it answered, and why the stream ended."""
        # With its scheme: gRPC would take "unix:80" for a file.
        channel = self._dialler.open(f"dns:///{self._address}", DIAL_OPTIONS)
        stream = DialledStream(channel, self._metadata)
        self._server = server = self._link.server_for(stream, dialled=True)
        try:
            reason = explain_dial_error(await self._link.run(server))
        except Exception as error:  # a defect must not lose the gateway for good
            log.exception("a link that was dialled failed", address=self._address)
            reason = f"internal error: {type(error).__name__}"
        finally:
            self._server = None
            stream.close()
            await channel.close(None)
        if server.peer:
            self._names[self._address] = server.peer
        return server.peer, reason

    def _tell(self, peer: str, reason: str) -> None:
        """Log each reason once until a stream has stood: an absent gateway is dialled once a second."""
        reason = reason[:_TOLD_MOST]
        if peer or reason != self._told:
            log.info("a gateway was dialled", address=self._address, gateway=peer or "no answer", ended=reason)
        self._told = "" if peer else reason

    def __repr__(self) -> str:
        return f"<_DialledGateway {self._address} {self.peer or 'down'}{' leaving' if self._leaving else ''}>"


def gateway_dialler_of(
    config: EdgeConfig,
    link: LinkService,
    heard: Callable[[], Mapping[str, GatewayState]],
    *,
    tls: Tls | None,
    draw: Callable[[], float],
    dispute: NameDispute | None = None,
) -> GatewayDialler:
    """The dialler of a configuration. Raises StartError."""
    return GatewayDialler(
        link,
        DialPlan(config.dial_out),
        configured_gateways(config.gateways),
        heard,
        tls=tls,
        draw=draw,
        key=read_key(config.dial_key_file),
        dispute=dispute,
    )


def configured_gateways(gateways: tuple[str, ...]) -> dict[str, str]:
    """Address → "gateway/NAME" of `[NAME@]HOST:PORT`, each; "" where no name is given."""
    parts = [one.rpartition("@") for one in gateways]
    return {address: f"gateway/{name}" if name else "" for name, _, address in parts}


def read_key(path: Path | None) -> str:
    """The API key in a file; "" without one. Raises StartError."""
    if path is None:
        return ""
    try:
        key = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"key 'dial_key_file': {path} cannot be read: {error}") from error
    if not key or not key.isprintable():
        raise StartError(f"key 'dial_key_file': {path} holds no key")
    return key
