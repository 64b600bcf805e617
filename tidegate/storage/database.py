"""`Database` runs all work on one SQLite file in one thread; work that is reported as done is on the disk.

SQLite waits for the disk, so it never runs on the loop that serves requests. All work for a file is done by one thread
of its own, in order: `await database.run(work)` gives `work` the connection and returns what it returned, after the
COMMIT. Work that piled up meanwhile shares one transaction and thus one wait for the disk (group commit); each piece
has a savepoint, so that one that raises undoes itself and nothing of the others.

    WAL, synchronous=FULL: a COMMIT that returned survives a power cut      busy_timeout: a command can read meanwhile

What can go wrong with a disk, and what is done about it:

    corrupt        moved aside as `NAME.corrupt-N` with its WAL, logged, and begun anew; the current work fails
    full           the work that found no room fails with `DatabaseFull` and has changed nothing; other work is done
    not writable   `DatabaseUnavailable` with the reason; tried again after RETRY_S

The file is its owner's alone (0600, -wal and -shm too): requests and answers lie in it.

None of these ends the process: callers get an exception, and decide what they report to their own callers. A caller
that is cancelled while it waits does not undo its work.

Source: sqlite.org/wal.html, sqlite.org/pragma.html#pragma_synchronous; NanoMQ #2432 (messages deleted that were not
acknowledged).
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, TypeVar

import structlog

from tidegate import clock

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

MAX_WAITING: Final = 512
MAX_GROUP: Final = 64
RETRY_S: Final = 5.0
_CORRUPT: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_OF_THE_DISK: Final = (
    *_CORRUPT, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_PERM, sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_INTERNAL,
)  # fmt: skip
_NOT_OPEN: Final = "it is not open"
_MOST_MOVED_ASIDE: Final = 3  # a disk that corrupts again and again is not filled with the remains

log = structlog.get_logger(__name__)


class DatabaseUnavailable(Exception):
    """The database cannot store now; the message says why."""


class DatabaseFull(DatabaseUnavailable):
    """The disk, or the part of it that may be used, is full."""


class _QueuedTransaction(NamedTuple):
    work: Work[Any]
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Any]


def connect(path: Path, schema: Sequence[str], *, max_pages: int = 0) -> sqlite3.Connection:
    """An open connection, the schema in place. Blocks. Raises sqlite3.Error or OSError.

    Args:
        path: `:memory:`, which is no file, for one that ends with its connection.
        max_pages: of 4 KiB, that the file may have; 0: no limit.
    """
    if str(path) != ":memory:":
        path.parent.mkdir(parents=True, exist_ok=True)
        _make_private(path)
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
    try:
        connection.row_factory = sqlite3.Row
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "journal_size_limit=4194304"):
            connection.execute(f"PRAGMA {pragma}").fetchall()
        found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise _corrupt(found)
        if max_pages:
            connection.execute(f"PRAGMA max_page_count={max_pages:d}").fetchall()
        for statement in schema:
            connection.execute(statement)
    except BaseException:
        connection.close()
        raise
    return connection


def _make_private(path: Path) -> None:
    """Let the file be for its owner alone, whatever the umask; SQLite gives its mode to the -wal and -shm of it.

    A file that is there is changed by its name: to close a descriptor of it would end the locks that other connections
    of this process hold (POSIX).
    """
    if not path.exists():
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    for one in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        with suppress(OSError):  # not there, or of another account; what matters SQLite says when it opens it
            found = one.stat()
            if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) & 0o077:
                one.chmod(0o600)


class Database:
    """Open inside `async with`, which never fails because of the disk: `run` raises what is wrong with it.

    Args:
        schema: statements that are right for a new file and for one that has them already.
        on_moved_aside: called in the thread, with the new name of a file that was corrupt.
    """

    def __init__(
        self,
        path: Path,
        schema: Sequence[str],
        *,
        max_pages: int = 0,
        on_moved_aside: Callable[[Path], None] = lambda _: None,
    ) -> None:
        self.path = path
        self.unavailable = _NOT_OPEN  # why; "" while it works
        self._schema = tuple(schema)
        self._max_pages = max_pages
        self._on_moved_aside = on_moved_aside
        self._jobs: deque[_QueuedTransaction] = deque()
        self._wanted = threading.Condition()
        self._ending = False
        self._connection: sqlite3.Connection | None = None
        self._open_again_at = 0.0
        self._thread: threading.Thread | None = None

    async def __aenter__(self) -> Self:
        self._ending = False
        self._thread = threading.Thread(target=self._live, name=f"database {self.path.name}", daemon=True)
        self._thread.start()
        with suppress(DatabaseUnavailable):  # logged, and raised by the next `run`
            await self.run(lambda _connection: None)
        return self

    async def __aexit__(self, *_: object) -> None:
        with self._wanted:
            self._ending = True
            self._wanted.notify()
        assert self._thread is not None
        await asyncio.shield(asyncio.to_thread(self._thread.join))

    async def run(self, work: Work[T]) -> T:
        """What `work` returns, once it is on the disk.

        Raises:
            DatabaseFull, DatabaseUnavailable: nothing was changed.
            Exception: whatever `work` raised; nothing was changed.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        with self._wanted:
            if self._ending or self._thread is None:
                raise DatabaseUnavailable(f"{self.path}: it is closed")
            if len(self._jobs) >= MAX_WAITING:
                raise DatabaseUnavailable(f"{self.path}: {MAX_WAITING} operations wait for the disk")
            self._jobs.append(_QueuedTransaction(work, loop, answer))
            self._wanted.notify()
        return await answer

    # in the thread

    def _live(self) -> None:
        while True:
            with self._wanted:
                while not self._jobs and not self._ending:
                    self._wanted.wait()
                group = [self._jobs.popleft() for _ in range(min(len(self._jobs), MAX_GROUP))]
            if not group:
                break
            self._do(group)
        if self._connection is not None:
            self._connection.close()

    def _do(self, group: list[_QueuedTransaction]) -> None:
        outcomes: list[tuple[_QueuedTransaction, Any, BaseException | None]]
        try:
            connection = self._opened()
            outcomes = self._in_transactions(connection, group)
        except (sqlite3.Error, OSError, DatabaseUnavailable) as error:
            failure = self._understood(error)
            outcomes = [(job, None, failure) for job in group]
        except Exception as error:  # a defect must not leave the callers waiting
            log.exception("work on a database has a defect", path=str(self.path))
            outcomes = [(job, None, error) for job in group]
        for job, result, failed in outcomes:
            with suppress(RuntimeError):  # the loop has ended, and the callers with it
                job.loop.call_soon_threadsafe(_settle, job.answer, result, failed)

    def _in_transactions(
        self, connection: sqlite3.Connection, group: list[_QueuedTransaction]
    ) -> list[tuple[_QueuedTransaction, Any, BaseException | None]]:
        """Do the group in one transaction, or each for itself if there is no room for all. Raises sqlite3.Error."""
        try:
            return _in_one_transaction(connection, group)
        except sqlite3.Error as error:
            if len(group) == 1 or not _is_full(error):
                raise
        outcomes = []
        for number, job in enumerate(group):
            try:
                outcomes += _in_one_transaction(connection, [job])
            except sqlite3.Error as error:
                failure = self._understood(error)
                if not _is_full(error):  # the connection is gone; what was done before is on the disk
                    return [*outcomes, *((left, None, failure) for left in group[number:])]
                outcomes.append((job, None, failure))
        return outcomes

    def _opened(self) -> sqlite3.Connection:
        if self._connection is None:
            if self.unavailable and clock.now() < self._open_again_at:
                raise DatabaseUnavailable(f"{self.path}: {self.unavailable}")
            try:
                self._connection = self._connected()
            finally:
                self._open_again_at = clock.now() + RETRY_S
            if self.unavailable not in ("", _NOT_OPEN):
                log.info("it can be stored again", path=str(self.path))
            self.unavailable = ""
        return self._connection

    def _connected(self) -> sqlite3.Connection:
        try:
            return connect(self.path, self._schema, max_pages=self._max_pages)
        except sqlite3.DatabaseError as error:
            if not _is_corrupt(error):
                raise
            self._move_aside(error)
            return connect(self.path, self._schema, max_pages=self._max_pages)

    def _understood(self, error: Exception) -> DatabaseUnavailable:
        if isinstance(error, DatabaseUnavailable):
            return error
        if _is_full(error):
            return DatabaseFull(f"{self.path}: there is no room left for it")
        self._close()
        if isinstance(error, sqlite3.DatabaseError) and _is_corrupt(error):
            try:
                self._move_aside(error)
                self._open_again_at = 0.0
            except OSError as other:
                error = other
        words = str(error) or type(error).__name__
        if self.unavailable != words:
            log.error("nothing can be stored", path=str(self.path), reason=words)
        self.unavailable = words
        return DatabaseUnavailable(f"{self.path}: {words}")

    def _move_aside(self, error: Exception) -> None:
        taken = sorted(self.path.parent.glob(f"{self.path.name}.corrupt-*[0-9]"))
        number = max((int(one.name.rpartition("-")[2]) for one in taken), default=0) + 1
        aside = self.path.with_name(f"{self.path.name}.corrupt-{number}")
        for suffix in ("-wal", "-shm"):
            with suppress(FileNotFoundError):
                Path(f"{self.path}{suffix}").replace(f"{aside}{suffix}")
        self.path.replace(aside)
        for old in taken[: max(0, len(taken) + 1 - _MOST_MOVED_ASIDE)]:
            for suffix in ("", "-wal", "-shm"):
                Path(f"{old}{suffix}").unlink(missing_ok=True)
        log.error("a database was corrupt: moved aside, and begun anew", moved_to=str(aside), reason=str(error))
        self._on_moved_aside(aside)

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()

    def __repr__(self) -> str:
        return f"<Database {self.path} {self.unavailable or 'open'}, {len(self._jobs)} waiting>"


