"""These exceptions end a rollout step without success. Each message begins with a reason code for machines."""

from __future__ import annotations


class WorkFailed(Exception):
    """The step cannot succeed: FAILED in `edge_agent/core/rollout_machine.py`."""


class WorkDeferred(Exception):
    """A precondition on the device does not hold now: DEFERRED."""


class WorkerExited(Exception):
    """The new generation's worker ended: WORKER_EXITED."""
