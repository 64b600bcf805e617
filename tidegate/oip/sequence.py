"""The sequence that a request belongs to: the OIP parameters `sequence_id`, `sequence_start` and `sequence_end`.

As Triton has them: an integer from 1 or a text; 0 and "" mean none, and then the other two say nothing.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from tidegate.outcome import InvalidRequest
from tidegate.types import Parameters

ID_KEY: Final = "sequence_id"
START_KEY: Final = "sequence_start"
END_KEY: Final = "sequence_end"
MAX_ID_CHARACTERS: Final = 128


class SequenceStep(NamedTuple):
    """One request of a sequence."""

    id: int | str
    start: bool
    end: bool


def sequence_of(parameters: Parameters) -> SequenceStep | None:
    """The step that a request is; None for one that belongs to no sequence. Raises InvalidRequest."""
    id = parameters.get(ID_KEY, 0)
    if isinstance(id, bool | float) or (isinstance(id, int) and not 0 <= id < 1 << 64):
        raise InvalidRequest(f"parameter {ID_KEY!r} must be an integer from 0 to 2^64 - 1 or a text, not {id!r}")
    if isinstance(id, str) and len(id) > MAX_ID_CHARACTERS:
        raise InvalidRequest(f"parameter {ID_KEY!r} has {len(id)} characters, at most {MAX_ID_CHARACTERS} may be")
    if not id:
        return None
    return SequenceStep(id, _flag(parameters, START_KEY), _flag(parameters, END_KEY))


def _flag(parameters: Parameters, key: str) -> bool:
    value = parameters.get(key, False)
    if not isinstance(value, bool):
        raise InvalidRequest(f"parameter {key!r} must be true or false, not {value!r}")
    return value
