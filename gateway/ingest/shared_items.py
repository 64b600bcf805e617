"""Shared items are what a gateway has taken of devices and not finished, kept in the store for the case that it dies.

A gateway acknowledges an item when it is on its own disk *and* in the store, so that another gateway can go on with it:

    owner:DEVICE/ID     which gateway has the item; what a second one is sent again is a duplicate for it
    items:GATEWAY       deferred requests until they are answered; results, events and answers until they are read
    answer:DEVICE/ID    what became of a deferred request, which any gateway may tell the device
    gateways            when each gateway was last heard, by the store's clock

A gateway that was not heard for DEAD_S is dead, and another one moves its items to itself: owner and item in one step,
a few at a time. Ownership decides from then on. A gateway that comes back, or was only stopped, finds that an item has
another owner when it would answer it or when it compares (`Ingest`), and lets it go: nothing is answered or recorded by
two. An item whose move ended with the mover's own death lies under the mover's name, which finds it when it is back, or
is taken over itself.

Nobody takes anything over before it has been heard for DEAD_S itself without a break: after a store that was away, all
seem to be dead.

What the store does not hold (it was away, flushed, full, or has MOST_ITEMS of this gateway) is on the disk alone, as
without a store, and is copied when it can be. Every key expires after a week.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import structlog

from gateway.store.shared_store import SharedStore, StoreCall, StoreScript
from tidegate.fleet.stored import DeferredAnswer, Forwarded

BEAT_S: Final = 2.0
DEAD_S: Final = 10.0
KEPT_MS: Final = 7 * 86_400_000
MOST_ITEMS: Final = 20_000  # of one gateway
MOST_MOVED: Final = 32  # in one step
MAX_WHOLE_BYTES: Final = 2**20  # of an answer's record; a longer one is cut, its answer is not

log = structlog.get_logger(__name__)


class SharedItem(msgspec.Struct, frozen=True, array_like=True):
    """One item, as the store has it.

    at_utc_s: when `item.age_ms` was its age. answer: None while it has none; `variant` and `whole` are its record's.
    """

    item: Forwarded
    at_utc_s: float
    answer: DeferredAnswer | None = None
    variant: str = ""
    whole: bytes = b""


# KEYS: owner, items. ARGV: this gateway, field, item, how long it is kept, how many there are at most.
# Returns the owner, if it is another one, and whether the item is in the store.
_CLAIM: Final = StoreScript(
    "claim",
    """
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return {owner, 1} end
if redis.call('HEXISTS', KEYS[2], ARGV[2]) == 0 and redis.call('HLEN', KEYS[2]) >= tonumber(ARGV[5]) then
  return {'', 0}
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[4])
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return {'', 1}
""",
)
# KEYS: owner, items. ARGV: this gateway, field.
_RELEASE: Final = StoreScript(
    "release",
    """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
  redis.call('HDEL', KEYS[2], ARGV[2])
end
return 1
""",
)
# KEYS: owner, items, answer. ARGV: this gateway, field, item, how long it is kept, answer, how many at most.
_FINISH: Final = StoreScript(
    "finish",
    """
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return owner end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[4])
if ARGV[5] ~= '' then redis.call('SET', KEYS[3], ARGV[5], 'PX', ARGV[4]) end
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return ''
""",
)
# KEYS: items. ARGV: fields.
_DONE: Final = StoreScript("done", "return redis.call('HDEL', KEYS[1], unpack(ARGV))")
# KEYS: owner, answer. Returns the answer, and whether anybody has the item.
_ASKED: Final = StoreScript("asked", "return {redis.call('GET', KEYS[2]) or '', redis.call('EXISTS', KEYS[1])}")
# KEYS: gateways, mark. ARGV: this gateway, dead after, whether to set the mark, how long it is kept.
# Returns whether the mark was there: a store without it was flushed. And which gateways are dead.
_BEAT: Final = StoreScript(
    "beat",
    """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
local marked = redis.call('EXISTS', KEYS[2])
if ARGV[3] == '1' then redis.call('SET', KEYS[2], 1, 'PX', ARGV[4]) end
local dead = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[2], 'LIMIT', 0, 16)
return {marked, dead}
""",
)
# KEYS: gateways, the dead one's items, own items, the dead one's mark: without it, it compares when it is back.
# ARGV: this gateway, the dead one, dead after, how many are moved, how long kept, what owners' keys begin with.
_ADOPT: Final = StoreScript(
    "adopt",
    """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
