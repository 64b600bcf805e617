"""The lease of an operator: whoever waits for it is told whenever it is held anew."""

from __future__ import annotations

from typing import Any, cast

from tests.support.loop import on_virtual_time
from tidegate import clock
from tidegate.tools.operator.cluster_objects import ClusterObjects
from tidegate.tools.operator.leadership import Leadership


class OneLease:
    """A cluster that holds a Lease, and may be slow."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.takes_s = 0.0

    async def read(self, api: str, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        await clock.sleep(self.takes_s)
        return self.lease

    async def create(self, lease: dict[str, Any]) -> None:
        self.lease = lease

    async def replace(self, lease: dict[str, Any]) -> None:
        self.lease = lease


@on_virtual_time
async def test_a_lease_that_ran_out_during_a_slow_renewal_is_news_when_it_is_held_again() -> None:
    cluster, told = OneLease(), list[bool]()
    leadership = Leadership(
        cast(ClusterObjects, cluster), "prod", "l", "a", lambda: told.append(leadership.held), lease_s=3.0, renew_s=0.6
    )
    async with leadership:
        await clock.sleep(1.0)
        assert told == [True] and leadership.held
        cluster.takes_s = 1.7  # it is held for two seconds of three
        await clock.sleep(1.75)
        assert not leadership.held and told == [True], "a moment at which somebody may have looked"
        await clock.sleep(0.25)
        assert leadership.held and told == [True, True], "else they wait for it until all is looked at again"
        cluster.takes_s = 0.0


@on_virtual_time
async def test_renewals_in_time_are_no_news() -> None:
    cluster, told = OneLease(), list[bool]()
    leadership = Leadership(
        cast(ClusterObjects, cluster), "prod", "l", "a", lambda: told.append(leadership.held), lease_s=3.0, renew_s=0.6
    )
    async with leadership:
        await clock.sleep(30.0)
        assert told == [True]
