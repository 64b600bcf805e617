"""The shared store is a connection to Redis or Valkey that is allowed to be slow, hung, full, empty or away.

Every use is a script that the store runs whole (Lua), so that what it reads and writes is one step for all gateways. A
call ends within a timeout, whatever the store does. One that fails raises `StoreUnavailable` with the reason, and so do
all that follow at once, without a try, until a pause is over, which doubles from silence to silence (`store_pause.py`).
So a store that hangs costs each user one timeout and not one for each of its calls. A change is logged once.

    away, hung, slow       no answer in time
    full                   it refuses to write (`maxmemory`, a disk that fails): the same as away
    another's password     it refuses to speak: the same, and the reason names it
    flushed, restarted     it answers, and knows nothing: each user puts its own things there again

The files of the password and the certificates are looked at before each try that follows a failure, and the connections
are made anew where one has changed: the package reads them once. So a renewal costs one pause at most, and no restart.

Keys are `tidegate:{FLEET}:…`: the fleets of one store see nothing of each other, and the braces keep a fleet's keys on
one node where the store is a cluster. Each user of the store bounds its keys and lets them expire.

A timed-out call may have been carried out, or may be yet: scripts are made so that this loses a lease, never grants one
twice.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from hashlib import sha1
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import structlog

from gateway.config.store import SharedStoreConfig
from gateway.store.store_pause import StorePause
from tidegate import clock
from tidegate.runtime.process import StartError

if TYPE_CHECKING:
    from redis.asyncio import Redis

_Stamp = tuple[tuple[int, int, int, int], ...]
StoreCall = tuple[Sequence[str], Sequence[str | bytes | int | float]]  # keys, and arguments

MAX_CONNECTIONS: Final = 8

log = structlog.get_logger(__name__)


class StoreUnavailable(Exception):
    """The store does not do what was asked of it now; the message says why."""


class StoreScript:
    """A Lua script, which the store knows by its digest after the first call."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text
        self.sha = sha1(text.encode(), usedforsecurity=False).hexdigest()  # as the protocol wants it

    def __repr__(self) -> str:
        return f"<StoreScript {self.name}>"


