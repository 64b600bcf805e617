"""The ingest receiver takes stored items of devices, each once, and acknowledges them after they are on the disk.

    message → checked → a batch → one transaction → a receipt for each device

Items of one key are taken in the order in which they come. To keep that order when the disk fails in between, messages
of a device that was asked to pause are ignored for a moment: what is still on its way is sent again, in order.

Messages wait in a bounded queue, at most MAX_OF_ONE of one device, so that a flood of one device costs the others
nothing; a message without room is dropped, gets no receipt, and is sent again. While the disk is full or broken,
devices are asked to pause (`busy_s`), and keep their items.

With a store that gateways share (`shared_items.py`) an item is acknowledged when it is there too, so that another
gateway goes on with it if this one dies. While the store is away, the disk is enough, as without one; what is
unfinished is copied when the store is back (`_compare`).

Stored items are historical by definition: no average of live traffic counts them. Deferred requests are computed by
`deferred.py`; their answers are sent as soon as they exist, and again to a device that inquires.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import structlog

from gateway.ingest.journal import SCHEMA, DeferredJob, IngestJournal, no_right
from gateway.ingest.shared_items import BEAT_S, DEAD_S, MAX_WHOLE_BYTES, SharedItem, SharedItems
from gateway.store.shared_store import StoreUnavailable
from tidegate import clock
from tidegate.fleet.messages import BadMessage
from tidegate.fleet.stored import (
    MAX_IDS,
    MAX_MESSAGE_BYTES,
    DeferredAnswer,
    Forwarded,
    Inquiry,
    ItemRefusal,
    Receipt,
    decode_stored,
)
from tidegate.runtime.owned_task import OwnedTask
from tidegate.storage.database import Database, DatabaseUnavailable

MAX_QUEUED: Final = 4096
MAX_OF_ONE: Final = 64
MAX_BATCH: Final = 64
BUSY_S: Final = 15.0
SWEEP_S: Final = 300.0
_NEXT_SWEEP_S: Final = 1.0
_ROOM: Final = MAX_MESSAGE_BYTES - 2048  # bytes of answers in one receipt, base64 included
_PAGE_BYTES: Final = 4096
_OVERHEAD: Final = 3

Send = Callable[[str, Receipt], bool]  # to a device; False: there is no session with the broker
_Names = set[tuple[str, str]]  # of items: (device, id)

log = structlog.get_logger(__name__)


class Ingest:
    """Takes stored items inside `async with`.

    Args:
        path: the database file.
        gateway: this gateway's name, which receipts carry.
        max_bytes: bytes of deferred requests, answers and records.
        max_seen: how many ids are remembered against duplicates.
        right_of: the highest priority that a device's requests may have against those of other devices.
        shared: what the gateways have in a store; None: each item has one gateway for good.
    """

    def __init__(
        self,
        path: Path,
        gateway: str,
        *,
        max_bytes: int,
        max_seen: int,
        right_of: Callable[[str], int] = no_right,
        shared: SharedItems | None = None,
    ) -> None:
        self.shared = shared
        self.taken_over = 0  # items of gateways that died
        self._differs = True  # whether the store may lack something of this gateway's, or have something it lacks
        self._read_until = 0  # the last record that an operator's program has read
        self._sharing = OwnedTask(self._share, name="shared items", crash_means="items are on this disk alone")
        self.journal = IngestJournal(
            max_bytes=max_bytes, max_seen=max_seen, kept_for_answers=max_bytes // 2, right_of=right_of
        )
        self._began = (0.0, 0.0)  # the same instant by the steady clock of the journal, and of this process
        self.send: Send = lambda _device, _receipt: False  # set by the session with the broker
        self.dropped: Counter[str] = Counter()  # messages that were not taken, by reason
        self.work = asyncio.Event()  # set when a deferred request may be due; the deferred worker clears it
        self._gateway = gateway
        self._queue: deque[tuple[str, Forwarded | Inquiry]] = deque()
        self._of_one: Counter[str] = Counter()
        self._paused_until: dict[str, float] = {}
        self._news = asyncio.Event()
        self._sweep_at = 0.0
        self._task = OwnedTask(self._run, name="ingest")
        max_pages = max(256, _OVERHEAD * (max_bytes + 200 * max_seen) // _PAGE_BYTES)
        self._database = Database(path, SCHEMA, max_pages=max_pages)

    async def __aenter__(self) -> Self:
        await self._database.__aenter__()
        utc_s, now = clock.utc_s(), clock.now()
        try:
            self._began = await self._database.run(lambda db: self.journal.resume(db, utc_s)), now
        except (DatabaseUnavailable, sqlite3.Error):  # the database has logged it
            self._began = utc_s, now
        self._task.start()
        if self.shared is not None:
            self._sharing.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._sharing.aclose()
        await self._task.aclose()
        now_s, utc_s = self._now_s(), clock.utc_s()
        with suppress(DatabaseUnavailable, sqlite3.Error):
            await self._database.run(lambda db: self.journal.keep_time(db, now_s, utc_s))
        await self._database.__aexit__()

    def _now_s(self) -> float:
        """The journal's steady clock, which setting the wall clock does not move."""
        steady_s, began = self._began
        return steady_s + clock.now() - began

    def message(self, device: str, payload: bytes) -> None:
        """Queue one message of a device. Its topic names the device, and the broker's ACL enforces that."""
        try:
            message = decode_stored(payload)
            if message.device != device:
                raise BadMessage(f"{device} speaks for {message.device}")
        except BadMessage as error:
            self.dropped["bad"] += 1
            log.info("ignored a stored message of a device", device=device, reason=str(error))
            return
        if clock.now() < self._paused_until.get(device, 0.0):
            self.dropped["unavailable"] += 1
            return
        if len(self._queue) >= MAX_QUEUED or self._of_one[device] >= MAX_OF_ONE:
            self.dropped["flood"] += 1
            return
        self._queue.append((device, message))
        self._of_one[device] += 1
        self._news.set()

    async def _run(self) -> None:
        while True:
            self._news.clear()
            batch = [self._queue.popleft() for _ in range(min(MAX_BATCH, len(self._queue)))]
            for device, _ in batch:
                self._of_one[device] -= 1
            self._of_one += Counter()  # drops counts of zero
            try:
                await self._take(batch)
                await self._sweep()
            except Exception:
                log.exception("ingest failed by a defect; devices keep their items")
            if not self._queue:
                await self._pause()

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(max(0.0, self._sweep_at - clock.now())):
                await self._news.wait()
        except TimeoutError:
            pass

    async def _take(self, batch: Sequence[tuple[str, Forwarded | Inquiry]]) -> None:
        if not batch:
            return
        claimed, elsewhere = await self._claim([message for _, message in batch if isinstance(message, Forwarded)])
        outcomes = await asyncio.gather(*(self._one(message, elsewhere) for _, message in batch))
        await self._release(batch, outcomes, claimed)
        by_device: dict[str, list[_MessageOutcome]] = {}
        for (device, _), outcome in zip(batch, outcomes, strict=True):
            by_device.setdefault(device, []).append(outcome)
        now = clock.now()
        self._paused_until = {device: at for device, at in self._paused_until.items() if at > now}
        for device, of_device in by_device.items():
            if any(outcome.busy_s for outcome in of_device):
                self._paused_until[device] = now + BUSY_S / 2
            for receipt in _receipts(self._gateway, of_device):
                self.send(device, receipt)
        if any(isinstance(message, Forwarded) and message.kind == "request" for _, message in batch):
            self.work.set()

    async def _claim(self, items: Sequence[Forwarded]) -> tuple[_Names, _Names]:
        """Put new items into the store; return those that this put there, and those that another gateway has."""
        claimed: _Names = set()
        elsewhere: _Names = set()
        if self.shared is None or not items:
            return claimed, elsewhere
        names = [(one.device, one.id) for one in items]
        try:
            known = await self._database.run(lambda db: self.journal.known(db, names))
            new = [one for one in items if (one.device, one.id) not in known]
            utc_s = clock.utc_s()
            answers = await self.shared.claim([SharedItem(one, utc_s) for one in new]) if new else []
        except (StoreUnavailable, DatabaseUnavailable, sqlite3.Error):
            # The store may lack what is taken now; a disk that fails is told to the devices.
            self._differs = True
            return claimed, elsewhere
        for one, (owner, held) in zip(new, answers, strict=True):
            self.dropped["unshared"] += not held
            if owner:
                elsewhere.add((one.device, one.id))
            elif held:
                claimed.add((one.device, one.id))
        return claimed, elsewhere

    async def _release(
        self, batch: Sequence[tuple[str, Forwarded | Inquiry]], outcomes: Sequence[_MessageOutcome], claimed: _Names
    ) -> None:
        """Take out of the store what was put there and not taken here.

        An item that was sent again and met a full disk stays: this gateway has acknowledged it before.
        """
        if self.shared is None:
            return
        told = [(one, outcome) for (_, one), outcome in zip(batch, outcomes, strict=True) if isinstance(one, Forwarded)]
        taken = {(one.device, one.id) for one, outcome in told if outcome.taken}  # one may be in a batch twice
        failed = [one for one, _ in told if (one.device, one.id) in claimed - taken]
        if failed:
            try:
                await self.shared.release(failed)
            except StoreUnavailable:
                self._differs = True

    async def _one(self, message: Forwarded | Inquiry, elsewhere: _Names) -> _MessageOutcome:
        # One after another in one transaction: `Database` groups what waits.
        now_s, utc_s = self._now_s(), clock.utc_s()
        try:
            if isinstance(message, Inquiry):
                answers, unknown = await self._database.run(
                    lambda db: self.journal.asked(db, message.device, message.ids)
                )
                if unknown and self.shared is not None:
                    more, unknown = await self._asked_of_all(message.device, unknown)
                    answers += more
                return _MessageOutcome(answers=answers, unknown=unknown)
            if (message.device, message.id) in elsewhere:
                return _MessageOutcome(taken=message.id)
            refusal = await self._database.run(lambda db: self.journal.take(db, message, now_s, utc_s))
        except (DatabaseUnavailable, sqlite3.Error) as error:
            self.dropped["unavailable"] += 1
            log.warning("devices are asked to keep their items", reason=str(error))
            return _MessageOutcome(busy_s=BUSY_S)
        return _MessageOutcome(taken=message.id) if refusal is None else _MessageOutcome(refusal=refusal)

    async def _asked_of_all(self, device: str, ids: Sequence[str]) -> tuple[list[DeferredAnswer], list[str]]:
        """What the store knows of ids that are unknown here; while it is away, nothing is said of them."""
        assert self.shared is not None
        try:
            return await self.shared.asked(device, ids)
        except StoreUnavailable:
            return [], []

    # what gateways share

    async def _share(self) -> None:
        assert self.shared is not None
        steady_since: float | None = None
        while True:
            try:
                marked, dead = await self.shared.beat(marked=not self._differs)
                steady_since = clock.now() if steady_since is None else steady_since
                if self._differs or not marked:
                    await self._compare()
                await self._forget_what_was_read()
                if clock.now() - steady_since > DEAD_S + BEAT_S:
                    for gateway in dead:
                        await self._take_over(gateway)
            except StoreUnavailable:
                steady_since, self._differs = None, True
            except (DatabaseUnavailable, sqlite3.Error):
                self._differs = True  # the database has logged it
            except Exception:
                log.exception("what gateways share of devices' items cannot be compared")
            await clock.sleep(BEAT_S)

    async def _take_over(self, gateway: str) -> None:
        assert self.shared is not None
        count = 0
        while items := await self.shared.adopt(gateway):
            count += len(items)
            await self._adopt(items)
        if count:
            self.taken_over += count
            log.warning("took over what a gateway had taken of devices", gateway=gateway, items=count)
            self.work.set()

    async def _adopt(self, items: Sequence[SharedItem]) -> None:
        """Store items that the store says are this gateway's; one for which there is no room is tried again."""
        now_s, utc_s = self._now_s(), clock.utc_s()
        for one in items:
            try:
                refusal = await self._database.run(partial(self.journal.adopt, one=one, now_s=now_s, utc_s=utc_s))
            except DatabaseUnavailable:
                self._differs = True
                continue
            if refusal is not None:
                log.warning("an item is too old to be taken over", device=one.item.device, id=one.item.id)

    async def _compare(self) -> None:
        """Make the store and this disk agree: on what is unfinished, and on whose it is."""
        assert self.shared is not None
        self._differs = False  # before the awaits: what differs meanwhile is compared the next time
        after = (0, 0)
        while True:
            utc_s = clock.utc_s()
            items, after = await self._database.run(
                partial(self.journal.unfinished, utc_s=utc_s, after=after, limit=MAX_BATCH)
            )
            if not items:
                break
            open_items = [one for one in items if one.answer is None]
            owners = [owner for owner, _ in await self.shared.claim(open_items)] if open_items else []
            for one in items:
                if one.answer is not None:
                    open_items.append(one)
                    owners.append(await self.shared.finish(one))
            for one, owner in zip(open_items, owners, strict=True):
                if owner:
                    await self._drop(one.item.device, one.item.id, owner)
        cursor, first = 0, True
        while first or cursor:
            first = False
            cursor, items = await self.shared.page(cursor)
            names = [(one.item.device, one.item.id) for one in items]
            known = await self._database.run(partial(self.journal.known, items=names))
            # What had been given over and is under this gateway's name has come back to it.
            known -= await self._database.run(partial(self.journal.given_over, items=names))
            await self._adopt([one for one in items if (one.item.device, one.item.id) not in known])
            over = [
                (device, id)
                for device, id in known
                if not await self._database.run(partial(self.journal.is_unfinished, device=device, id=id))
            ]
            if over:
                await self.shared.done(over)
        self.work.set()

    async def _drop(self, device: str, id: str, owner: str) -> None:
        log.info("another gateway goes on with an item", device=device, id=id, gateway=owner)
        await self._database.run(lambda db: self.journal.drop(db, device, id))

    async def _forget_what_was_read(self) -> None:
        assert self.shared is not None
        while self._read_until:
            until = self._read_until
            read = await self._database.run(partial(self.journal.read_until, seq=until, limit=MAX_BATCH))
            if read:
                await self.shared.done(read)
            if len(read) < MAX_BATCH:
                self._read_until = 0 if self._read_until == until else self._read_until
                return

    async def _sweep(self) -> None:
        if clock.now() < self._sweep_at:
            return
        self._sweep_at = clock.now() + SWEEP_S
        now_s, utc_s = self._now_s(), clock.utc_s()
        try:
            more = await self._database.run(lambda db: self.journal.sweep(db, now_s, utc_s))
        except DatabaseUnavailable:
            return  # the database has logged it
        if more:  # a busy fleet's ids expire faster than one sweep in five minutes deletes; items wait for each
            self._sweep_at = clock.now() + _NEXT_SWEEP_S

    # for `deferred.py`

    async def jobs(self, limit: int, without: frozenset[int]) -> list[DeferredJob]:
        now_s = self._now_s()
        return await self._database.run(lambda db: self.journal.jobs(db, now_s, limit, without))

    async def due_in_s(self) -> float | None:
        """Return the time until the next deferred request is due; None: there is none."""
        at_s = await self._database.run(self.journal.next_due_s)
        return None if at_s is None else max(0.0, at_s - self._now_s())

    def age_s(self, job: DeferredJob) -> float:
        """Return for how long this gateway has had a deferred request, by the time in which it ran."""
        return self._now_s() - job.taken_s

    async def postpone(self, job: DeferredJob, for_s: float) -> None:
        until_s = self._now_s() + for_s
        await self._database.run(lambda db: self.journal.postpone(db, job, until_s))

    async def answered(
        self, job: DeferredJob, answer: DeferredAnswer, *, variant: str = "", whole: bytes = b""
    ) -> None:
        """Store the answer, then send it to the device, which inquires if it does not arrive.

        Of a job that another gateway has taken over in the meantime, the answer is that gateway's to give.
        """
        if self.shared is not None and not await self._is_to_answer(job, answer, variant, whole):
            return
        now_s, utc_s = self._now_s(), clock.utc_s()
        await self._database.run(lambda db: self.journal.answer(db, job, answer, variant, whole, now_s, utc_s))
        self.send(job.device, Receipt(self._gateway, answers=(answer,)))

    async def _is_to_answer(self, job: DeferredJob, answer: DeferredAnswer, variant: str, whole: bytes) -> bool:
        assert self.shared is not None
        of = Forwarded(job.device, job.id, "request", 0, b"", model=job.model, version=job.version, variant=job.variant)
        try:
            item = SharedItem(of, clock.utc_s(), answer, variant, whole[:MAX_WHOLE_BYTES])
            owner = await self.shared.finish(item)
        except StoreUnavailable:
            self._differs = True
            return True
        if owner:
            await self._drop(job.device, job.id, owner)
        return not owner

    # for operators

    async def records(self, after: int, limit: int) -> list[sqlite3.Row]:
        """Return records after a number; those up to it have been read. Raises DatabaseUnavailable."""
        self._read_until = max(self._read_until, after)
        return await self._database.run(lambda db: self.journal.records(db, after, limit))

    async def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"unavailable": self._database.unavailable, "dropped": dict(self.dropped)}
        if self.shared is not None:
            state["taken_over"] = self.taken_over
        try:
            return state | await self._database.run(self.journal.usage)
        except DatabaseUnavailable:
            return state

    def __repr__(self) -> str:
        return f"<Ingest {len(self._queue)} waiting, {self._database!r}>"


