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

The other gateways read there how rollouts are, and the manifests of the versions that devices come to have
(`followed_rollouts.py`): each record leaves a stamp, so that they read again only what has changed.

Source: Kleppmann, "How to do distributed locking", 2016 (fencing tokens).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from math import inf
from typing import Final, NamedTuple, Self

import msgspec
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
READ_AT_ONCE: Final = 8  # rollouts that have changed, by a gateway that follows

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
# KEYS: fence, orders, states, manifests, stamps. ARGV: the fencing number, the rollout, how long it is kept, its order,
# its state, the manifests of its versions ("": not given). An order does away with the state of an older one of that
# name. Returns whether it was recorded.
_RECORD: Final = StoreScript(
    "record",
    """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[4] ~= '' then
  redis.call('HSET', KEYS[2], ARGV[2], ARGV[4])
  redis.call('HDEL', KEYS[3], ARGV[2])
end
if ARGV[5] ~= '' then redis.call('HSET', KEYS[3], ARGV[2], ARGV[5]) end
if ARGV[6] ~= '' then redis.call('HSET', KEYS[4], ARGV[2], ARGV[6]) end
local time = redis.call('TIME')
redis.call('HSET', KEYS[5], ARGV[2], time[1] .. '.' .. time[2])
for i = 1, 5 do redis.call('PEXPIRE', KEYS[i], ARGV[3]) end
return 1
""",
)
# KEYS: fence, orders, states, manifests, stamps. ARGV: the fencing number, the rollout.
_FORGET: Final = StoreScript(
    "forget",
    """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
for i = 2, 5 do redis.call('HDEL', KEYS[i], ARGV[2]) end
return 1
""",
)
# KEYS: orders, states, manifests or stamps. Returns the names of rollouts, each followed by what there is of it.
_READ: Final = StoreScript("read", "return redis.call('HGETALL', KEYS[1])")
# KEYS: orders, states, manifests, stamps. ARGV: how many at most, then rollouts that are known, each followed by its
# stamp. Returns the names of all, and of those with another stamp: name, stamp, order, state, manifests.
_CHANGED: Final = StoreScript(
    "changed",
    """
local known, names, found = {}, {}, {}
for i = 2, #ARGV, 2 do known[ARGV[i]] = ARGV[i + 1] end
local stamps = redis.call('HGETALL', KEYS[4])
for i = 1, #stamps, 2 do
  local name = stamps[i]
  names[#names + 1] = name
  if known[name] ~= stamps[i + 1] and #found < 5 * ARGV[1] then
    found[#found + 1] = name
    found[#found + 1] = stamps[i + 1]
    for key = 1, 3 do found[#found + 1] = redis.call('HGET', KEYS[key], name) or '' end
  end
end
return {names, found}
""",
)


class NotConducting(Exception):
    """Another gateway conducts, or none can now; the message says which."""


class RecordedRollout(NamedTuple):
    """One rollout as the store has it; `state` is "" before the first one. `manifests`: of its versions, by digest."""

    id: str
    stamp: str
    order: bytes
    state: bytes
    manifests: Mapping[str, bytes]


class ConductorLease:
    """`async with` tries to get the lease, keeps it, and lets it go at the end.

    Args:
        now: this gateway's own clock.
    """

    def __init__(self, store: SharedStore, gateway: str, now: Callable[[], float] = clock.now) -> None:
        self._now = now
        self._store = store
        self._gateway = gateway
        self._keys = [store.key("rollouts", kind) for kind in ("fence", "orders", "states", "manifests", "stamps")]
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

    @property
    def was_own(self) -> bool:
        """Whether this gateway had it when the store was last asked."""
        return self.conductor == self._gateway

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

    async def record(
        self, id: str, *, order: bytes = b"", state: bytes = b"", manifests: Mapping[str, bytes] | None = None
    ) -> None:
        """Record what is given of a rollout. Raises NotConducting: nothing was recorded, or it is not known."""
        if len(order) > MAX_ORDER_BYTES:
            raise NotConducting(f"the order has {len(order)} bytes; gateways share at most {MAX_ORDER_BYTES}")
        described = msgspec.msgpack.encode(manifests) if manifests else b""
        packed = [zlib.compress(one, 1) if one else b"" for one in (order, described)]
        await self._as_conductor(_RECORD, [id, KEPT_MS, packed[0], state, packed[1]])

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

    async def manifests(self) -> Mapping[str, Mapping[str, bytes]]:
        """By rollout: the manifests of its versions, by digest. Raises StoreUnavailable."""
        found = _pairs(await self._store.run(_READ, [self._keys[3]], []))
        return {id: _manifests(one) for id, one in found.items()}

    async def stamped(self) -> Collection[str]:
        """The rollouts that others can follow: older versions left no stamps. Raises StoreUnavailable."""
        return _pairs(await self._store.run(_READ, [self._keys[4]], [])).keys()

    async def changed(self, known: Mapping[str, str]) -> tuple[list[str], list[RecordedRollout]]:
        """The names of all rollouts, and READ_AT_ONCE at most that have another stamp. Raises StoreUnavailable.

        Args:
            known: the stamps of those that were read before.
        """
        pairs = [word for pair in known.items() for word in pair]
        names, flat = await self._store.run(_CHANGED, self._keys[1:], [READ_AT_ONCE, *pairs])
        rows = [[bytes(one) for one in flat[at : at + 5]] for at in range(0, len(flat), 5)]
        return [_text(name) for name in names], [
            RecordedRollout(_text(id), _text(stamp), _unpacked(order), state, _manifests(packed))
            for id, stamp, order, state, packed in rows
        ]

    def __repr__(self) -> str:
        return f"<ConductorLease of {self.conductor or 'none'}, fence {self.fence}>"


def _text(raw: bytes) -> str:
    return bytes(raw).decode(errors="replace")


def _pairs(flat: list[bytes]) -> dict[str, bytes]:
    return {_text(name): bytes(one) for name, one in zip(flat[::2], flat[1::2], strict=True)}


def _unpacked(packed: bytes) -> bytes:
    """No more than an order may have, and "" of what is none: what lies in a store is not believed either."""
    try:
        return zlib.decompressobj().decompress(packed, MAX_ORDER_BYTES)
    except zlib.error:
        return b""


def _manifests(packed: bytes) -> Mapping[str, bytes]:
    try:
        return msgspec.msgpack.decode(_unpacked(packed), type=dict[str, bytes]) if packed else {}
    except (msgspec.MsgspecError, UnicodeError):
        return {}
