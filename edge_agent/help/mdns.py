"""Neighbours find each other on the local network by multicast DNS: one announces itself, another one looks for it.

    MdnsNeighbours   announces this device where it answers neighbours, and looks for others where it asks them
    found            name → HOST:PORT of those that are there, as `Birth`s over MQTT would tell it

A session lasts as long as the device's interfaces are the same, and begins again as one comes or goes, so that a
device that was up before its network is found. Where there is no network, or the port of mDNS is taken, that is tried
again; nothing else of the agent waits for it.

What is announced is nobody's word: see `core/help/announcement.py`. It is bounded in every direction: names that are
not looked for are dropped before anything is asked about them, MOST_SERVICES are followed, RESOLVED_AT_ONCE are asked
about in a second, and what the library remembers of all that is said on the network is thrown away beyond MOST_CACHED.
What changes how often is `core/help/announced_neighbours.py`.

At the end a goodbye is sent, and others forget the device at once; one that was killed, after `ttl_s` and KEEP_S.

It leaves the protocol to the library `zeroconf`. It can be wrong where routers or access points do not let multicast
through, as guests' networks often do: `tidegate edge doctor` then says that nobody was found.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from ipaddress import IPv4Interface
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import structlog

from edge_agent.core.help.announced_neighbours import AnnouncedNeighbours
from edge_agent.core.help.announcement import (
    SERVICE,
    address_of,
    device_of,
    group_of,
    is_of,
    is_one_address,
    properties_of,
    service_of,
)
from tidegate import clock
from tidegate.runtime.owned_task import OwnedTask
from tidegate.runtime.process import StartError

if TYPE_CHECKING:
    from zeroconf import ServiceStateChange
    from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

LOOK_S: Final = 1.0
RETRY_S: Final = 10.0
GOODBYE_S: Final = 1.0
MOST_SERVICES: Final = 64
RESOLVED_AT_ONCE: Final = 4
MOST_CACHED: Final = 4096  # names
_MOST_TTL_S: Final = 600.0  # whatever a record says; then it is asked for again
_ASK_MS: Final = 700.0
_SRV, _IN = 33, 1  # RFC 1035 and 2782
log = structlog.get_logger(__name__)


class MdnsScope(NamedTuple):
    """Among whom a device is found, and where: the fleet, the site, and addresses of interfaces, none: all of them."""

    fleet: str
    site: str
    interfaces: tuple[str, ...]
    ttl_s: float


class MdnsNeighbours:
    """`async with` announces and looks until its end.

    Args:
        name: of this device.
        address: HOST:PORT of its gRPC port, to announce; read when a session begins. None: it is not announced.
        looks_for: whether the device of this name may be asked; None: no device is looked for.
        named: names that are looked for in any case.

    Raises:
        StartError: the library is not installed.
    """

    def __init__(
        self,
        name: str,
        scope: MdnsScope,
        *,
        address: Callable[[], str] | None,
        looks_for: Callable[[str], bool] | None,
        named: Sequence[str] = (),
    ) -> None:
        self._name = name
        self._scope = scope
        self._group = group_of(scope.fleet, scope.site)
        self._address = address
        self._looks_for = looks_for
        self._table = AnnouncedNeighbours(named)
        self._services: dict[str, None] = {}  # instances that are there, the one asked about longest ago first
        self._own: tuple[IPv4Interface, ...] = ()
        self._announced = ""
        self._trouble = ""
        self._task = OwnedTask(self._keep, name="mdns")
        try:
            import ifaddr
            import zeroconf
            import zeroconf.asyncio
        except ImportError as error:
            raise StartError(f"key 'mdns' needs zeroconf ({error}): pip install 'tidegate[mdns]'") from error
        self._ifaddr: Any = ifaddr
        self._zeroconf: Any = zeroconf

    async def __aenter__(self) -> Self:
        self._task.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._task.aclose()

    @property
    def found(self) -> dict[str, str]:
        """Name → HOST:PORT of the devices that are there now."""
        return self._table.found(clock.now())

    def told(self) -> dict[str, object]:
        """For people: where it is announced, how many instances are followed, what was found, and what is wrong."""
        return {
            "announced": self._announced,
            "followed": len(self._services),
            "found": self.found,
            "trouble": self._trouble,
        }

    async def _keep(self) -> None:
        while True:
            try:
                await self._session()
                self._note_trouble("")
            except (OSError, self._zeroconf.Error) as error:
                self._note_trouble(str(error) or type(error).__name__)
                await clock.sleep(RETRY_S)
            except Exception:
                log.exception("cannot look for neighbours by mDNS")  # a defect must not end the task for good
                await clock.sleep(RETRY_S)

    def _note_trouble(self, words: str) -> None:
        if words and words != self._trouble:
            log.warning("no neighbour is found by mDNS", reason=words)
        self._trouble = words

    async def _session(self) -> None:
        """Announce and look, until the interfaces change or too much is remembered."""
        own = await asyncio.to_thread(self._interfaces)
        if not own:
            raise OSError("no interface has an IPv4 address")
        version = self._zeroconf.IPVersion.V4Only
        network = self._zeroconf.asyncio.AsyncZeroconf([str(one.ip) for one in own], ip_version=version)
        self._own, browser = own, None
        try:
            await network.zeroconf.async_wait_for_start()
            await self._announce(network)
            if self._looks_for is not None:
                make_browser = self._zeroconf.asyncio.AsyncServiceBrowser
                browser = make_browser(network.zeroconf, SERVICE, handlers=[self._changed])
            self._note_trouble("")
            look_again_at = clock.now() + RETRY_S
            while len(network.zeroconf.cache.cache) < MOST_CACHED:
                await clock.sleep(LOOK_S)
                await self._look(network)
                if clock.now() >= look_again_at:
                    look_again_at = clock.now() + RETRY_S
                    if await asyncio.to_thread(self._interfaces) != own:
                        return
            log.warning("too much is said by mDNS: looking anew", names=MOST_CACHED)
        finally:
            self._services.clear()
            self._announced = ""
            with suppress(TimeoutError):
                async with asyncio.timeout(GOODBYE_S):
                    if browser is not None:
                        await browser.async_cancel()
                    await network.async_close()  # with a goodbye

    def _interfaces(self) -> tuple[IPv4Interface, ...]:
        """Those of the scope; without any in it all but loopback."""
        wanted = self._scope.interfaces
        found = [
            IPv4Interface(f"{one.ip}/{one.network_prefix}")
            for adapter in self._ifaddr.get_adapters()
            for one in adapter.ips
            if one.is_IPv4
        ]
        return tuple(sorted({one for one in found if (str(one.ip) in wanted if wanted else not one.is_loopback)}))

    async def _announce(self, network: AsyncZeroconf) -> None:
        if self._address is None:
            return
        host, _, port = self._address().rpartition(":")
        mine = [host] if is_one_address(host) else [str(one.ip) for one in self._own]
        ttl_s = int(self._scope.ttl_s)
        info = self._zeroconf.asyncio.AsyncServiceInfo(
            SERVICE,
            service_of(self._name, self._group),
            parsed_addresses=mine,
            port=int(port),
            properties=properties_of(self._scope.fleet, self._scope.site),
            server=f"{service_of(self._name, self._group).partition('.')[0].replace(' ', '-')}.tidegate.local.",
            host_ttl=ttl_s,
            other_ttl=ttl_s,
        )
        # Without a probe for others of this name: whoever answered it could keep the device from being announced, and
        # that two devices have one name is found by the fleet.
        await (await network.async_register_service(info, cooperating_responders=True))
        self._announced = f"{', '.join(mine)} port {port}"
        log.info("announced by mDNS", name=self._name, at=self._announced)

    def _changed(self, zeroconf: object, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        """What the library calls, by these names, as an instance comes, changes or goes; in the loop's thread."""
        device = device_of(name, self._group)
        if not device or device == self._name or self._looks_for is None or not self._looks_for(device):
            return
        if state_change is self._zeroconf.ServiceStateChange.Removed:
            self._services.pop(name, None)
            self._table.gone(device)
        elif len(self._services) < MOST_SERVICES:
            self._services[name] = None

    async def _look(self, network: AsyncZeroconf) -> None:
        """Bring the table up to what is known of the instances, and ask about those of which too little is."""
        unknown = []
        for service in list(self._services):
            info = self._zeroconf.asyncio.AsyncServiceInfo(SERVICE, service)
            if self._is_fresh(network, service) and info.load_from_cache(network.zeroconf):
                self._take(service, info)
            else:
                unknown.append(info)
        asked = unknown[:RESOLVED_AT_ONCE]
        for info in asked:  # to the end of the line: one that never answers must not be in another's way
            if info.name in self._services:
                self._services[info.name] = self._services.pop(info.name)
        answers = await asyncio.gather(*(one.async_request(network.zeroconf, _ASK_MS) for one in asked))
        for info, answered in zip(asked, answers, strict=True):
            if answered and info.name in self._services:
                self._take(info.name, info)

    def _is_fresh(self, network: AsyncZeroconf, service: str) -> bool:
        record = network.zeroconf.cache.get_by_details(service, _SRV, _IN)
        return record is not None and self._zeroconf.current_time_millis() - record.created < _MOST_TTL_S * 1e3

    def _take(self, service: str, info: AsyncServiceInfo) -> None:
        if not is_of(info.properties, self._scope.fleet, self._scope.site):
            return
        if address := address_of(info.parsed_addresses(), info.port, self._own):
            self._table.heard(device_of(service, self._group), address, clock.now())

    def __repr__(self) -> str:
        return f"<MdnsNeighbours {self._announced or 'not announced'}, {self._table!r}>"
