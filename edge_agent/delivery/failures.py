"""How a piece of a rollout's work ends when it does not succeed. The words begin with one for machines."""

from __future__ import annotations


class WorkFailed(Exception):
    """It cannot succeed: `edge_agent/core/rollout_machine.py`'s FAILED."""


class WorkDeferred(Exception):
    """The device spares something just now: DEFERRED."""


class WorkerExited(Exception):
    """The new generation's worker ended: WORKER_EXITED."""
