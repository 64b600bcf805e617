"""The peer exchange tells the other gateways what is asked of this one, and divides what is shared by what they say.

It runs beside requests, never on their way: each turn it takes what was asked since the last one, publishes it, and
sets this gateway's share of each quota, the price of the cloud and the rule for shared targets. While there is no other
gateway it publishes nothing.

In a gateway of several processes each tells its siblings what is asked of it, and the keeper tells other gateways what
is asked of all of them together (`gateway/core/peers/siblings.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Final, Self

import structlog

from gateway.core.admission.shared_quotas import Asked, SharedQuotas
from gateway.core.fleet.scaling import ReplicaScaler
from gateway.core.peers.demand_terms import DemandTerms
from gateway.core.peers.peers import CloudSpend, PeerReport, Peers
from gateway.core.peers.siblings import Siblings, combined
from gateway.core.placement.cloud_budget import CloudBudget
from tidegate import clock
from tidegate.runtime.owned_task import OwnedTask

TURN_S: Final = 0.2
AT_LEAST_S: Final = 0.8  # while nothing is asked

log = structlog.get_logger(__name__)


class PeerExchange:
    """`async with` runs it.

    Args:
        publish: sends a report; False while there is no broker.
        on_count: called with the number of those that decide where requests go, when it has changed: of gateways, this
            one included, and of the other processes of this one.
        siblings: the other processes of this gateway; None: there are none.
        tell_siblings: sends them a report.
        leases: whether a store lends quotas, by what is asked of each, also to a gateway that seems to be alone.
        spends: what a store says that the others spend in the cloud; None: the broker's reports say it.
    """

    def __init__(
        self,
        peers: Peers,
        publish: Callable[[PeerReport], bool],
        on_count: Callable[[int], None],
        *,
        quotas: SharedQuotas,
        scaling: ReplicaScaler,
        cloud: CloudBudget | None,
        siblings: Siblings | None = None,
        tell_siblings: Callable[[PeerReport], None] = lambda _report: None,
        leases: bool = False,
        spends: Callable[[], list[CloudSpend] | None] = lambda: None,
    ) -> None:
        self._peers = peers
        self._publish = publish
        self._on_count = on_count
        self._quotas = quotas
        self._scaling = scaling
        self._cloud = cloud
        self._siblings = siblings or Siblings()
        self._tell_siblings = tell_siblings
        self._count = self._gateways = 1
        self._leases = leases
        self._spends = spends
        self._said_at = -inf
        self._task = OwnedTask(self._run, name="peer exchange")

    async def __aenter__(self) -> Self:
        self._task.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._task.aclose()

    async def _run(self) -> None:
        while True:
            try:
                self.turn(clock.now())
            except Exception:
                log.exception("what gateways share cannot be divided")  # a defect here must not end it for good
            await clock.sleep(TURN_S)

    def turn(self, now: float) -> None:
        """Take, tell and divide once."""
        peers, siblings = self._peers, self._siblings
        gateways = peers.count(now)
        count = gateways + siblings.count
        if gateways != self._gateways:
            log.info("gateways side by side", gateways=gateways, others=", ".join(peers.names(now)))
            self._gateways = gateways
        if count != self._count:
            self._count = count
            self._on_count(count)
        reports, unknown = peers.reports(now), peers.unknown(now)
        beside, silent = siblings.reports(now), siblings.unknown(now)
        asked = self._quotas.take(now) if count > 1 or self._leases else {}
        if count > 1:
            self._tell(asked, beside, now)
        self._quotas.divide(reports, unknown, now, beside, silent)
        if self._cloud is not None:
            spends = self._spends()
            if spends is None:
                spends = [report.cloud for report in (*reports, *beside) if report.cloud is not None]
            self._cloud.beside(spends, max(0, count - 1 - len(spends)))

    def _tell(self, asked: Asked, beside: Sequence[PeerReport], now: float) -> None:
        need = self._scaling.needed.terms if self._scaling.known else None
        own = PeerReport(asked, need, None if self._cloud is None else self._cloud.told(now))
        together = combined((own, *beside)) if beside else own
        is_quiet = not together.asked and (together.cloud is None or together.cloud.spend < 1e-6)
        if now - self._said_at < (AT_LEAST_S if is_quiet else 0.0):
            return
        if self._siblings.count:
            self._tell_siblings(own)
            self._said_at = now
        if self._publish(together):
            self._said_at = now

    def __repr__(self) -> str:
        return f"<PeerExchange of {self._gateways} gateways, {self._siblings!r}>"


def needs_of_others(peers: Peers, siblings: Siblings, now: float) -> list[DemandTerms | None]:
    """What the others need of the pool; None of each that does not know it, or has not said it."""
    told = [report.need for report in (*peers.reports(now), *siblings.reports(now))]
    return [*told, *[None] * (peers.unknown(now) + siblings.unknown(now))]
