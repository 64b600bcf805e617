"""HTTP to vLLM's server, over its Unix socket: is it ready, which version is it, and the stream of one answer.

aiohttp is imported here alone, since a pool without vLLM does without it. Each answer has a connection of its own:
closing it is what cancels an answer, and a kept one might be closed by the server in the moment in which it is used.
What is read ahead is bounded by aiohttp, which reads on when that is taken.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Final, Self

import aiohttp
import msgspec

from cloud_pool.vllm.answer import ServerRefused
from cloud_pool.vllm.wire import GENERATE_PATH, fault_of

_BASE: Final = "http://vllm"  # whose name nobody looks up: it is a socket's
_ASK_S: Final = 5.0
_MAX_BODY_BYTES: Final = 64 * 1024  # of an answer that is no stream


class ServerVersion(msgspec.Struct, frozen=True):
    """What `/version` answers."""

    version: str = "unknown"


class ServerGone(Exception):
    """The server has closed a connection, or takes none."""


class VllmClient:
    """Of the server at one socket; usable inside `async with`."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.UnixConnector(str(self._socket), limit=0, force_close=True)
        self._session = aiohttp.ClientSession(_BASE, connector=connector, trust_env=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def healthy(self, within_s: float = _ASK_S) -> bool:
        """Whether it says that it is ready, or well."""
        try:
            async with self._get("/health", within_s) as response:
                return response.status == HTTPStatus.OK
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def version(self) -> str:
        """As it says; "unknown" where it does not."""
        try:
            async with self._get("/version", _ASK_S) as response:
                body = await response.content.read(_MAX_BODY_BYTES)
                return msgspec.json.decode(body, type=ServerVersion).version[:64]
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError, UnicodeDecodeError):
            return ServerVersion().version

    @asynccontextmanager
    async def stream(self, body: bytes) -> AsyncIterator[AsyncIterator[bytes]]:
        """Ask for an answer; its bytes, as they come. Left early, it is cancelled.

        Raises:
            ServerRefused: it answers with a status over 200.
            ServerGone: the connection ended.
        """
        assert self._session is not None, "enter the client first"
        try:
            async with self._session.post(
                GENERATE_PATH,
                data=body,
                headers={"content-type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=None),
            ) as response:
                if response.status != HTTPStatus.OK:
                    raise ServerRefused(fault_of(response.status, await response.content.read(_MAX_BODY_BYTES)))
                try:
                    yield response.content.iter_any()
                finally:
                    response.close()
        except (aiohttp.ClientError, ConnectionError) as error:
            raise ServerGone(f"{type(error).__name__}: {error}") from error

    def _get(self, path: str, within_s: float) -> aiohttp.client._RequestContextManager:
        assert self._session is not None, "enter the client first"
        return self._session.get(path, timeout=aiohttp.ClientTimeout(total=within_s))

    def __repr__(self) -> str:
        return f"<VllmClient {self._socket}>"
