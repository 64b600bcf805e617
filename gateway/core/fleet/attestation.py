"""An attestation is what a target's evidence has shown: until when it is good, or why it is not.

A request that requires an attested target (`Ask.attested`) goes where evidence was verified
(`tidegate/security/attestation/`), and will still count at the request's deadline: evidence that ends while the answer
is computed would be no evidence for it. Every choice of a target leaves out the others
(`gateway/core/placement/eligibility.py`): the first, a fallback, a hedge, an escalation, a probe and the fallback
placer's. Where none is left the refusal says each one's reason.

Evidence belongs to one connection. It ends with it, and the next one begins with none.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf


@dataclass(frozen=True, slots=True)
class Attestation:
    """How a target stands. `until` is an instant of our own clock; before any evidence it is never."""

    why_not: str = "no evidence is asked of it: the gateway's configuration has no section `attestation`"
    until: float = -inf
    kind: str = ""
    key_id: str = ""
    expires_at: float = 0.0  # UTC seconds: `until`, for people

    def why_not_valid_at(self, deadline: float) -> str:
        """Why it does not count at that instant; "" when it does."""
        if self.until >= deadline:
            return ""
        return self.why_not or f"its evidence ends {_utc(self.expires_at)}, before the deadline"

    def __str__(self) -> str:
        """As answers say it."""
        return self.why_not or f"{self.kind}; key={self.key_id}; expires={_utc(self.expires_at)}"


ATTESTATION_OFF = Attestation()
CONNECTION_ENDED = Attestation("its evidence ended with the connection")


def _utc(instant_s: float) -> str:
    return f"{datetime.fromtimestamp(instant_s, UTC):%Y-%m-%dT%H:%M:%SZ}"
