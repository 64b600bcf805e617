"""The dial policy selects the gateways that the device dials: those that do not reach it by themselves.

A device cannot know from inside whether its address can be dialled from outside; a gateway that dials it is the proof.
So it waits `patience_s` for each gateway's own stream, and dials those whose stream has not come, or is gone that long.
What was learned is kept: a gateway that had to be dialled once is dialled at once when the stream is lost, since a
wait would only delay requests. When the gateway's own stream comes after all, the dialled one is left in order, once
the other has stood for `steady_s`: the direct path is preferred, and the two must not alternate.

    auto     as above        a gateway whose name is not known yet is dialled once, to hear it
    always   all of them, at once
    never    none

A gateway's own report that it cannot reach the device is not used: it would come over a broker that may be away, and
would still have to be checked by a dial. The missing stream is seen in every case, also where no gateway could report.

It can be wrong where a gateway is merely slow to dial: then a stream is dialled and left again, which costs little.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf
from typing import Final, Literal

DialOut = Literal["auto", "always", "never"]

PATIENCE_S: Final = 3.0
STEADY_S: Final = 2.0
MOST_GATEWAYS: Final = 64


@dataclass(slots=True)
class _GatewayReachability:
    missed_since: float  # inf while its own stream is here
    here_since: float = inf
    needed: bool = False  # whether it had to be dialled before


class DialPlan:
    """Mutable: `addresses_to_dial` returns the addresses to dial or to keep dialled."""

    def __init__(self, mode: DialOut, *, patience_s: float = PATIENCE_S, steady_s: float = STEADY_S) -> None:
        self._mode = mode
        self._patience_s = patience_s
        self._steady_s = steady_s
        self._seen: dict[str, _GatewayReachability] = {}

    def addresses_to_dial(self, gateways: Mapping[str, str], callers: Collection[str], now: float) -> frozenset[str]:
        """The addresses to dial.

        Args:
            gateways: address → the name that it answers as, "gateway/NAME"; "" where it is not known yet.
            callers: gateways that have a stream here that they dialled themselves.
        """
        if self._mode == "never":
            return frozenset()
        known = list(gateways.items())[:MOST_GATEWAYS]
        if self._mode == "always":
            return frozenset(address for address, _ in known)
        self._seen = {address: self._seen.get(address, _GatewayReachability(now)) for address, _ in known} | {
            address: seen for address, seen in self._seen.items() if seen.needed
        }
        if len(self._seen) > 2 * MOST_GATEWAYS:
            self._seen = {address: self._seen[address] for address, _ in known}
        return frozenset(address for address, name in known if self._is_wanted(self._seen[address], name, callers, now))

    def _is_wanted(self, seen: _GatewayReachability, name: str, callers: Collection[str], now: float) -> bool:
        if name and name in callers:
            seen.missed_since, seen.here_since = inf, min(seen.here_since, now)
            if now - seen.here_since >= self._steady_s:
                seen.needed = False
        else:
            seen.missed_since, seen.here_since = min(seen.missed_since, now), inf
            if now - seen.missed_since >= self._patience_s:
                seen.needed = True
        return seen.needed

    def __repr__(self) -> str:
        needed = sorted(address for address, seen in self._seen.items() if seen.needed)
        return f"<DialPlan {self._mode}, to dial: {', '.join(needed) or 'none'}>"
