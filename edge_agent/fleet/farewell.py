"""An agent's goodbye says why it leaves: the word that the file `state_dir/leaving` has when the agent is stopped.

    runuser -u tidegate -- sh -c 'echo update > /var/lib/tidegate/state/leaving' && systemctl stop tidegate-edge

Signals have no reason, and an agent that is stopped for an update looks like one that is taken away. The word is read
once, as the agent ends, and removed; one that was never used is removed at the next start, so no later goodbye has it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, cast, get_args

import structlog

from edge_agent.core.reporting import Farewell

FILE_NAME: Final = "leaving"
_MOST_BYTES: Final = 64

log = structlog.get_logger(__name__)


def take_farewell(state_dir: Path) -> Farewell:
    """The reason that was written, which is removed; `shutdown` where there is none or it cannot be read."""
    path = state_dir / FILE_NAME
    try:
        with path.open("rb") as file:
            word = file.read(_MOST_BYTES).decode(errors="replace").strip()
    except OSError:
        return "shutdown"
    forget_farewell(state_dir)
    if word in get_args(Farewell):
        return cast(Farewell, word)
    known = ", ".join(get_args(Farewell))
    log.warning("unknown reason to leave", path=str(path), reason=word, known=known)
    return "shutdown"


def forget_farewell(state_dir: Path) -> None:
    """Remove a reason that was never used. A disk that takes no change keeps it, and says so elsewhere."""
    try:
        (state_dir / FILE_NAME).unlink(missing_ok=True)
    except OSError as error:
        log.info("the reason to leave stays", path=str(state_dir / FILE_NAME), reason=error.strerror)
