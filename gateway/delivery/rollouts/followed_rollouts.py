"""Followed rollouts are those that another gateway conducts: what the store has of them, read and never written here.

    the store          which rollouts have another stamp than the one that was read last → their orders and states
    versions           a version that devices come to have is described to this gateway by the manifest beside the
                       order, so that callers who ask here get it too, whether or not its files were brought here
    preferred versions a rollout that begins, or is called back, while this gateway follows counts here as it does there
    documents          the newest one of each device, for operators who ask here

So an operator sees one fleet, whichever gateway is asked. What is read decides nothing: this gateway publishes nothing
and records nothing until it conducts, and then it reads all of it again (`coordinator.py`).

Bounded by what the conductor keeps there (`journal.KEPT`), a few rollouts at each look.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import structlog

from gateway.core.versions.canary import CanaryRollout, RolloutPhase
from gateway.delivery.rollouts.conductor_lease import READ_AT_ONCE, ConductorLease, RecordedRollout
from gateway.delivery.rollouts.journal import rollout_as_recorded
from gateway.delivery.rollouts.order import InvalidOrder, RolloutOrder, decode_order

FOLLOW_S: Final = 2.0
log = structlog.get_logger(__name__)
Announce = Callable[[RolloutOrder, Mapping[str, bytes]], Awaitable[None]]


class PreferredVersions(Protocol):
    """What requests get that name no version, as far as operators have a say in it (`gateway/delivery/trials.py`)."""

    async def rolled_out(self, model: str, version: str) -> None: ...

    async def recalled(self, model: str, version: str) -> None: ...


@dataclass(frozen=True, slots=True)
class _FollowedRollout:
    stamp: str
    order: RolloutOrder | None = None  # None: it cannot be read
    waves: CanaryRollout | None = None


class FollowedRollouts:
    """Mutable: `look` reads what has changed.

    Args:
        announce: describes the versions of an order, by the manifests beside it.
        preferred: told of each rollout that begins and of each that is called back.
    """

    def __init__(self, announce: Announce, preferred: PreferredVersions) -> None:
        self._announce = announce
        self._preferred = preferred
        self._known: dict[str, _FollowedRollout] = {}
        self._documents: dict[str, tuple[int, bytes]] = {}
        self._looked = False  # at all there was

    @property
    def all(self) -> dict[str, CanaryRollout]:
        """Those that can be read, by id."""
        return {id: one.waves for id, one in self._known.items() if one.waves is not None}

    def document(self, device: str) -> tuple[int, bytes] | None:
        """Return (revision, message) of the newest document that a device was asked for."""
        return self._documents.get(device)

    async def look(self, lease: ConductorLease) -> bool:
        """Read what has changed since the last look; whether there may be more. Raises StoreUnavailable."""
        names, changed = await lease.changed({id: one.stamp for id, one in self._known.items()})
        self._known = {id: one for id, one in self._known.items() if id in set(names)}
        for recorded in changed:
            await self._take(recorded)
        more = len(changed) >= READ_AT_ONCE
        self._looked |= not more
        return more

    async def _take(self, recorded: RecordedRollout) -> None:
        known = self._known.get(recorded.id)
        try:
            order = decode_order(recorded.order)
            if order.spec.id != recorded.id:
                raise InvalidOrder(f"its order is of {order.spec.id}")
            waves = rollout_as_recorded(order, recorded.state or None)
        except InvalidOrder as error:
            if known is None or known.order is not None:
                log.error("a rollout in the store cannot be read", rollout=recorded.id, reason=str(error))
            self._known[recorded.id] = _FollowedRollout(recorded.stamp)
            return
        self._known[recorded.id] = _FollowedRollout(recorded.stamp, order, waves)
        if known is None or known.order != order:
            await self._announce(order, recorded.manifests)
        self._note_documents(order, waves)
        await self._tell(known.waves if known is not None else None, waves)

    async def _tell(self, before: CanaryRollout | None, waves: CanaryRollout) -> None:
        """Have the preferred versions know. What the first looks find has begun before anything was preferred here."""
        spec, phase = waves.spec, waves.state.phase
        returns = phase is RolloutPhase.RETURNING and (before is None or before.state.phase is not phase)
        begins = waves.state.wave >= 0 and (self._looked if before is None else before.state.wave < 0)
        try:
            if spec.kind == "model" and returns:
                await self._preferred.recalled(spec.model, spec.version)
            elif spec.kind == "model" and begins and phase is not RolloutPhase.RETURNED:
                await self._preferred.rolled_out(spec.model, spec.version)
        except OSError as error:
            log.error("the preferred versions cannot be remembered", rollout=spec.id, reason=str(error))

    def _note_documents(self, order: RolloutOrder, waves: CanaryRollout) -> None:
        for device, back in waves.asks.items():
            revisions = order.spec.revisions[device]
            revision = revisions.back if back else revisions.forward
            if revision > self._documents.get(device, (0, b""))[0]:
                self._documents[device] = revision, order.documents[device].message(back=back)

    def __repr__(self) -> str:
        return f"<FollowedRollouts {len(self._known)} known>"
