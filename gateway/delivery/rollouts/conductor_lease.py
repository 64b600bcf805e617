"""The conductor's lease decides which gateway conducts the rollouts of a fleet, and keeps what its successor needs.

Of several gateways with the section `artifacts` and one store, one conducts: it decides about waves and publishes
documents. Its lease lasts LEASE_S and is renewed three times in that; when it is not, another gateway takes the lease,
with a greater fencing number, reads orders and states from the store, and goes on.

A conductor may believe that it still is one: it was stopped, or its network was. So its belief is not what counts:

    a state is recorded    in the store, by a script that compares the fencing number, and only then published
    a publication          needs a lease that had not run out by this gateway's own clock, counted from before the
                           renewal was sent

What slips through is a document that was recorded under the old number and leaves late. It is a signed one of a lower
or the same revision as the new conductor's, which a device that has the newer one refuses; the new conductor publishes
all of its documents, in each session with the broker.

Fencing numbers grow also over a store that was flushed: each is at least the store's clock in milliseconds. Then the
conductor finds its number gone, takes a new lease, and records what it has again. Without the store nobody conducts:
rollouts stand still, devices keep what they have, and time does not pass for the rollout.

Source: Kleppmann, "How to do distributed locking", 2016 (fencing tokens).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import inf
from typing import Final, Self

import structlog

from gateway.store.shared_store import SharedStore, StoreScript, StoreUnavailable
from tidegate import clock
from tidegate.runtime.owned_task import OwnedTask

LEASE_S: Final = 6.0
RENEW_S: Final = 2.0
TRY_S: Final = 1.0  # a gateway that does not conduct
MARGIN_S: Final = 0.5  # the lease ends here before it ends there
KEPT_MS: Final = 90 * 86_400_000
MAX_ORDER_BYTES: Final = 64 * 2**20

log = structlog.get_logger(__name__)

# KEYS: lease, fence. ARGV: this gateway, lease in ms, its fencing number or 0, how long the number is kept.
# Returns who conducts, and under which number.
_HOLD: Final = StoreScript(
    "hold",
    """
local known = redis.call('HMGET', KEYS[1], 'owner', 'fence')
if known[1] and known[1] ~= ARGV[1] then return {known[1], '0'} end
local fence = known[2]
if not fence or fence ~= ARGV[3] or redis.call('GET', KEYS[2]) ~= fence then
  local time = redis.call('TIME')
  local last = tonumber(redis.call('GET', KEYS[2]) or '0')
  fence = string.format('%.0f', math.max(last + 1, time[1] * 1000 + math.floor(time[2] / 1000)))
  redis.call('SET', KEYS[2], fence, 'PX', ARGV[4])
  redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'fence', fence)
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return {ARGV[1], fence}
""",
)
# KEYS: lease. ARGV: this gateway.
_LET_GO: Final = StoreScript(
    "let go",
    "if redis.call('HGET', KEYS[1], 'owner') == ARGV[1] then redis.call('DEL', KEYS[1]) end return 1",
)
# KEYS: fence, orders, states. ARGV: the fencing number, the rollout, how long it is kept, its order or "", its state or
# "". An order does away with the state of an older one of that name. Returns whether it was recorded.
_RECORD: Final = StoreScript(
    "record",
    """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[4] ~= '' then
  redis.call('HSET', KEYS[2], ARGV[2], ARGV[4])
  redis.call('HDEL', KEYS[3], ARGV[2])
end
if ARGV[5] ~= '' then redis.call('HSET', KEYS[3], ARGV[2], ARGV[5]) end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
redis.call('PEXPIRE', KEYS[3], ARGV[3])
return 1
""",
)
# KEYS: fence, orders, states. ARGV: the fencing number, the rollout.
_FORGET: Final = StoreScript(
    "forget",
    """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('HDEL', KEYS[2], ARGV[2])
