"""An edge agent that dies by SIGKILL at a given point of a rollout; all else is the real one.

TIDEGATE_TEST_DIE_AT names the point: `before:STATE` and `after:STATE` are around the journal's write of that state,
`commit` is between the commit on disk and the journal, `write:N` is at the Nth write, before or after it by N's parity.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from edge_agent.__main__ import edge
from edge_agent.core.rollout_machine import Rollout
from edge_agent.delivery.journal import DeploymentJournal
from edge_agent.delivery.model_store import Generation, ModelStore


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(point: str) -> None:
    write, commit, count = DeploymentJournal.write, ModelStore.commit, 0

    def dying_write(self: DeploymentJournal, rollout: Rollout) -> None:
        nonlocal count
        count += 1
        number = f"write:{count}"
        if point == f"before:{rollout.state}" or (point == number and count % 2):
            die()
        write(self, rollout)
        if point in (f"after:{rollout.state}", number):
            die()

    def dying_commit(self: ModelStore, generation: Generation) -> None:
        commit(self, generation)
        if point == "commit":
            die()

    _put(DeploymentJournal, "write", dying_write)
    _put(ModelStore, "commit", dying_commit)


def _put(owner: type, name: str, function: Callable[..., None]) -> None:
    setattr(owner, name, function)


if __name__ == "__main__":
    die_at(os.environ.get("TIDEGATE_TEST_DIE_AT", ""))
    edge(prog_name="dying edge")
