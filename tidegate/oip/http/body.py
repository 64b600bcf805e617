"""A request's body over HTTP, read into memory within bounds of size, of growth by decompression, and of time.

The size is counted after decompression, as it comes and not as it is announced. aiohttp inflates piece by piece and
only as fast as is read here, so a bomb is stopped at the limit; and before, where it grows out of proportion: JSON of
zeros shrinks to a hundredth, and what shrinks to less was made to. The ratio counts from a mebibyte on, below which
nothing is worth refusing.

Time is bounded twice: nothing may come for `idle_s` at most, and the whole may take `grace_s` and a second more for
each `min_bytes_per_s`. So a caller on a slow line earns its time by sending, and a caller that sends a byte now and
then cannot hold its memory for ever.
"""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import StreamReader, web

from tidegate import clock
from tidegate.oip.body_budget import DEFAULT, SMALL_BYTES, BodyLimits, BodyReservation
from tidegate.oip.check import quoted_input
from tidegate.outcome import InvalidRequest, TooLarge

ENCODINGS: Final = frozenset({"identity", "gzip", "deflate"})


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
    if encoding and encoding.strip().lower() not in ENCODINGS:
        raise InvalidRequest(f"Content-Encoding {quoted_input(encoding)} is not supported; use gzip or deflate")
    announced = request.content_length
    if announced is not None and announced > max_body_bytes:
        raise too_large(max_body_bytes)
    content = request.content
    try:
        body = content.read_nowait()
        if content.at_eof() and len(body) <= min(max_body_bytes, SMALL_BYTES):
            return body  # all there at once, as a body of ordinary size is
        return await _Reading(content, body, max_body_bytes, limits, share).to_the_end()
    except web.RequestPayloadError as error:
        raise InvalidRequest(f"the body is no valid {encoding or 'HTTP'} data") from error
    except ConnectionError as error:  # the caller has gone, which is no defect
        raise InvalidRequest("the connection ended before the body did") from error


class _Reading:
    """One body that did not come at once."""

    def __init__(
        self,
        content: StreamReader,
        first: bytes,
        max_body_bytes: int,
        limits: BodyLimits,
        share: BodyReservation | None,
    ) -> None:
        self._content = content
        self._chunks = [first]
        self._size = len(first)
        self._max_body_bytes = max_body_bytes
        self._limits = limits
        self._share = share

    async def to_the_end(self) -> bytes:
        began_at, limits = clock.now(), self._limits
        self._check()
        while not self._content.at_eof():
            left_s = began_at + limits.grace_s + self._size / limits.min_bytes_per_s - clock.now()
            try:
                async with asyncio.timeout(max(0.0, min(limits.idle_s, left_s))):
                    chunk = await self._content.readany()
            except TimeoutError as error:
                raise InvalidRequest(self._too_slow(left_s)) from error
            self._chunks.append(chunk)
            self._size += len(chunk)
            self._check()
            if self._content.total_compressed_bytes:
                await clock.sleep(0)  # inflating never waits, so without this the loop would not run other tasks
        return b"".join(self._chunks)

    def _check(self) -> None:
        try:
            self._check_size()
        except TooLarge as error:
            if self._content.total_compressed_bytes:
                # Read no further: aiohttp would go on inflating for as long as it waits for the sender to hear of it.
                self._content.set_exception(error)
            raise

    def _check_size(self) -> None:
        if self._size > self._max_body_bytes:
            raise too_large(self._max_body_bytes)
        compressed = self._content.total_compressed_bytes
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