redis.call('HDEL', KEYS[3], ARGV[2])
return 1
""",
)
# KEYS: orders or states. Returns the names of rollouts, each followed by what there is of it.
_READ: Final = StoreScript("read", "return redis.call('HGETALL', KEYS[1])")


class NotConducting(Exception):
    """Another gateway conducts, or none can now; the message says which."""


class ConductorLease:
    """`async with` tries to get the lease, keeps it, and lets it go at the end.

    Args:
        now: this gateway's own clock.
    """

    def __init__(self, store: SharedStore, gateway: str, now: Callable[[], float] = clock.now) -> None:
        self._now = now
        self._store = store
        self._gateway = gateway
        self._keys = [store.key("rollouts", kind) for kind in ("fence", "orders", "states")]
        self._lease = store.key("rollouts", "lease")
        self._held_until = -inf
        self._on_change: Callable[[], None] = lambda: None
        self.fence = "0"  # of the last lease
        self.conductor = ""  # as the store last said it
        self._task = OwnedTask(self._run, name="conductor's lease", crash_means="this gateway conducts no rollout")

    async def __aenter__(self) -> Self:
        self._task.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._task.aclose()
        if self._held_until > self._now():
            self._held_until = -inf
            with suppress(StoreUnavailable):  # it runs out
                await self._store.run(_LET_GO, [self._lease], [self._gateway])

    @property
    def holds(self) -> bool:
        """Whether this gateway has it."""
        return self._now() < self._held_until

    @property
    def is_anothers(self) -> bool:
        """Whether another gateway had it when the store was last asked."""
        return self.conductor not in ("", self._gateway)

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call this whenever this gateway begins or ceases to conduct."""
        self._on_change = on_change

    @property
    def refusal(self) -> str:
        """Why this gateway does not conduct, for an operator."""
        if self.holds:
            return "this gateway reads which rollouts there are, to conduct them: order again in a moment"
        if self.is_anothers:
            return f"gateway {self.conductor} conducts rollouts: order it there (--admin with its address)"
        return f"no gateway conducts rollouts now: the store {self._store.address} has no lease ({self._store.trouble})"

    async def _run(self) -> None:
        while True:
            held = self.holds
            before = self.fence if held else ""
            try:
                await self._hold()
            except StoreUnavailable:  # it has said so
                pass
            except Exception:
                log.exception("the conductor's lease cannot be asked for")
            holds = self.holds
            if (self.fence if holds else "") != before:
                log.info("this gateway conducts rollouts" if holds else "this gateway conducts no rollouts")
                self._on_change()
            await clock.sleep(RENEW_S if holds else TRY_S)

    async def _hold(self) -> None:
        asked_at = self._now()
        known = self.fence if self.holds else "0"
        arguments: list[str | int] = [self._gateway, round(LEASE_S * 1e3), known, KEPT_MS]
        owner, fence = await self._store.run(_HOLD, [self._lease, self._keys[0]], arguments)
        self.conductor = bytes(owner).decode()
        if self.conductor == self._gateway:
            self.fence, self._held_until = bytes(fence).decode(), asked_at + LEASE_S - MARGIN_S
        else:
            self._held_until = -inf

    async def record(self, id: str, *, order: bytes = b"", state: bytes = b"") -> None:
        """Record an order, a state or both. Raises NotConducting: nothing was recorded, or it is not known."""
        if len(order) > MAX_ORDER_BYTES:
            raise NotConducting(f"the order has {len(order)} bytes; gateways share at most {MAX_ORDER_BYTES}")
        packed = zlib.compress(order, 1) if order else b""
        await self._as_conductor(_RECORD, [id, KEPT_MS, packed, state])

    async def forget(self, id: str) -> None:
        """Raises NotConducting."""
        await self._as_conductor(_FORGET, [id])

    async def _as_conductor(self, script: StoreScript, arguments: list[str | bytes | int]) -> None:
        if not self.holds:
            raise NotConducting(self.refusal)
        try:
            done = await self._store.run(script, self._keys, [self.fence, *arguments])
        except StoreUnavailable as error:
            raise NotConducting(f"the store {self._store.address} does not record rollouts: {error}") from error
        if not done:
            self._held_until = -inf
            raise NotConducting("another gateway has become the conductor, or the store has forgotten this one")

    async def recorded(self) -> Mapping[str, tuple[bytes, bytes]]:
        """The order and the state ("" before the first one) of every rollout. Raises StoreUnavailable."""
        orders = _pairs(await self._store.run(_READ, [self._keys[1]], []))
        states = _pairs(await self._store.run(_READ, [self._keys[2]], []))
        return {id: (_unpacked(order), states.get(id, b"")) for id, order in orders.items()}

    def __repr__(self) -> str:
        return f"<ConductorLease of {self.conductor or 'none'}, fence {self.fence}>"


def _pairs(flat: list[bytes]) -> dict[str, bytes]:
    return {bytes(name).decode(errors="replace"): bytes(one) for name, one in zip(flat[::2], flat[1::2], strict=True)}


def _unpacked(packed: bytes) -> bytes:
    """No more than an order may have, and "" of what is none: what lies in a store is not believed either."""
    try:
        return zlib.decompressobj().decompress(packed, MAX_ORDER_BYTES)
    except zlib.error:
        return b""
