"""Dial-in admission decides from the hello of a stream that a device dialled whether the stream may stay.

A port that devices dial is open to all that reach it, so what a stream says of itself is compared with what is known:

- it is a device ("edge/NAME"), and the one that its certificate or key names, where one was asked for;
- without such a proof it is a device that the fleet knows, where there is a fleet to ask;
- one stream a name: the newer session (epoch) has it, and of two in one session the later, since a device dials again
  only when it has given the other up. A stream that claims a session older than one that is open is refused;
- a name is greeted `GREETINGS` times in `WITHIN_S` at most: a device that flaps, or two that claim one name in turn,
  keep their distance;
- of two live agents of one name the one stays that keeps it (`gateway/core/fleet/name_claims.py`), whatever its epoch;
- there are `max_streams` at most, and newcomers are refused, not others thrown out.

Invariant: at most one stream a name is let in. It can be wrong where nothing is proved: a client in the network that
names a device before it does has its place, as with its birth over an open broker.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

from tidegate.fleet.topics import is_name
from tidegate.types import TargetId

GREETINGS: Final = 10
WITHIN_S: Final = 10.0
_MOST_NAMES: Final = 4096  # whose greetings are counted


class DialInAdmission:
    """Mutable: `why_not_named` counts a greeting; `enter` and `leave` keep who is in."""

    def __init__(self, max_streams: int) -> None:
        self._max_streams = max_streams
        self._epochs: dict[str, int] = {}
        self._greetings: OrderedDict[str, deque[float]] = OrderedDict()

    def why_not_named(self, name: str, *, proven: str, known: bool, now: float) -> str:
        """Why a stream may not use this name; "" where it may. Counts a greeting.

        Args:
            name: as it says: "edge/NAME".
            proven: whose certificate or key it showed, in the same form; "" where none was asked for.
            known: whether the fleet knows the device, or there is none to ask.
        """
        tier, device = TargetId.parse(name)
        if tier != "edge" or not is_name(device):
            return "only devices dial here: a hello names edge/NAME"
        if proven and proven != name:
            return f"it says that it is {name} and shows the credential of {proven}"
        if not proven and not known:
            return f"{name} is not known to this fleet: its birth over MQTT has not been seen"
        if self._greets_too_often(name, now):
            return f"{name} has dialled {GREETINGS} times within {WITHIN_S:g} s"
        return ""

    def why_not_now(self, name: str, epoch: int, *, keeps_name: bool = False) -> str:
        """Why the stream is refused although it may use the name; "" when it is let in.

        Args:
            keeps_name: whether two agents claim the name, and this one keeps it.
        """
        if epoch < self._epochs.get(name, 0) and not keeps_name:
            return f"a newer session of {name} is here: epoch {self._epochs[name]}, not {epoch}"
        if name not in self._epochs and len(self._epochs) >= self._max_streams:
            return f"{len(self._epochs)} devices have dialled in; max_dialled_in allows no more"
        return ""

    def enter(self, name: str, epoch: int) -> None:
        self._epochs[name] = epoch

    def leave(self, name: str) -> None:
        self._epochs.pop(name, None)

    def _greets_too_often(self, name: str, now: float) -> bool:
        greetings = self._greetings.setdefault(name, deque(maxlen=GREETINGS))
        self._greetings.move_to_end(name)
        if len(self._greetings) > _MOST_NAMES:
            self._greetings.popitem(last=False)
        if len(greetings) == GREETINGS and now - greetings[0] < WITHIN_S:
            return True
        greetings.append(now)
        return False

    def __repr__(self) -> str:
        return f"<DialInAdmission {len(self._epochs)} of {self._max_streams} streams>"
