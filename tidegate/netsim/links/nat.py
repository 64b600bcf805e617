"""The binding that a NAT box keeps for a connection, and its idle timeout.

A box keeps a binding for as long as something passes, and forgets it after a time of silence, without notice to either
end. What is sent afterwards goes nowhere; both ends still think that they are connected. Only traffic within that time
(keepalive pings) prevents it, and only a timeout at an end detects it. One minute is common for mobile carriers
and cheap routers, though RFC 5382 asks for two hours and four minutes.

Invariant: once forgotten, forgotten for good; a real box may also answer with RST, which is kinder.
Source: Hätönen et al., "An experimental study of home gateway characteristics", IMC 2010 (TCP-1, binding timeouts).
"""

from __future__ import annotations


class NatBinding:
    """One connection's. Mutable: `passes` says whether it is still known, and counts as traffic when it is."""

    __slots__ = ("_idle_s", "_last_at", "forgotten")

    def __init__(self, idle_s: float, now: float) -> None:
        self._idle_s = idle_s
        self._last_at = now
        self.forgotten = False

    def passes(self, now: float) -> bool:
        """Whether bytes sent now, in either direction, get through."""
        if now - self._last_at > self._idle_s:
            self.forgotten = True
        if not self.forgotten:
            self._last_at = now
        return not self.forgotten

    def __repr__(self) -> str:
        return f"<NatBinding {self._idle_s:g} s{', forgotten' if self.forgotten else ''}>"
