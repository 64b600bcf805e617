"""An issuer's public keys: read from a file, or fetched from the one address that the configuration names.

    unknown key id     fetched again, at most every 30 s over all callers; waiting callers share one fetch, and one
                       that leaves does not abort it
    nothing unknown    fetched again every 10 minutes, in the background, so that a withdrawn key goes
    issuer away        the known keys stay in force; one log line when the outage begins and one when it ends
    a file             read again within a second of a change; a broken file leaves the keys as they are

A fetch is bounded in size and time and follows no redirect. Of a key set, only keys that can verify what the gateway
accepts are taken: RSA of 2048 bits or more, P-256, Ed25519. Symmetric keys are left out, so that a public key can never
be taken for a shared secret.

**A fetch is a task of the key set and not of a caller.** Callers are not identified yet, and the pace counts from where
a fetch begins. If a caller that hangs up took its fetch along, one such caller each 30 s would keep a rotated key
unknown, and valid tokens refused, until the next refresh.

**PyJWT parses each key (`PyJWK`); its `PyJWKClient` and `PyJWKSet` are not used**, because they cannot keep the above:

- `PyJWKClient` fetches with urllib, which blocks the event loop or takes a thread. Its timeout bounds one socket
  operation and not the fetch, the answer is read without a bound in size, and proxies come from the environment.
- Its 30 s between fetches count from the last fetch that succeeded. While the issuer is away every token with an
  unknown key id causes a fetch, and when the cached set has expired (`lifespan`) known keys no longer verify either.
  PyJWT 2.10, the oldest release that is allowed, has no such limit, and follows redirects.
- It has no refresh in the background and no file as its source.
- `PyJWKSet` loses the whole set to one key whose `alg` is no text, and with PyJWT 2.10 to one with bad numbers. It also
  takes private, symmetric and weak keys, so that each would be checked here all the same.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import aiohttp
import structlog
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from jwt import PyJWK
from jwt.exceptions import PyJWTError

from tidegate import clock
from tidegate.config import ConfigError
from tidegate.runtime.followed_file import FollowedFile
from tidegate.runtime.owned_task import OwnedTask, cancel_and_wait

MOST_BYTES: Final = 256 * 1024
MOST_KEYS: Final = 64
WITHIN_S: Final = 5.0
AGAIN_AFTER_S: Final = 30.0
REFRESH_S: Final = 600.0
Keys = Mapping[str, PyJWK]  # by key id; "" for one without

log = structlog.get_logger(__name__)


class JwksError(Exception):
    """The key set could not be fetched, or cannot be used."""


class KeySet:
    """The issuer's keys; `async with` loads them and keeps them fresh until the end."""

    def __init__(
        self, *, file: Path | None = None, url: str | None = None, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._file = FollowedFile(file, _read, self._take, what="the issuer's keys") if file is not None else None
        self._url = url
        self._on_change = on_change
        self._keys: Keys = {}
        self._fetched_at: float | None = None
        self._away = False
        self._session: aiohttp.ClientSession | None = None
        self._fetching: asyncio.Task[None] | None = None
        self._refreshing = OwnedTask(self._refresh, name="jwks")

    async def __aenter__(self) -> KeySet:
        if self._file is not None:
            self._keys = await self._file.__aenter__()
            return self
        # Nothing is decompressed, so that MOST_BYTES bounds the memory as well.
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=WITHIN_S),
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},
        )
        await self._fetch()  # may fail: until it works, tokens are refused and everything else is served
        self._refreshing.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._file is not None:
            await self._file.__aexit__()
        await self._refreshing.aclose()
        session, self._session = self._session, None  # from here on no caller begins a fetch
        if self._fetching is not None:
            await cancel_and_wait(self._fetching)
        if session is not None:
            await session.close()

    async def key(self, id: str) -> PyJWK | None:
        """Return the key of this id, or None; "" means the only key there is. Fetches again if the id is unknown."""
        found = self._found(id)
        if found is not None or not self._may_fetch():
            return found
        await self._wait_for_fetch()
        return self._found(id)

    def _found(self, id: str) -> PyJWK | None:
        if not id and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        return self._keys.get(id)

    def _may_fetch(self) -> bool:
        """Whether a caller may wait for a fetch: one that is under way, or a new one if the pace allows it."""
        if self._session is None:  # the keys are in a file, or this is closed
            return False
        under_way = self._fetching is not None and not self._fetching.done()
        return under_way or self._fetched_at is None or clock.now() >= self._fetched_at + AGAIN_AFTER_S

    def look(self) -> None:
        """Read the file again if it has changed since it was last read."""
        if self._file is not None:
            self._file.look()

    def _take(self, keys: Keys) -> None:
        before, self._keys = self._keys, keys
        if {id: key.key for id, key in before.items()} != {id: key.key for id, key in keys.items()}:
            self._on_change()

    async def _refresh(self) -> None:
        while True:
            await clock.sleep(REFRESH_S)
            try:
                await self._wait_for_fetch()
            except Exception:
                log.exception("the issuer's keys were not refreshed")  # a defect here must not end it for good

    async def _wait_for_fetch(self) -> None:
        """Wait for the fetch that is under way, or for a new one; a waiter that is cancelled does not end the fetch."""
        if self._fetching is None or self._fetching.done():
            self._fetching = asyncio.create_task(self._fetch(), name="fetch of the issuer's keys")
        await asyncio.shield(self._fetching)

    async def _fetch(self) -> None:
        self._fetched_at = clock.now()
        try:
            keys = keys_of(await self._body())
        except (JwksError, aiohttp.ClientError, TimeoutError, OSError) as error:
            if not self._away:
                log.error("the issuer's keys cannot be fetched; the known keys stay", url=self._url, why=str(error))
            self._away = True
            return
        if self._away:
            log.info("the issuer's keys can be fetched again", url=self._url)
        self._away = False
        self._take(keys)

    async def _body(self) -> bytes:
        assert self._session is not None and self._url is not None
        async with self._session.get(self._url, allow_redirects=False) as response:
            if response.status != 200:
                raise JwksError(f"it answers {response.status}")
            body = b""
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > MOST_BYTES:
                    raise JwksError(f"it sends more than {MOST_BYTES} bytes")
            return body

    def __repr__(self) -> str:
        source = self._file.path if self._file is not None else self._url
        return f"<KeySet {source} {len(self._keys)} keys{', away' if self._away else ''}>"


