"""HTTP to one server: everything that comes is bounded, and the key goes to its address and nowhere else.

    redirects       not followed: the key would go along
    proxies         those of the environment are not asked, cookies are not kept
    compression     is not asked for, and what is compressed all the same is refused, so that a bound bounds memory
    a body          is read up to a size; a stream's events have theirs (`event_lines.py`)
    silence         ends an answer: no byte for so long
    a slow reader   what is not read stays in the socket, and the server waits
    cancellation    closes the connection, by which servers know that nobody waits any more
    TLS             1.2 or newer, with the server's name in a certificate of a known CA

A connection that was kept may be closed by the server just when a request is sent on it; llama-server closes each one
after a stream, and says that it will not. So a request that was sent on a kept connection, and came to no answer at
all, is sent again on another one. On a new connection nothing is sent twice.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, Self

import aiohttp
import msgspec

from gateway.targets.openai.api_key import ApiKey
from gateway.targets.openai.dialect import UpstreamRequest
from gateway.targets.openai.event_lines import DONE, EventReader
from gateway.targets.openai.upstream_errors import error_of_answer, error_of_event
from tidegate import __version__, clock
from tidegate.config import ConfigError
from tidegate.outcome import BadAnswer, Disconnected, ServeError, Unreachable

MAX_BODY_BYTES: Final = 2**20
MAX_ERROR_BYTES: Final = 64 * 1024
_CONNECT_S: Final = 3.0
_KEPT_S: Final = 3.0  # servers close idle connections after 5 s, as most do
_READ_BYTES: Final = 64 * 1024
_KERNEL_BYTES: Final = 128 * 1024  # over a round trip of 100 ms still a megabyte a second
_ROOT: Final = "/v1"


class Answered(NamedTuple):
    """A whole answer."""

    status: int
    headers: Mapping[str, str]  # by lower-case names
    said: Any  # its JSON; None where there is none


class UpstreamClient:
    """`async with` opens it. Its errors name the target, and are the classes that other targets raise.

    Args:
        id: the target's.
        url: OpenAI's base_url: its routes are below it, and the server's own beside its last part, `/v1`.
        silence_s: without a byte, after which an answer is given up.
    """

    def __init__(
        self, id: str, url: str, *, key: ApiKey | None = None, ca_file: Path | None = None, silence_s: float = 60.0
    ) -> None:
        self._id = id
        self._url = url
        self._root = url.removesuffix(_ROOT)
        self._key = key or ApiKey()
        self._ca_file = ca_file
        self._silence_s = silence_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        await self._key.__aenter__()
        try:
            connector = aiohttp.TCPConnector(
                limit=0, ssl=self._tls(), keepalive_timeout=_KEPT_S, socket_factory=_small_socket
            )
        except BaseException:
            await self._key.__aexit__()
            raise
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers={"Accept-Encoding": "identity", "User-Agent": f"tidegate/{__version__}"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            read_bufsize=_READ_BYTES,
            trace_configs=[_noting_kept_connections()],
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()
        await self._key.__aexit__()

    async def ask(
        self, path: str, body: Mapping[str, Any] | None = None, *, from_root: bool = False, within_s: float
    ) -> Answered:
        """The whole answer to a GET, or with a body to a POST, whatever its status. Raises ServeError."""
        try:
            async with asyncio.timeout(within_s), self._sent(path, body, from_root) as response:
                raw = self._key.blotted(await _whole(response, MAX_BODY_BYTES))
                return Answered(response.status, _lower(response), _json(raw))
        except TimeoutError as error:
            raise Unreachable(f"{self._id} did not answer within {within_s:g} s") from error

    @asynccontextmanager
    async def stream(self, question: UpstreamRequest) -> AsyncIterator[AsyncIterator[Mapping[str, Any]]]:
        """The events of an answer, as they are read; leaving it early closes the connection. Raises ServeError."""
        async with self._sent(question.path, question.body, question.from_root) as response:
            if response.status != 200:
                raise await self._refusal(response)
            kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
            yield self._events(response) if kind != "application/json" else self._one_event(response)

    async def _events(self, response: aiohttp.ClientResponse) -> AsyncIterator[Mapping[str, Any]]:
        reader, is_done = EventReader(), False
        while chunk := await self._chunk(response):
            for event in reader.feed(chunk) if not is_done else ():
                if event == DONE:
                    is_done = True  # read on to the end of the body: then the connection can be used again
                    break
                yield self._checked(event)

    async def _one_event(self, response: aiohttp.ClientResponse) -> AsyncIterator[Mapping[str, Any]]:
        """A server that was asked for events may answer at once."""
        try:
            async with asyncio.timeout(self._silence_s):
                yield self._checked(await _whole(response, MAX_BODY_BYTES))
        except TimeoutError as error:
            raise self._silent() from error

    async def _chunk(self, response: aiohttp.ClientResponse) -> bytes:
        try:
            async with asyncio.timeout(self._silence_s):
                return await response.content.readany()
        except TimeoutError as error:
            raise self._silent() from error

    def _silent(self) -> ServeError:
        return Unreachable(f"{self._id} sent nothing for {self._silence_s:g} s (openai.silence_s)")

    def _checked(self, raw: bytes) -> Mapping[str, Any]:
        event = _json(raw)
        if not isinstance(event, dict):
            raise BadAnswer(f"{self._id} sent an event that is no JSON object")
        if (error := error_of_event(event, self._id, self._key.blotted_text)) is not None:
            raise error
        return event

    async def _refusal(self, response: aiohttp.ClientResponse) -> ServeError:
        try:
            async with asyncio.timeout(_CONNECT_S):
                body = await response.content.read(MAX_ERROR_BYTES)
        except TimeoutError:
            body = b""
        headers, blotted = _lower(response), self._key.blotted_text
        return error_of_answer(response.status, headers, body, self._id, clock.utc_s(), blotted)

    @asynccontextmanager
    async def _sent(
        self, path: str, body: Mapping[str, Any] | None, from_root: bool
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The response to a request, whose connection is closed unless it has been read to its end."""
        assert self._session is not None, "used outside of its `async with`"
        url = (self._root if from_root else self._url) + path
        headers = self._key.headers()
        if body is not None:
            headers["Content-Type"] = "application/json"
        begun = False
        try:
            async with asyncio.timeout(None) as silence:
                silence.reschedule(asyncio.get_running_loop().time() + self._silence_s)
                response = await self._response("GET" if body is None else "POST", url, body, headers)
                silence.reschedule(None)
            begun = True
            try:
                if response.headers.get("Content-Encoding", "identity").lower() != "identity":
                    raise BadAnswer(f"{self._id} compresses its answer, which it was not asked to")
                yield response
            finally:
                response.close()  # has no effect on one that was read to its end: its connection is free already
        except (aiohttp.ClientConnectorCertificateError, aiohttp.ClientSSLError) as error:
            raise Unreachable(f"{self._id}: {_tls_words(error)}") from error
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError) and not begun:
                raise Unreachable(f"{self._id} did not answer: {_words(error)}") from error
            if begun:
                raise Disconnected(f"{self._id} broke its answer off: {_words(error)}") from error
            raise Unreachable(f"{self._id} cannot be reached: {_words(error)}") from error

    async def _response(
        self, method: str, url: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        assert self._session is not None
        data = None if body is None else msgspec.json.encode(body)
        while True:  # each turn takes a kept connection away
            connection = SimpleNamespace(kept=False)
            try:
                return await self._session.request(
                    method, url, data=data, headers=headers, allow_redirects=False, trace_request_ctx=connection
                )
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if not connection.kept:
                    raise

    def _tls(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self._ca_file)
        except (OSError, ssl.SSLError) as error:
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or "it holds no certificate"
            raise ConfigError(f"cannot read {self._ca_file} (key 'openai.ca_file'): {reason}") from error
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        return context

    def __repr__(self) -> str:
        return f"<UpstreamClient {self._id} at {self._url} {self._key!r}>"


def _small_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket for which the kernel keeps little: by itself it would take in megabytes that nobody reads."""
    family, kind, protocol, *_ = address
    opened = socket.socket(family, kind, protocol)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _KERNEL_BYTES)
    return opened


def _noting_kept_connections() -> aiohttp.TraceConfig:
    """Has a request's `trace_request_ctx` say whether it was sent on a connection that was kept."""
    trace = aiohttp.TraceConfig()

    async def kept(_session: aiohttp.ClientSession, context: SimpleNamespace, _params: object) -> None:
        if context.trace_request_ctx is not None:
            context.trace_request_ctx.kept = True

    trace.on_connection_reuseconn.append(kept)
    return trace


async def _whole(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    body = bytearray()
    while chunk := await response.content.readany():
        body += chunk
        if len(body) > most_bytes:
            raise BadAnswer(f"an answer of more than {most_bytes} bytes")
    return bytes(body)


def _json(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


def _lower(response: aiohttp.ClientResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in response.headers.items()}


def _words(error: Exception) -> str:
    """An error of the transport in a few words; aiohttp's hold addresses, and never a header."""
    inner = error.__cause__ or error
    said = getattr(inner, "message", None)  # aiohttp's parser puts a status of its own and a new line before it
    words = getattr(inner, "strerror", None) or (said if isinstance(said, str) else inner)
    return " ".join(str(words).split())[:200] or type(error).__name__


def _tls_words(error: Exception) -> str:
    words = str(error.__cause__ or error)
    if "CERTIFICATE_VERIFY_FAILED" in words or isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is not good ({words[:200]}): openai.ca_file names the CA that it must come from"
    return f"no TLS can be agreed on ({words[:200]})"