def transact(connection: sqlite3.Connection, work: Work[T]) -> T:
    """Return what `work` returns, in a transaction of its own; for commands, which own no thread."""
    ((_, result, failed),) = _attempts(connection, [work])
    if failed is not None:
        raise failed
    found: T = result
    return found


def _in_one_transaction(
    connection: sqlite3.Connection, group: list[_QueuedTransaction]
) -> list[tuple[_QueuedTransaction, Any, BaseException | None]]:
    done = _attempts(connection, [job.work for job in group])
    return [(job, result, failed) for job, (_, result, failed) in zip(group, done, strict=True)]


def _attempts(
    connection: sqlite3.Connection, works: Sequence[Work[Any]]
) -> list[tuple[Work[Any], Any, BaseException | None]]:
    """Every work's outcome. Raises sqlite3.Error where the disk failed: then nothing was changed by any.

    An error that SQLite does not blame on the disk (a limit, a type, a missing table) is that of the work which met it.
    """
    done: list[tuple[Work[Any], Any, BaseException | None]] = []
    connection.execute("BEGIN IMMEDIATE")
    try:
        for work in works:
            connection.execute("SAVEPOINT one")
            try:
                done.append((work, work(connection), None))
            except sqlite3.Error as error:
                if _code(error) in _OF_THE_DISK or not connection.in_transaction:
                    raise
                connection.execute("ROLLBACK TO one")
                done.append((work, None, error))
            except Exception as error:
                connection.execute("ROLLBACK TO one")
                done.append((work, None, error))
            connection.execute("RELEASE one")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
        raise
    return done


def _settle(answer: asyncio.Future[Any], result: Any, failed: BaseException | None) -> None:
    if answer.done():
        return
    if failed is not None:
        answer.set_exception(failed)
    else:
        answer.set_result(result)


def _is_full(error: Exception) -> bool:
    return _code(error) == sqlite3.SQLITE_FULL or "disk is full" in str(error)


def _is_corrupt(error: Exception) -> bool:
    return _code(error) in _CORRUPT


def _code(error: Exception) -> int:
    """SQLite's primary result code; 0 for other errors."""
    return int(getattr(error, "sqlite_errorcode", None) or 0) & 0xFF


def _corrupt(words: str) -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError(words)
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error