def keys_of(text: bytes) -> Keys:
    """Return the usable keys of a set. Raises JwksError: the text is no key set, or none of its keys can be used."""
    try:
        listed = json.loads(text)["keys"]
        if not isinstance(listed, list) or len(listed) > MOST_KEYS:
            raise JwksError(f"`keys` must be a list of at most {MOST_KEYS}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise JwksError("it is no JSON Web Key Set") from error
    found = {str(one.get("kid", "")): key for one in listed if isinstance(one, dict) for key in [_key(one)] if key}
    if not found:
        raise JwksError("no key of it can be used: RSA (2048 bits or more), P-256 or Ed25519, for signatures")
    return found


def _key(one: dict[str, Any]) -> PyJWK | None:
    if one.get("kty") not in ("RSA", "EC", "OKP") or one.get("use", "sig") != "sig":
        return None
    public = {name: value for name, value in one.items() if name != "d"}  # a private key would be parsed as one
    try:
        key = PyJWK(public)
    except (PyJWTError, ValueError, TypeError):
        return None
    return key if _strong(key.key) else None


def _strong(key: object) -> bool:
    if isinstance(key, RSAPublicKey):
        return key.key_size >= 2048
    if isinstance(key, EllipticCurvePublicKey):
        return isinstance(key.curve, SECP256R1)
    return isinstance(key, Ed25519PublicKey)


def _read(file: Path) -> Keys:
    try:
        with file.open("rb") as opened:
            return keys_of(opened.read(MOST_BYTES))
    except OSError as error:
        raise ConfigError(
            f"cannot read the issuer's keys {file} (key 'auth.jwt.jwks_file'): {error.strerror}"
        ) from error
    except JwksError as error:
        raise ConfigError(f"{file} (key 'auth.jwt.jwks_file'): {error}") from error
