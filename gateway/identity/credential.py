"""The refusal that every kind of credential shares: a message for the caller and a reason for the audit.

The two differ on purpose: only the audit learns why a credential was refused.
"""

from __future__ import annotations

from tidegate.outcome import BadCredential


class UnprovedCredential(BadCredential):
    """A credential was refused.

    Args:
        message: for the caller.
        reason: for the audit: "wrong", "expired", "revoked", ...
        who: the credential's public name; "" if it has none that can be trusted.
    """

    def __init__(self, message: str, reason: str, who: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.who = who
