"""What every way of proving who one is has in common: a credential in, an identity out, or a refusal that an audit
can use. What the caller is told and what the audit notes differ: only the latter says why."""

from __future__ import annotations

from tidegate.outcome import BadCredential


class UnprovedCredential(BadCredential):
    """A credential that proves nothing.

    Args:
        message: for the caller.
        reason: for the audit: "wrong", "expired", "revoked", ...
        who: the credential's public name; "" where it has none that could be believed.
    """

    def __init__(self, message: str, reason: str, who: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.who = who
