"""A request's body over HTTP, read into memory within bounds of size, of growth by decompression, and of time.

The size is counted after decompression, as it comes and not as it is announced. Bodies are inflated here, piece by
piece (`HttpConnection` leaves them as they came), since aiohttp takes a gzip that ends early for a whole one. A
bomb is stopped at the limit; and before, where it grows out of proportion: JSON of
zeros shrinks to a hundredth, and what shrinks to less was made to. The ratio counts from a mebibyte on, below which
nothing is worth refusing.

Time is bounded twice: nothing may come for `idle_s` at most, and the whole may take `grace_s` and a second more for
each `min_bytes_per_s`. So a caller on a slow line earns its time by sending, and a caller that sends a byte now and
then cannot hold its memory for ever.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator
from typing import Final

from aiohttp import StreamReader, web

from tidegate import clock
from tidegate.oip.body_budget import DEFAULT, SMALL_BYTES, BodyLimits, BodyReservation
from tidegate.oip.check import quoted_input
from tidegate.outcome import InvalidRequest, TooLarge

ENCODINGS: Final = frozenset({"identity", "gzip", "deflate"})
_PIECE_BYTES: Final = 256 * 1024  # inflated at once; the loop turns between two pieces
_MOST_MEMBERS: Final = 64  # of one gzip, which may be several in a row


async def read_body(
    request: web.BaseRequest, max_body_bytes: int, *, limits: BodyLimits = DEFAULT, share: BodyReservation | None = None
) -> bytes:
    """The request's body, decompressed.

    Raises:
        TooLarge: before more than the limit is held, or if it grew out of proportion.
        InvalidRequest: the body does not match its headers, or comes too slowly.
        Overloaded: there is no room for it just now.
    """
    encoding = request.headers.get("Content-Encoding", "")
    packed = encoding.strip().lower() if encoding else ""
    if packed and packed not in ENCODINGS:
        raise InvalidRequest(f"Content-Encoding {quoted_input(encoding)} is not supported; use gzip or deflate")
    announced = request.content_length
    if announced is not None and announced > max_body_bytes:
        raise too_large(max_body_bytes)
    content = request.content
    try:
        body = content.read_nowait()
        inflater = _Inflater(packed) if packed in ("gzip", "deflate") else None
        if inflater is None and content.at_eof() and len(body) <= min(max_body_bytes, SMALL_BYTES):
            return body  # all there at once, as a body of ordinary size is
        return await _Reading(content, body, max_body_bytes, limits, share, inflater).to_the_end()
    except (web.RequestPayloadError, zlib.error) as error:
        raise InvalidRequest(f"the body is no valid {encoding or 'HTTP'} data") from error
    except ConnectionError as error:  # the caller has gone, which is no defect
        raise InvalidRequest("the connection ended before the body did") from error


class _Inflater:
    """Inflates one body. Raises zlib.error for what is no valid data, and at `end` if something is missing."""

    def __init__(self, encoding: str) -> None:
        self._bits = 31 if encoding == "gzip" else 15
        self._members = 1
        self._stream = zlib.decompressobj(self._bits)
        self.taken = 0  # compressed bytes

    def pieces(self, chunk: bytes) -> Iterator[bytes]:
        if not chunk:
            return
        if not self.taken and self._bits == 15 and chunk[0] & 0x0F != 8:
            self._stream = zlib.decompressobj(-15)  # "deflate" without its header, as some callers send it
        self.taken += len(chunk)
        while chunk:
            if self._stream.eof:
                self._members += 1
                if self._bits != 31 or self._members > _MOST_MEMBERS:
                    raise zlib.error("something follows the end")
                self._stream = zlib.decompressobj(self._bits)
            yield self._stream.decompress(chunk, _PIECE_BYTES)
            chunk = self._stream.unused_data if self._stream.eof else self._stream.unconsumed_tail
        while not self._stream.eof and (more := self._stream.decompress(b"", _PIECE_BYTES)):
            yield more  # what zlib still held when the last piece was full

    def end(self) -> None:
        if self.taken and not self._stream.eof:
            raise zlib.error("it ends early")


class _Reading:
    """One body that did not come at once."""

    def __init__(
        self,
        content: StreamReader,
        first: bytes,
        max_body_bytes: int,
        limits: BodyLimits,
        share: BodyReservation | None,
        inflater: _Inflater | None,
    ) -> None:
        self._content = content
        self._first = first
        self._inflater = inflater
        self._chunks: list[bytes] = []
        self._size = 0
        self._max_body_bytes = max_body_bytes
        self._limits = limits
        self._share = share

    async def to_the_end(self) -> bytes:
        began_at, limits = clock.now(), self._limits
        await self._take(self._first)
        self._first = b""
        while not self._content.at_eof():
            left_s = began_at + limits.grace_s + self._size / limits.min_bytes_per_s - clock.now()
            try:
                async with asyncio.timeout(max(0.0, min(limits.idle_s, left_s))):
                    chunk = await self._content.readany()
            except TimeoutError as error:
                raise InvalidRequest(self._too_slow(left_s)) from error
            await self._take(chunk)
        if self._inflater is not None:
            self._inflater.end()
        return b"".join(self._chunks)

    async def _take(self, chunk: bytes) -> None:
        if self._inflater is None:
            self._add(chunk)
            return
        for piece in self._inflater.pieces(chunk):
            self._add(piece)
            await clock.sleep(0)  # inflating never waits, so without this the loop would not run other tasks

    def _add(self, piece: bytes) -> None:
        self._chunks.append(piece)
        self._size += len(piece)
        self._check_size()

    def _check_size(self) -> None:
        if self._size > self._max_body_bytes:
            raise too_large(self._max_body_bytes)
        compressed = self._inflater.taken if self._inflater is not None else 0
        if compressed and self._size > max(self._limits.ratio_from_bytes, self._limits.max_ratio * compressed):
            raise TooLarge(
                f"the body grows to more than {self._limits.max_ratio:g} times its compressed size "
                "(max_decompression_ratio); send it as it is"
            )
        if self._share is not None:
            self._share.grow(self._size)

    def _too_slow(self, left_s: float) -> str:
        if left_s > self._limits.idle_s:
            return f"nothing more of the body came for {self._limits.idle_s:g} s"
        return f"the body came too slowly: {self._size} bytes in {self._limits.grace_s:g} s and more"

    def __repr__(self) -> str:
        return f"<_Reading {self._size} bytes>"


def too_large(max_body_bytes: int) -> TooLarge:
    return TooLarge(f"the body is larger than the limit of {max_body_bytes} bytes")
