"""The errors of a request that no target answers in time, by which the last rungs of declared degradation begin.

NothingAlive        no target serves the model, or none that may be asked
DeadlineExceeded    even the fastest target was predicted to be late, so that nothing was spent and time is left
Overloaded          every target refused
Unreachable         every target that was asked was lost
"""

from __future__ import annotations

from typing import Final

from tidegate.outcome import DeadlineExceeded, NothingAlive, Overloaded, Unreachable

NO_TARGET: Final = (NothingAlive, DeadlineExceeded, Overloaded, Unreachable)
