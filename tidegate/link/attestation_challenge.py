"""`ChallengeResponder` answers the attestation challenges of one stream, on the side that is challenged.

Only the newest challenge is answered, when its turn to be written comes, so a flood of challenges costs one signature
at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog

from tidegate.link import frames
from tidegate.link.outbox import Parcel

log = structlog.get_logger(__name__)

Attest = Callable[[bytes, bytes | None], bytes]  # (nonce, peer certificate) → evidence; ValueError: why there is none
_EVIDENCE_BYTES: Final = 4096  # about


def no_evidence(_nonce: bytes, _peer_certificate: bytes | None) -> bytes:
    raise ValueError("it has no evidence: its configuration has no section `attestation`")


class ChallengeResponder:
    """The challenges of one stream.

    Args:
        peer_certificate: the certificate, PEM, that TLS has verified at the other end.
    """

    def __init__(self, attest: Attest, peer_certificate: bytes | None) -> None:
        self._attest = attest
        self._peer_certificate = peer_certificate
        self._nonce: bytes | None = None  # of the newest challenge that has not been answered

    def take(self, nonce: bytes) -> Parcel | None:
        """The parcel to post; None if an answer is queued already, since that answer will be made for this nonce."""
        waits, self._nonce = self._nonce is not None, nonce
        return None if waits else Parcel(self._leaving, _EVIDENCE_BYTES)

    def _leaving(self, _now: float) -> bytes:
        nonce, self._nonce = self._nonce or b"", None
        try:
            return frames.evidence(self._attest(nonce, self._peer_certificate))
        except ValueError as error:  # words for the gateway's operator
            return frames.evidence(b"", str(error))
        except Exception:
            log.exception("no evidence could be made")
            return frames.evidence(b"", "internal error; the target's log has the traceback")

    def __repr__(self) -> str:
        return f"<ChallengeResponder{'' if self._nonce is None else ', to answer'}>"
