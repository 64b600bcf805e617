"""Byte ranges: which part of a file a `Range` header requests, one range or all of it.

A malformed header, or one with several ranges at once, is ignored, as RFC 9110 §14.2 allows: the answer is the whole
file with status 200. Only a range that begins past the end is refused.

**aiohttp's `request.http_range` is not used**, because two of its answers differ. It reads `bytes=-0` as the slice
`0:`, which is the whole file with status 206, where a suffix of no bytes is unsatisfiable (416); a slice cannot tell
the two apart. It also converts any number of digits, so that `bytes=-9999999999999999999` is a range and not garbage.
For `web.FileResponse` see `server.py`.

Source: RFC 9110, "HTTP Semantics", §14.1.2 (byte ranges) and §13.1.5 (If-Range).
"""

from __future__ import annotations

import re
from typing import Final

# Eighteen digits are an exabyte; more would be work to read and no file.
_RANGE: Final = re.compile(r"bytes=(\d{0,18})-(\d{0,18})\Z", re.ASCII | re.IGNORECASE)


class UnsatisfiableRange(ValueError):
    """The range lies outside the file."""


def byte_range(header: str, size_bytes: int) -> tuple[int, int] | None:
    """Return (first byte, count) of a file of that size; None for all of it. Raises UnsatisfiableRange."""
    found = _RANGE.match(header.strip())
    if found is None or found[1] == found[2] == "":
        return None
    if found[1] == "":
        count = min(int(found[2]), size_bytes)
        if count == 0:
            raise UnsatisfiableRange(f"there are {size_bytes} bytes")
        return size_bytes - count, count
    first = int(found[1])
    if found[2] and int(found[2]) < first:
        return None  # RFC 9110: such a range is invalid, and an invalid one is as if it were not there
    if first >= size_bytes:
        raise UnsatisfiableRange(f"there are {size_bytes} bytes")
    last = min(int(found[2]) if found[2] else size_bytes - 1, size_bytes - 1)
    return first, last - first + 1


def if_range_matches(if_range: str, etag: str) -> bool:
    """Return whether the range may be answered: `If-Range` is absent or names this content. A date never does."""
    return if_range in ("", etag)
