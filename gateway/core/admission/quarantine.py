"""Quarantine refuses a tenant for a minute after its requests brought engines down three times within a minute.

A request that brings an engine down costs a pool its worker twice and all others some seconds; isolation
(`cloud_pool/core/batching/isolation.py`) saves the batch-mates, but not the time. The pool knows which request it was,
the gateway knows its tenant and sees all pools, so it is decided here.

    blame        a target says that this request failed by itself (`Poisonous`), with its instant
    suspect      the tenant, if the caller named one; else what was asked: the anonymous tenant is shared
    quarantine   TIMES blames within WINDOW_S: refused before admission, for FOR_S from the last of them

A broken target fails every request that is alone on it, and would have us refuse all its callers. So its blame counts
only if it has answered a request since its last blame: what works for others and fails for one is that one's fault.

Invariants: no suspect is refused for fewer than TIMES blames; a target that answers nothing adds one blame at most; at
most MOST suspects are remembered, the longest unblamed are forgotten. O(1).

It can be wrong where names are shared: a tenant is what its callers say, and one caller of a name is enough.
Source: docs/design/faults.md, "Quarantine".
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

TIMES: Final = 3
WINDOW_S: Final = 60.0
FOR_S: Final = 60.0
MOST: Final = 1024

Suspect = str | int  # a tenant's name, or a fingerprint of what was asked


class Quarantine:
    """Mutable: `blamed` and `answered` as targets report, `left_s` to read."""

    def __init__(self) -> None:
        self.begun = 0
        self.refused = 0
        self._blames: OrderedDict[Suspect, deque[float]] = OrderedDict()
        self._doubted: set[str] = set()  # targets that have answered nothing since their last blame

    def blamed(self, suspect: Suspect, target: str, now: float) -> bool:
        """Note a target's blame; returns whether a quarantine begins with it."""
        if target in self._doubted:
            return False
        if len(self._doubted) >= MOST:  # of targets that come and go; each may blame anew
            self._doubted.clear()
        self._doubted.add(target)
        blames = self._blames.setdefault(suspect, deque(maxlen=TIMES))
        self._blames.move_to_end(suspect)
        was_in = self._is_in(blames, now)
        blames.append(now)
        if len(self._blames) > MOST:
            self._blames.popitem(last=False)
        begins = self._is_in(blames, now) and not was_in
        self.begun += begins
        return begins

    def answered(self, target: str) -> None:
        """The target has answered a request."""
        self._doubted.discard(target)

    def left_s(self, suspect: Suspect, now: float) -> float:
        """How long the suspect is still refused; 0 for all others."""
        blames = self._blames.get(suspect)
        if blames is None or not self._is_in(blames, now):
            return 0.0
        return blames[-1] + FOR_S - now

    def __bool__(self) -> bool:
        """Whether any suspect is remembered: while none is, there is nothing to look up."""
        return bool(self._blames)

    @staticmethod
    def _is_in(blames: deque[float], now: float) -> bool:
        return len(blames) == TIMES and blames[-1] - blames[0] <= WINDOW_S and now < blames[-1] + FOR_S

    def __repr__(self) -> str:
        return f"<Quarantine {len(self._blames)} suspects, {self.begun} begun, {len(self._doubted)} targets in doubt>"
