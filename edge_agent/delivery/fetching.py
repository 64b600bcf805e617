"""The artefact fetcher downloads a plan's artefacts by HTTP ranges, resumes after cuts, and keeps to a budget.

    GET BASE/artifacts/sha256/DIGEST    Range: bytes=HELD-    If-Range: "DIGEST"

One connection at a time, and the bytes before a cut are kept (`partial_file.py`). The servers of a document are tried
in turn: the next after each failure. A server that ignores the range sends all of it again; what is already here is
skipped, but counts as fetched. `edge_agent/core/fetch_retry.py` decides what every answer means.

The rules of the device are checked before each connection and with every chunk, so that a link that becomes paid, or a
window that ends, stops a download within a chunk.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Final

import aiohttp

from edge_agent.core.fetch_retry import RETRY_AFTER_MAX_S, DownloadBudget
from edge_agent.delivery.failures import WorkDeferred, WorkFailed
from edge_agent.delivery.model_store import ModelStore
from edge_agent.delivery.partial_file import BadChunk, PartialFile
from edge_agent.delivery.receiving import read_ahead
from tidegate import clock
from tidegate.rollout.plan import Artefact, ModelPlan, artefact_path
from tidegate.runtime.backoff import Backoff

CONNECT_TIMEOUT_S: Final = 10.0
SILENCE_TIMEOUT_S: Final = 30.0
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class ArtefactFetcher:
    """Fetches into a store.

    Args:
        session: makes the connections; its TLS context decides which servers are trusted.
        hindrance: why fetching must wait, "" while it may go on; called often.
        draw: chance, uniform in [0, 1).
        on_progress: called when bytes have arrived.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        store: ModelStore,
        *,
        hindrance: Callable[[], str],
        draw: Callable[[], float],
        on_progress: Callable[[], None] = lambda: None,
        backoff_cap_s: float = 30.0,
    ) -> None:
        self.last_trouble = ""
        self._session = session
        self._store = store
        self._hindrance = hindrance
        self._backoff = Backoff(draw, base_s=0.5, cap_s=backoff_cap_s)
        self._on_progress = on_progress
        self._server = 0

    async def fetch(self, plan: ModelPlan, servers: Sequence[str], patience: DownloadBudget) -> None:
        """Return once every artefact is in the store.

        Raises:
            WorkDeferred: the device's rules stop it.
            WorkFailed: the download is given up.
        """
        for artefact in plan.artefacts:
            if not self._store.has(artefact):
                try:
                    await self._one(artefact, servers, patience)
                except OSError as error:  # of the disk: errors of the network are handled below
                    if error.errno in _FULL:
                        raise WorkDeferred(f"disk: full while fetching {artefact.path}") from error
                    raise

    async def _one(self, artefact: Artefact, servers: Sequence[str], patience: DownloadBudget) -> None:
        async with _opened(PartialFile(self._store.partial(artefact.sha256), artefact)) as partial:
            while not partial.is_whole:
                if why := self._hindrance():
                    raise WorkDeferred(why)
                await self._attempt(partial, servers, patience)
            if not await asyncio.to_thread(partial.is_right):
                self._store.partial(artefact.sha256).unlink()
                raise WorkFailed(f"digest: {artefact.path} has other bytes than its digest and its chunks' say")
        await asyncio.to_thread(self._store.admit, artefact.sha256)

    async def _attempt(self, partial: PartialFile, servers: Sequence[str], patience: DownloadBudget) -> None:
        """Make one connection; the bytes that arrive are kept, however it ends."""
        number, before = self._server % len(servers), patience.cuts
        server = servers[number]
        retry_after_s = 0.0
        try:
            retry_after_s = await self._request(partial, server, number, patience)
        except BadChunk as error:
            self.last_trouble = f"{server}: {error}"
            _raise(patience.record_bad_chunk(error.number))
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            self.last_trouble = f"{server}: {error or type(error).__name__}"
            patience.record_cut()
        if partial.is_whole:
            return
        self._server += 1
        if patience.cuts <= before:  # no new cuts; the next try counts as the first
            self._backoff.reset()
        await clock.sleep(max(self._backoff.next_delay_s(), retry_after_s))

    async def _request(self, partial: PartialFile, server: str, number: int, patience: DownloadBudget) -> float:
        """Take in a server's answer; the Retry-After that it sent, in seconds."""
        digest, offset = partial.artefact.sha256, partial.held_bytes
        headers = {"Accept-Encoding": "identity"}
        if offset:
            headers |= {"Range": f"bytes={offset}-", "If-Range": f'"{digest}"'}
        url = server.rstrip("/") + artefact_path(digest)
        async with self._session.get(url, headers=headers, allow_redirects=False) as response:
            if response.status == 206 and _begins_at(response) == offset:
                await self._take_in(response, partial, patience, skip=0)
            elif response.status == 200:
                await self._take_in(response, partial, patience, skip=offset)
            else:
                status = 416 if response.status == 206 else response.status  # another range than requested
                self.last_trouble = f"{url}: HTTP {status}"
                retry_after_s = _retry_after_s(response)
                _raise(patience.record_status(status, server=number, asked_back=retry_after_s > 0.0))
                return retry_after_s
        if not partial.is_whole:  # it ended early, without an error
            patience.record_cut()
        return 0.0

    async def _take_in(
        self, response: aiohttp.ClientResponse, partial: PartialFile, patience: DownloadBudget, *, skip: int
    ) -> None:
        async with aclosing(read_ahead(response.content)) as pieces:
            async for piece in pieces:
                _raise(patience.record_bytes(len(piece)))
                skipped = min(skip, len(piece))
                skip -= skipped
                for _ in range(await asyncio.to_thread(partial.append, piece[skipped:])):
                    patience.record_chunk()
                self._on_progress()
                if partial.is_whole:
                    return
                if why := self._hindrance():
                    raise WorkDeferred(why)


@asynccontextmanager
async def _opened(partial: PartialFile) -> AsyncIterator[PartialFile]:
    """A partial file, opened in a thread: reading a large one back takes a card a minute, and the loop must go on."""
    opening = asyncio.create_task(asyncio.to_thread(partial.open), name=f"opens {partial.artefact.path}")
    try:
        await asyncio.shield(opening)
        yield partial
    finally:
        if not opening.done():  # cancelled: the thread ends first, for another try may write the same file
            partial.stop_checking()
            await asyncio.wait((opening,))
        partial.close()


def session(*, tls: object = None) -> aiohttp.ClientSession:
    """A session for one `ArtefactFetcher`; `tls` is an `ssl.SSLContext`, or None for the machine's trusted CAs."""
    connector = aiohttp.TCPConnector(limit=2, ssl=tls if tls is not None else True)  # type: ignore[arg-type]
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=SILENCE_TIMEOUT_S)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False, trust_env=False)


def _raise(why: str) -> None:
    if why:
        raise WorkFailed(why)


def _begins_at(response: aiohttp.ClientResponse) -> int:
    """The first byte of a partial answer; -1 when the answer does not name it."""
    unit, _, rest = response.headers.get("Content-Range", "").partition(" ")
    first = rest.partition("-")[0]
    return int(first) if unit == "bytes" and first.isdecimal() and len(first) < 16 else -1


def _retry_after_s(response: aiohttp.ClientResponse) -> float:
    words = response.headers.get("Retry-After", "")
    return min(RETRY_AFTER_MAX_S, float(words)) if words.isdecimal() and len(words) < 8 else 0.0
