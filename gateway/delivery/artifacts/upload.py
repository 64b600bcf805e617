"""Upload routes: operators send model files in pieces over the admin port, behind its guard.

    HEAD /v1/artifacts/sha256/DIGEST    200: the file is complete; 404 with `Upload-Offset`: bytes uploaded so far
    PUT  /v1/artifacts/sha256/DIGEST    a piece, `Content-Range: bytes FIRST-LAST/SIZE`, or none, `bytes */SIZE`;
                                        201 complete, 202 continue at `Upload-Offset`, 409 the piece does not begin
                                        where the last one ended, 422 wrong content, 503 the folder
                                        cannot be used, 507 its disk is full

A piece is bounded in size: a broken upload of gigabytes loses one piece, and no client makes the gateway hold more
than that. With the last piece the whole file is hashed; only then has it a name that devices can request.
A content is uploaded by one client at a time: two interleaved uploads would spoil each other. What is unfinished is
bounded for each credential and for all (429), and removed when it has not grown for a day.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from aiohttp import web

from gateway.delivery.artifacts.store import (
    DIGEST,
    ArtifactFolderFails,
    ArtifactStore,
    ArtifactStoreFull,
    OffsetMismatch,
    StoreError,
    TooManyPartials,
)
from gateway.delivery.uninterrupted import uninterrupted
from gateway.identity.operator_access import caller_of

MAX_PIECE_BYTES: Final = 8 * 2**20
PIECE_WITHIN_S: Final = 60.0
_CONTENT_RANGE: Final = re.compile(r"bytes (?:\*|(\d{1,18})-(\d{1,18}))/(\d{1,18})\Z", re.ASCII)
T = TypeVar("T")


def intake_routes(store: ArtifactStore) -> list[web.RouteDef]:
    arriving: set[str] = set()

    async def head(request: web.Request) -> web.Response:
        digest = _digest(request)
        size = await _stored(partial(store.size_bytes, digest))
        if size is not None:
            return web.Response(headers={"Upload-Offset": str(size)})
        offset = await _stored(partial(store.offset_bytes, digest))
        return web.Response(status=404, headers={"Upload-Offset": str(offset)})

    async def put(request: web.Request) -> web.Response:
        digest, (first, count, size) = _digest(request), _range(request)
        if digest in arriving:
            raise web.HTTPConflict(text="another upload of the same content is under way")
        arriving.add(digest)
        try:
            if await _stored(partial(store.size_bytes, digest)) is not None:
                return web.Response(status=200, headers={"Upload-Offset": str(size)})
            piece = await _piece(request, count)
            append = partial(store.append, digest, first, piece, caller_of(request))
            # The thread that writes or hashes is not stopped by a caller that leaves, and has to be the only one.
            return await uninterrupted(_take(append, store, digest, piece, size))
        finally:
            arriving.discard(digest)

    route = "/v1/artifacts/sha256/{digest}"
    return [web.head(route, head), web.put(route, put)]


async def _take(append: Callable[[], int], store: ArtifactStore, digest: str, piece: bytes, size: int) -> web.Response:
    offset = await _stored(append if piece else partial(store.offset_bytes, digest))
    if offset < size:
        return web.Response(status=202, headers={"Upload-Offset": str(offset)})
    await _stored(partial(store.finish, digest))
    return web.Response(status=201, headers={"Upload-Offset": str(size)})


async def _stored(step: Callable[[], T]) -> T:
    try:
        return await asyncio.to_thread(step)
    except OffsetMismatch as error:
        raise web.HTTPConflict(text=str(error), headers={"Upload-Offset": str(error.offset_bytes)}) from error
    except TooManyPartials as error:
        raise web.HTTPTooManyRequests(text=str(error)) from error
    except ArtifactStoreFull as error:
        raise web.HTTPInsufficientStorage(text=str(error)) from error
    except ArtifactFolderFails as error:
        raise web.HTTPServiceUnavailable(text=str(error)) from error
    except StoreError as error:
        raise web.HTTPUnprocessableEntity(text=str(error)) from error


async def _piece(request: web.Request, count: int) -> bytes:
    try:
        async with asyncio.timeout(PIECE_WITHIN_S):
            return await request.content.readexactly(count) if count else b""
    except TimeoutError:
        raise web.HTTPRequestTimeout(text=f"a piece must come within {PIECE_WITHIN_S:g} s") from None
    except asyncio.IncompleteReadError as error:
        raise web.HTTPBadRequest(text=f"{len(error.partial)} bytes came of {count}") from None


def _digest(request: web.Request) -> str:
    digest = request.match_info["digest"]
    if not DIGEST.match(digest):
        raise web.HTTPNotFound(text="the name of an artefact is a sha256, 64 digits of 0-9 and a-f")
    return digest


def _range(request: web.Request) -> tuple[int, int, int]:
    """Return (first byte, count, size of the whole file)."""
    found = _CONTENT_RANGE.match(request.headers.get("Content-Range", ""))
    if found is not None and found[1] is None:
        return 0, 0, int(found[3])
    first, last, size = map(int, found.groups()) if found else (0, -1, 0)
    if not 0 <= first <= last < size or last - first + 1 > MAX_PIECE_BYTES:
        raise web.HTTPBadRequest(
            text=f"say which piece this is, `Content-Range: bytes FIRST-LAST/SIZE`, of at most {MAX_PIECE_BYTES} bytes"
        )
    return first, last - first + 1, size
