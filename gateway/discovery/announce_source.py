"""The source `announce`: pools that say over MQTT that they are there, as devices do.

The gateway's one connection to the broker brings the messages (`gateway/fleet_sync/sync.py`); they are folded in
`gateway/core/fleet/announced_pools.py`. A pool names its own address, as a device does, so the same networks bound
where the gateway dials (`advertised_networks`): an address outside them is refused by name here, and a host name is
checked by what it resolves to at each dial.

Who may announce a pool is the broker's to say: with the ACL of `tidegate broker config` a user writes below its own
name only. Over TLS the link then demands the certificate of that pool, whoever announced it.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Final

import structlog
from pydantic import ValidationError

from gateway.config.discovery import SourceConfig
from gateway.core.access.networks import AllowedNetworks, host_and_port
from gateway.core.fleet.announced_pools import AnnouncedPool, AnnouncedPools
from gateway.core.fleet.found_targets import Found
from gateway.discovery.reports import Report, SourceAway, SourceSaid
from tidegate import clock
from tidegate.fleet.messages import BadMessage
from tidegate.fleet.pool_messages import PoolState, decode_pool
from tidegate.fleet.topics import PoolTopic
from tidegate.oip.check import quoted_input

PATIENCE_S: Final = 2.0  # for the first session with the broker; after it the source counts as away
NAMED: Final = 8  # refusals in one warning

log = structlog.get_logger(__name__)


class AnnounceSource:
    """Reports what pools announce. `FleetSync` calls it on its task: `session`, `heard`, and `turn` after those."""

    def __init__(self, section: SourceConfig, report: Report, networks: AllowedNetworks) -> None:
        self.name = section.label
        self._section = section
        self._report = report
        self._networks = networks
        self._pools = AnnouncedPools()
        self._connected = False
        self._changed = False
        self._wake_at = inf

    async def __aenter__(self) -> AnnounceSource:
        self._wake_at = clock.now() + PATIENCE_S
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def session(self, *, up: bool, now: float) -> None:
        """A session with the broker has begun, or ended: then what was said holds."""
        self._connected = up
        self._pools.session(up=up, now=now)
        self._changed = up
        if not up:
            self._report(SourceAway(self.name, "there is no session with the broker"))

    def heard(self, pool: str, kind: PoolTopic, payload: bytes, now: float) -> None:
        """Take in one message of a pool's topic."""
        if not payload:
            self._changed |= kind is PoolTopic.STATE and self._pools.cleared(pool)
            return
        try:
            message = decode_pool(pool, kind, payload)
        except BadMessage as error:
            log.info("ignored a pool's message", pool=pool, kind=str(kind), reason=str(error))
            return
        if isinstance(message, PoolState):
            self._changed |= self._pools.state(message, now)
        else:
            self._changed |= self._pools.death(message)

    def turn(self, now: float) -> float:
        """Report what has changed; returns when to be called again at the latest."""
        if not self._connected:
            if now >= self._wake_at:
                self._report(SourceAway(self.name, "there is no session with the broker"))
                self._wake_at = inf
            return self._wake_at
        if self._changed or now >= self._wake_at:
            self._changed = False
            self._report(self._said(now))
            self._wake_at = self._pools.next_wake(now)
        return self._wake_at

    def _said(self, now: float) -> SourceSaid:
        found, odd = [], []
        for one in self._pools.pools(now):
            try:
                found.append(self._found(one))
            except ValueError as error:
                odd.append(f"pool/{one.state.pool}: {error}")
        if len(odd) > NAMED:
            odd[NAMED:] = [f"and {len(odd) - NAMED} more"]
        if self._pools.refused:
            odd.append(f"there are more than {len(self._pools)} pools, such as {next(iter(self._pools.refused))}")
        return SourceSaid(self.name, tuple(found), "; ".join(odd))

    def _found(self, one: AnnouncedPool) -> Found:
        """Raises ValueError where it cannot be a target."""
        state = one.state
        parts = host_and_port(state.address)
        if parts is None:
            raise ValueError(f"its address {quoted_input(state.address)} is no HOST:PORT")
        if why := self._networks.why_not(parts[0]):
            raise ValueError(why)
        zone = {} if state.zone is None else {"zone": state.zone}
        try:
            spec = self._section.target(state.pool, state.address, **zone).spec
        except ValidationError as error:
            raise ValueError(error.errors()[0]["msg"]) from error
        return Found(replace(spec, static=False), draining=state.draining, lost=one.lost)

    def __repr__(self) -> str:
        return f"<AnnounceSource {self._pools!r}>"
