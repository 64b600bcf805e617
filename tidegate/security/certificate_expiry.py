"""A certificate's end: connections and streams that were opened with it must not outlive it.

TLS looks at a certificate once, in the handshake. A kept connection and a link stream go on for weeks, so each call on
a kept connection compares the end with the wall clock, and each stream is given up at the end: the side that serves it
ends it with either certificate, and a gateway that dialled it with its own, to dial again with what is there by then.

The ends are remembered by certificate, so that a call pays for a look-up and a comparison.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import lru_cache
from math import inf
from typing import Any

from cryptography import x509

from tidegate import clock
from tidegate.outcome import BadCredential


@lru_cache(maxsize=1024)
def expiry_utc_s(pem: bytes) -> float:
    """Return the end of a certificate's validity in UTC seconds. Raises ValueError: it is malformed."""
    return x509.load_pem_x509_certificate(pem).not_valid_after_utc.timestamp()


def earliest_expiry_utc_s(certificates: Iterable[bytes | None]) -> float:
    """Return when the first of some PEM certificates ends; without any, never. Raises ValueError."""
    return min((expiry_utc_s(pem) for pem in certificates if pem), default=inf)


def peer_expiry_utc_s(peercert: Any) -> float:
    """Return the end of what Python's ssl reports of a verified certificate (`getpeercert`); without one, never."""
    return _seconds(peercert["notAfter"]) if peercert else inf


@lru_cache(maxsize=1024)
def _seconds(not_after: str) -> float:
    return float(ssl.cert_time_to_seconds(not_after))


@asynccontextmanager
async def until_expiry(expires_at_s: float, whose: str) -> AsyncIterator[None]:
    """Run the block for as long as a certificate is good.

    Raises:
        BadCredential: it ended in the meantime; what ran was cancelled.
    """
    left_s = None if expires_at_s == inf else max(0.0, expires_at_s - clock.utc_s())
    try:
        async with asyncio.timeout(left_s) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise BadCredential(f"{whose} certificate has expired") from None
