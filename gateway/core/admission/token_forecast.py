"""A token forecast says what a generation will take of its tenant's tokens, as far as that is known beforehand.

Pure.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple


class TokenForecast(NamedTuple):
    """The tokens of a generation before it begins; `expected` and `most` are of its answer."""

    prompt: int
    expected: float
    most: int

    def reserved(self, *, is_streamed: bool) -> int:
        """The tokens to pay for first: what is not read as it comes cannot be cut, so all that it may have."""
        return self.prompt + (ceil(self.expected) if is_streamed else self.most)
