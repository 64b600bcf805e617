"""The side that is asked for evidence. Only the newest challenge is answered, when its turn to be written comes, so a
flood of them costs one signature at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog

from tidegate.link import frames
from tidegate.link.outbox import Parcel

log = structlog.get_logger(__name__)

Attest = Callable[[bytes, bytes | None], bytes]  # (nonce, the asker's certificate) → evidence; ValueError: words
_EVIDENCE_BYTES: Final = 4096  # about


def no_evidence(_nonce: bytes, _asker: bytes | None) -> bytes:
    raise ValueError("it has no evidence: its configuration has no section `attestation`")


class ChallengeResponder:
    """One stream's. Args: asker: the certificate, PEM, that TLS has verified at the other end."""

    def __init__(self, attest: Attest, asker: bytes | None) -> None:
        self._attest = attest
        self._asker = asker
        self._nonce: bytes | None = None  # of the newest challenge that has not been answered

    def take(self, nonce: bytes) -> Parcel | None:
        """What to post; None where an answer waits already, which will be to this one."""
        waits, self._nonce = self._nonce is not None, nonce
        return None if waits else Parcel(self._leaving, _EVIDENCE_BYTES)

    def _leaving(self, _now: float) -> bytes:
        nonce, self._nonce = self._nonce or b"", None
        try:
            return frames.evidence(self._attest(nonce, self._asker))
        except ValueError as error:  # words for the gateway's operator
            return frames.evidence(b"", str(error))
        except Exception:
            log.exception("no evidence could be made")
            return frames.evidence(b"", "internal error; the target's log has the traceback")

    def __repr__(self) -> str:
        return f"<Challenged{'' if self._nonce is None else ', to answer'}>"
