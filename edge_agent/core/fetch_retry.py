"""The fetch retry rules decide after each answer, cut or bad chunk whether a download goes on, waits or ends.

- a cut link or an unreachable server: wait and try again, for as long as the deadline allows; a lost link counts as
  no failure
- 408, 425, 429, 5xx: the server is overloaded; wait too, and count an attempt
- the same with a Retry-After: the server has a queue, and says when to come back; try again then, and count nothing,
  since a thousand devices behind one server may well get this answer for an hour
- 401, 403, 404, 410 and every other refusal: this server will keep refusing; try the next one, and when all have
  refused the download is over
- a chunk with another digest: dropped and fetched again, BAD_CHUNKS times in a row; then the server has other content

An attempt is a failure without a new chunk since the one before. The byte budget counts what came over the network,
whether it could be used or not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from tidegate.rollout.plan import Net

BAD_CHUNKS: Final = 3
_TRANSIENT: Final = frozenset({408, 416, 425, 429})
RETRY_AFTER_MAX_S: Final = 300.0


def is_transient(status: int) -> bool:
    """Whether a server that answered with this status may answer otherwise a little later."""
    return status in _TRANSIENT or 500 <= status < 600


@dataclass(slots=True)
class DownloadBudget:
    """Mutable: what one plan's download has used of its limits. `record_*` return why it is over, "" while it is not.

    Args:
        max_bytes: most bytes fetched in all; fetched_bytes: those so far, also before this start of the agent.
        servers: how many servers there are.
    """

    rules: Net
    max_bytes: int
    servers: int
    fetched_bytes: int = 0
    attempts: int = 0
    bad_chunks: int = 0
    cuts: int = 0  # failures in a row of any kind, for the backoff
    _refused: set[int] = field(default_factory=set)  # the servers that did, since the last new chunk

    def record_bytes(self, count: int) -> str:
        self.fetched_bytes += count
        if self.fetched_bytes > self.max_bytes:
            return f"byte_budget: {self.fetched_bytes} bytes were fetched, at most {self.max_bytes} may be"
        return ""

    def record_chunk(self) -> None:
        """Record a complete chunk with the right digest."""
        self.attempts = self.bad_chunks = self.cuts = 0
        self._refused.clear()

    def record_cut(self) -> None:
        self.cuts += 1

    def record_status(self, status: int, *, server: int = 0, asked_back: bool = False) -> str:
        """Record an answer without content. `server`: which one gave it, from 0; a server that refuses twice is one."""
        self.cuts += 1
        if not is_transient(status):
            self._refused.add(server)
            return f"http_{status}: every server refused" if len(self._refused) >= self.servers else ""
        return "" if asked_back else self._attempt(f"http_{status}")

    def record_bad_chunk(self, number: int) -> str:
        self.cuts += 1
        self.bad_chunks += 1
        if self.bad_chunks >= BAD_CHUNKS:
            return f"chunk_digest: chunk {number} came {self.bad_chunks} times with another digest than the signed one"
        return self._attempt("chunk_digest")

    def _attempt(self, what: str) -> str:
        self.attempts += 1
        if self.attempts >= self.rules.max_attempts:
            return f"{what}: no progress in {self.attempts} attempts"
        return ""
