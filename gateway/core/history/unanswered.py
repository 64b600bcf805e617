"""One word says how a request without an answer ended, on every screen alike.

The code of an error is not enough: `deadline_exceeded` is a request that was never sent, as no target could be in time,
or one that two edges worked on until its deadline had passed. An operator looks for the cause in different places, so
the two have words of their own. Nothing that was sent to a target is called refused, unless the target refused it.
"""

from __future__ import annotations

from typing import Final, Literal

from tidegate.outcome import ERRORS, CallerError, CapacityError, Outcome, Overloaded

UnansweredWord = Literal["refused", "no answer in time", "failed", "deferred", "cancelled"]

_REFUSED_UNSENT: Final = frozenset(error.code for error in ERRORS if issubclass(error, CallerError | CapacityError))
_REFUSED_BY_TARGET: Final = frozenset(error.code for error in ERRORS if issubclass(error, CallerError | Overloaded))


def unanswered_word(code: str, *, attempted: bool) -> UnansweredWord:
    """Return the word for a request that ended in an error.

    Args:
        code: a label of `tidegate.outcome.Outcome`.
        attempted: whether it was sent to a target at all.
    """
    match code:
        case Outcome.CANCELLED:
            return "cancelled"
        case Outcome.DEFERRED:
            return "deferred"
        case Outcome.DEADLINE_EXCEEDED if attempted:
            return "no answer in time"
    return "refused" if code in (_REFUSED_BY_TARGET if attempted else _REFUSED_UNSENT) else "failed"