local heard = redis.call('ZSCORE', KEYS[1], ARGV[2])
if not heard or tonumber(heard) > now - ARGV[3] then return {} end
local moved = {}
local cursor = '0'
repeat
  local page = redis.call('HSCAN', KEYS[2], cursor, 'COUNT', ARGV[4])
  cursor = page[1]
  for at = 1, #page[2], 2 do
    if #moved < 2 * tonumber(ARGV[4]) then
      local field, item = page[2][at], page[2][at + 1]
      redis.call('HSET', KEYS[3], field, item)
      redis.call('HDEL', KEYS[2], field)
      redis.call('SET', ARGV[6] .. field, ARGV[1], 'PX', ARGV[5])
      moved[#moved + 1] = field
      moved[#moved + 1] = item
    end
  end
until cursor == '0' or #moved >= 2 * tonumber(ARGV[4])
redis.call('PEXPIRE', KEYS[3], ARGV[5])
redis.call('DEL', KEYS[4])
if redis.call('HLEN', KEYS[2]) == 0 then redis.call('ZREM', KEYS[1], ARGV[2]) end
return moved
""",
)
# KEYS: items. ARGV: cursor. Returns the next cursor, and fields with their items.
_PAGE: Final = StoreScript("page", "return redis.call('HSCAN', KEYS[1], ARGV[1], 'COUNT', 64)")


class SharedItems:
    """The scripts above, for one gateway. Every method raises StoreUnavailable."""

    def __init__(self, store: SharedStore, gateway: str) -> None:
        self._store = store
        self._gateway = gateway
        self._items = store.key("ingest", "items", gateway)

    async def claim(self, items: Sequence[SharedItem]) -> list[tuple[str, bool]]:
        """Of each: its owner, "" if that is this gateway; and whether the store holds it."""
        calls: list[StoreCall] = [
            (
                [self._owner(one.item), self._items],
                [self._gateway, _field(one.item), msgspec.msgpack.encode(one), KEPT_MS, MOST_ITEMS],
            )
            for one in items
        ]
        answers = await self._store.run_each(_CLAIM, calls)
        return [(bytes(owner).decode(), bool(held)) for owner, held in answers]

    async def release(self, items: Sequence[Forwarded]) -> None:
        """Give up what could not be stored here."""
        calls: list[StoreCall] = [([self._owner(one), self._items], [self._gateway, _field(one)]) for one in items]
        await self._store.run_each(_RELEASE, calls)

    async def finish(self, one: SharedItem) -> str:
        """Note an answer; another owner, if there is one: then the answer is not this gateway's to give."""
        answer = b"" if one.answer is None else msgspec.json.encode(one.answer)
        keys = [self._owner(one.item), self._items, self._key("answer", one.item.device, one.item.id)]
        told = await self._store.run(
            _FINISH, keys, [self._gateway, _field(one.item), msgspec.msgpack.encode(one), KEPT_MS, answer]
        )
        return bytes(told).decode()

    async def done(self, items: Sequence[tuple[str, str]]) -> None:
        """Forget what was read."""
        await self._store.run(_DONE, [self._items], [f"{device}/{id}" for device, id in items])

    async def asked(self, device: str, ids: Sequence[str]) -> tuple[list[DeferredAnswer], list[str]]:
        """Of ids that are not known here: the answers, and the ids that no gateway knows."""
        calls: list[StoreCall] = [([self._key("owner", device, id), self._key("answer", device, id)], []) for id in ids]
        answers, unknown = [], []
        for id, (answer, has_owner) in zip(ids, await self._store.run_each(_ASKED, calls), strict=True):
            if answer:
                answers.append(_answer_decoder.decode(answer))
            elif not has_owner:
                unknown.append(id)
        return answers, unknown

    async def beat(self, *, marked: bool) -> tuple[bool, list[str]]:
        """Say that this gateway lives. Return whether the store holds all that it was given, and the dead gateways.

        Args:
            marked: whether all that is unfinished here has been copied.
        """
        keys = [self._store.key("ingest", "gateways"), self._store.key("ingest", "mark", self._gateway)]
        was_marked, dead = await self._store.run(_BEAT, keys, [self._gateway, DEAD_S, int(marked), KEPT_MS])
        return bool(was_marked), [bytes(name).decode() for name in dead]

    async def adopt(self, dead: str) -> list[SharedItem]:
        """Move some items of a dead gateway to this one; none: there are no more, or it lives."""
        keys = [
            self._store.key("ingest", "gateways"),
            self._store.key("ingest", "items", dead),
            self._items,
            self._store.key("ingest", "mark", dead),
        ]
        owners = self._store.key("ingest", "owner", "")
        moved = await self._store.run(_ADOPT, keys, [self._gateway, dead, DEAD_S, MOST_MOVED, KEPT_MS, owners])
        return _decoded(moved[1::2])

    async def page(self, cursor: int) -> tuple[int, list[SharedItem]]:
        """Some of the items that the store has for this gateway, and where the next ones begin; 0: nowhere."""
        following, pairs = await self._store.run(_PAGE, [self._items], [cursor])
        return int(following), _decoded(pairs[1::2])

    def _owner(self, item: Forwarded) -> str:
        return self._key("owner", item.device, item.id)

    def _key(self, kind: str, device: str, id: str) -> str:
        return self._store.key("ingest", kind, f"{device}/{id}")

    def __repr__(self) -> str:
        return f"<SharedItems of {self._gateway} in {self._store!r}>"


def _field(item: Forwarded) -> str:
    return f"{item.device}/{item.id}"


def _decoded(raw: Sequence[bytes]) -> list[SharedItem]:
    items = []
    for one in raw:
        try:
            items.append(_decoder.decode(one))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.error("an item in the store cannot be read and is left there", reason=str(error))
    return items


_decoder: Final = msgspec.msgpack.Decoder(SharedItem)
_answer_decoder: Final = msgspec.json.Decoder(DeferredAnswer)
