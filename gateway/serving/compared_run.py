"""A compared run is a greedy generation that is ended at its first token which is not the expected one.

What comes behind a difference is of no use (`gateway/core/agreement/token_comparison.py`), so the target is told to
stop, and what it computed meanwhile is all that a difference costs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

from gateway.core.agreement.token_comparison import MOST_POSITIONS
from tidegate.generate.request import OUTPUT_IDS, ids_of
from tidegate.generate.teacher_forcing import KnownTextSink, TextDiffers
from tidegate.generate.usage import usage_of
from tidegate.outcome import BadAnswer, InvalidRequest
from tidegate.token_sink import TokenBatch
from tidegate.types import Reply


class ComparedRun(KnownTextSink):
    """A `TokenSink` of one run. Its window is the whole run.

    Args:
        expected: the tokens that it gives if it agrees.
    """

    __slots__ = ("_limit", "differs")

    def __init__(self, expected: Sequence[int]) -> None:
        super().__init__(expected, MOST_POSITIONS)
        self.differs = False
        self._limit: asyncio.Timeout | None = None

    def put(self, batch: TokenBatch) -> None:
        """Take the next tokens. What is called here by a link must not raise: it is the answer's task that does."""
        if self.differs:
            return
        try:
            super().put(batch)
        except TextDiffers:
            self.differs = True
            if self._limit is not None:
                self._limit.reschedule(0.0)  # long ago: it ends at once

    async def until_it_differs(self, answer: Awaitable[Reply]) -> Reply:
        """The answer. Raises TextDiffers, and cancels it, where a token is not the expected one."""
        try:
            async with asyncio.timeout(None) as self._limit:
                return await answer
        except TimeoutError:
            if not self.differs:  # it is somebody else's
                raise
            raise TextDiffers from None
        finally:
            self._limit = None


def tokens_of(reply: Reply) -> tuple[tuple[int, ...], bool]:
    """The ids of a generation, and whether a stop token ended it. Raises BadAnswer: it has none."""
    output = next((one for one in reply.response.outputs if one.name == OUTPUT_IDS), None)
    if output is None:
        raise BadAnswer(f"a generation without {OUTPUT_IDS!r} cannot be compared")
    try:
        return ids_of(output), usage_of(reply.response).finish_reason == "stop"
    except InvalidRequest as error:
        raise BadAnswer(error.message) from error
