"""The refusal of one request by a step: an answer to its caller, and nothing to anybody else."""

from __future__ import annotations


class StepRefused(Exception):
    """A step could not do this request; the message names the step, for the caller to read.

    It would fail elsewhere as well, and the worker is whole: so it is the caller's error and not the target's.
    """


class StepTooLate(StepRefused):
    """A step was ended since it would have taken more than was left of the request's budget.

    With more time it might have ended by itself: so it is late, and nobody's error.
    """
