"""The words and times by which gateways and devices settle which of two agents keeps a name that both claim.

A gateway that refuses an agent says so over MQTT (the command `name_taken`) or as the end of the stream that the agent
dialled, with a text that begins with `NAME_TAKEN`. The refused agent stays away for `FIRST_STAND_DOWN_S`, and twice as
long each time that it is refused again.
"""

from __future__ import annotations

from typing import Final

NAME_TAKEN: Final = "another live agent has this name"
# Three quarters of it, the shortest wait, are more than the 30 s that an agent waits at most before it takes its
# session back. Otherwise the refused one would be back first, find nobody, and be given the name.
FIRST_STAND_DOWN_S: Final = 60.0
MOST_STAND_DOWN_S: Final = 600.0
MOST_WORDS: Final = 256


def is_name_taken(reason: str) -> bool:
    """Whether a stream's end says that the name is another agent's."""
    return NAME_TAKEN in reason