class SharedStore:
    """The connection, inside `async with`.

    Args:
        fleet: the namespace of all keys.
        draw: chance, uniform in [0, 1), so that gateways do not come back in step.
    """

    def __init__(self, section: SharedStoreConfig, fleet: str, draw: Callable[[], float]) -> None:
        self._section = section
        self._prefix = f"tidegate:{{{fleet}}}:"
        self._draw = draw
        self._client: Redis | None = None
        self._stamp: _Stamp = ()  # of the files that it was made of
        self._unread = ""  # why these cannot be read now
        self._turns = asyncio.Semaphore(MAX_CONNECTIONS)  # the package refuses what finds no free connection
        self._pause = StorePause()
        self.trouble: str | None = "it was not asked yet"  # None while it answers
        self.away_since: float | None = None

    async def __aenter__(self) -> Self:
        try:
            import redis.asyncio  # noqa: F401  # for its absence to be reported here
        except ImportError as error:
            raise StartError("the section `store` needs the package redis: pip install 'tidegate[redis]'") from error
        try:
            self._stamp = self._stamped()
            for path in self._files():
                await asyncio.to_thread(path.read_bytes)
            self._client = self._made()
        except OSError as error:
            raise StartError(f"the section `store`: cannot read {error.filename}: {error.strerror or error}") from error
        return self

    def _files(self) -> list[Path]:
        section = self._section
        return [path for path in (section.password_file, section.ca, section.cert, section.key) if path is not None]

    def _stamped(self) -> _Stamp:
        """Another one once a file has changed. Raises OSError."""
        stats = [path.stat() for path in self._files()]
        return tuple((one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in stats)

    def _made(self) -> Redis:
        """A client that has connected to nothing yet. Raises OSError where the password cannot be read."""
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        section = self._section
        host, port, database = section.address
        secured: dict[str, Any] = {}
        if section.secure:
            secured = {
                "ssl": True,
                "ssl_cert_reqs": "required",
                "ssl_check_hostname": True,
                "ssl_min_version": ssl.TLSVersion.TLSv1_2,
                "ssl_ca_certs": str(section.ca) if section.ca else None,
                "ssl_certfile": str(section.cert) if section.cert else None,
                "ssl_keyfile": str(section.key) if section.key else None,
            }
        timeout_s = section.timeout_ms / 1e3
        return Redis(
            host=host,
            port=port,
            db=database,
            username=section.username,
            password=section.password(),
            socket_connect_timeout=timeout_s,
            socket_timeout=None,  # `run_each` bounds each call; the package's own timeout may swallow a cancellation
            retry=Retry(NoBackoff(), 0),  # the pauses are here
            max_connections=MAX_CONNECTIONS,
            client_name="tidegate",
            protocol=2,
            **secured,
        )

    async def _renew(self) -> None:
        """Connect with what the files hold now, if that is something else. Files that cannot be read change nothing."""
        try:
            stamp = await asyncio.to_thread(self._stamped)  # a secret's mount may hang
            if stamp == self._stamp:
                return
            client = await asyncio.to_thread(self._made)
        except (OSError, UnicodeDecodeError) as error:
            if self._unread != str(error):
                log.warning("the files of the section `store` cannot be read again; the old ones hold", why=str(error))
            self._unread = str(error)
            return
        if stamp == self._stamp:  # of those that try at once, another one has renewed it meanwhile
            await _close(client)
            return
        old, self._client, self._stamp, self._unread = self._client, client, stamp, ""
        log.info("the store's password or certificates have changed and were read again", store=self.address)
        if old is not None:
            await _close(old)

    async def __aexit__(self, *_: object) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            await _close(client)

    @property
    def address(self) -> str:
        return self._section.public

    def key(self, *parts: str) -> str:
        """The name of a key of this fleet."""
        return self._prefix + ":".join(parts)

    async def run(
        self, script: StoreScript, keys: Sequence[str], arguments: Sequence[str | bytes | int | float]
    ) -> Any:
        """Run one script. Raises StoreUnavailable."""
        return (await self.run_each(script, [(keys, arguments)]))[0]

    async def run_each(self, script: StoreScript, calls: Sequence[StoreCall]) -> list[Any]:
        """Run one script several times, in one round trip. Raises StoreUnavailable; some may have been run then."""
        async with self._turns:  # a wait for a connection is no silence of the store's
            return await self._run_each(script, calls)

    async def _run_each(self, script: StoreScript, calls: Sequence[StoreCall]) -> list[Any]:
        if self._client is None:
            raise StoreUnavailable("the store's connection is closed")
        began_at = clock.now()
        if not self._pause.is_over(began_at):
            raise StoreUnavailable(self.trouble or "the store was away")
        from redis.exceptions import NoScriptError, RedisError

        if self._pause.length_s:  # the last try failed
            await self._renew()
        if (client := self._client) is None:
            raise StoreUnavailable("the store's connection is closed")
        try:
            async with asyncio.timeout(self._section.timeout_ms / 1e3):
                try:
                    answers = await _pipeline(client, script, calls)
                except NoScriptError:  # a store that was restarted or flushed has forgotten it
                    await client.script_load(script.text)
                    answers = await _pipeline(client, script, calls)
        except TimeoutError as error:
            raise self._failed(client, began_at, f"no answer within {self._section.timeout_ms} ms") from error
        except (RedisError, OSError) as error:
            raise self._failed(client, began_at, _reason(error)) from error
        self._answered()
        return answers

    def _failed(self, client: Redis, began_at: float, why: str) -> StoreUnavailable:
        if client is not self._client:
            return StoreUnavailable(why)  # its connection was closed by `_renew`: that says nothing of the store
        if self.trouble is None or not self._pause.length_s:
            log.warning("the store does not answer; quotas are shared without it", store=self.address, reason=why)
        self.trouble = why
        now = clock.now()
        self.away_since = now if self.away_since is None else self.away_since
        self._pause.failed(began_at=began_at, now=now, draw=self._draw())
        return StoreUnavailable(why)

    def _answered(self) -> None:
        if self.trouble is not None:
            log.info("the store answers", store=self.address)
        self.trouble = self.away_since = None
        self._pause.answered()

    def __repr__(self) -> str:
        return f"<SharedStore {self.address} {self.trouble or 'answers'}>"


async def _pipeline(client: Redis, script: StoreScript, calls: Sequence[StoreCall]) -> list[Any]:
    async with client.pipeline(transaction=False) as pipe:
        for keys, arguments in calls:
            pipe.evalsha(script.sha, len(keys), *keys, *arguments)
        return list(await pipe.execute())


async def _close(client: Redis) -> None:
    from redis.exceptions import RedisError

    try:
        async with asyncio.timeout(1.0):
            await client.aclose()
    except (OSError, TimeoutError, RedisError):
        pass


def _reason(error: Exception) -> str:
    """What the store said, without the command that a pipeline's error repeats before it."""
    return str(error).rpartition(" of pipeline caused error: ")[2][:200] or type(error).__name__
