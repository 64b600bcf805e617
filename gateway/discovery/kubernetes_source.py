"""The source `kubernetes`: the pods of a Service, by its EndpointSlices, listed once and then watched.

    list → watch from its version → … ended after a minute, or cut → watch from the last version that was seen
                                    410: that version is too old → list again

So a change is known at once, a cut watch costs one request, and nothing that happened in between is lost. While a list
is fetched again the earlier set holds. The API server may be away, or refuse: then the set holds as well, and the waits
between tries grow to `LATEST_S`. A watch ends after a minute, so that a connection that silently broke is found.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Final

import structlog
from pydantic import ValidationError

from gateway.config.discovery import SourceConfig
from gateway.core.fleet.found_targets import Found
from gateway.discovery.endpoint_slices import (
    BadObject,
    EndpointSlice,
    EndpointSlices,
    ServiceTarget,
    WatchEvent,
    decode,
    resource_version,
)
from gateway.discovery.kubernetes_api import (
    ApiFailed,
    ApiGone,
    ApiUnreadable,
    KubernetesApi,
)
from gateway.discovery.reports import Report, SourceAway, SourceSaid
from tidegate import clock
from tidegate.runtime.backoff import Backoff
from tidegate.runtime.owned_task import OwnedTask
from tidegate.servers.cluster_access import api_address, own_environment

WATCH_S: Final = 60
STEADY_S: Final = 1.0  # a watch that ended sooner is not followed by another at once
SOONEST_S: Final = 0.1
LATEST_S: Final = 5.0

log = structlog.get_logger(__name__)


class KubernetesSource:
    """`async with` lists and watches until its end. Raises ConfigError at the start where there is no API server."""

    def __init__(self, section: SourceConfig, report: Report, draw: Callable[[], float]) -> None:
        self.name = section.label
        self._section = section
        self._report = report
        self._slices = EndpointSlices(section.port_name)
        self._version = ""  # "": to be listed
        self._away = False
        self._checked: dict[ServiceTarget, Found | str] = {}
        self._backoff = Backoff(draw, base_s=0.5, cap_s=LATEST_S)
        self._api: KubernetesApi | None = None
        self._task = OwnedTask(self._follow, name=f"discovery {self.name}")

    async def __aenter__(self) -> KubernetesSource:
        section = self._section
        assert section.service is not None
        where = api_address(section.server, section.namespace, section.token_file, section.ca_file, own_environment())
        self._api = await KubernetesApi(where, section.service, section.timeout_s).__aenter__()
        self._task.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._task.aclose()
        if self._api is not None:
            await self._api.__aexit__()

    async def _follow(self) -> None:
        assert self._api is not None
        while True:
            began_at = clock.now()
            in_order = await self._round(self._api)
            if in_order and clock.now() - began_at >= STEADY_S:
                self._backoff.reset()
            else:
                await clock.sleep(SOONEST_S + self._backoff.next_delay_s())

    async def _round(self, api: KubernetesApi) -> bool:
        """List where that is needed, and watch until that ends; whether it ended in order."""
        try:
            await self._list_and_watch(api)
            return True
        except ApiGone as error:
            if self._version:
                log.info("EndpointSlices are listed again: the watch was left behind", source=self.name)
            else:  # between two pages of a list; or a server that says so for ever
                self._fail(f"410: the list was left behind while it was read: {error}")
            self._version = ""
        except ApiUnreadable as error:
            self._version = ""
            self._fail(str(error))
        except BadObject as error:
            self._version = ""
            self._fail(f"what the API server said cannot be read: {error}")
        except ApiFailed as error:
            self._fail(str(error))
        except Exception as error:  # a defect must not end discovery for good
            log.exception("watching EndpointSlices has failed", source=self.name)
            self._version = ""
            self._fail(f"internal error: {type(error).__name__}")
        return False

    def _fail(self, why: str) -> None:
        self._away = True
        self._report(SourceAway(self.name, why))

    async def _list_and_watch(self, api: KubernetesApi) -> None:
        """Returns when the watch has ended. Raises ApiFailed and BadObject."""
        if not self._version:
            slices, version = await api.fetch_all()
            self._slices.listed(slices)
            self._version = version
            self._say()
        async with aclosing(api.watch(self._version, WATCH_S)) as events:
            async for event in events:
                if event is not None:
                    self._take(event)
                elif self._away:
                    self._say()

    def _take(self, event: WatchEvent) -> None:
        version = resource_version(event.object)
        if event.type in ("ADDED", "MODIFIED"):
            self._slices.changed(decode(EndpointSlice, event.object))
            self._say()
        elif event.type == "DELETED":
            self._slices.removed(decode(EndpointSlice, event.object))
            self._say()
        if version:
            self._version = version

    def _say(self) -> None:
        self._away = False
        found, odd = [], []
        targets, warning = self._slices.targets()
        if warning:
            odd.append(warning)
        before, self._checked = self._checked, {}
        for one in targets:
            # Each event says all of a Service anew, and to check thousands takes a good part of a second.
            known = self._checked[one] = before.get(one) or self._found(one)
            if isinstance(known, str):
                odd.append(known)
            else:
                found.append(known)
        self._report(SourceSaid(self.name, tuple(found), "; ".join(odd[:9])))

    def _found(self, one: ServiceTarget) -> Found | str:
        """The target, or why it cannot be one."""
        zone = self._section.zones.get(one.zone)
        more = {} if zone is None else {"zone": zone}
        try:
            return Found(self._section.target(one.name, one.address, **more).spec, draining=one.draining)
        except ValidationError as error:
            return f"{one.name}: {error.errors()[0]['msg']}"

    def __repr__(self) -> str:
        return f"<KubernetesSource {self.name} {self._slices!r}>"