class _MessageOutcome:
    """What the receipt says of one message."""

    __slots__ = ("answers", "busy_s", "refusal", "taken", "unknown")

    def __init__(
        self,
        *,
        taken: str = "",
        refusal: ItemRefusal | None = None,
        answers: Sequence[DeferredAnswer] = (),
        unknown: Sequence[str] = (),
        busy_s: float = 0.0,
    ) -> None:
        self.taken = taken
        self.refusal = refusal
        self.answers = answers
        self.unknown = unknown
        self.busy_s = busy_s


def _receipts(gateway: str, outcomes: Sequence[_MessageOutcome]) -> list[Receipt]:
    """Return one receipt for all outcomes of a device, and as many more as its answers need."""
    taken = tuple(one.taken for one in outcomes if one.taken)
    refused = tuple(one.refusal for one in outcomes if one.refusal is not None)
    unknown = tuple(dict.fromkeys(id for one in outcomes for id in one.unknown))[:MAX_IDS]
    busy_s = max((one.busy_s for one in outcomes), default=0.0)
    receipts = []
    if taken or refused or unknown or busy_s:
        receipts.append(Receipt(gateway, taken, refused, unknown=unknown, busy_s=busy_s))
    together: list[DeferredAnswer] = []
    room = _ROOM
    for answer in {answer.id: answer for one in outcomes for answer in one.answers}.values():
        size = 4 * len(answer.body) // 3 + 4 * len(answer.why) + 256
        if together and (size > room or len(together) == MAX_IDS):
            receipts.append(Receipt(gateway, answers=tuple(together)))
            together, room = [], _ROOM
        together.append(answer)
        room -= size
    if together:
        receipts.append(Receipt(gateway, answers=tuple(together)))
    return receipts
