"""`GenerativeEngine` is the interface of every runtime that generates text: sequences begin, are stepped, and end.

Engines live in worker processes, where blocking is fine and a crash is cheap (`tidegate/workers`). They know tokens
only. One thread calls an engine: it begins a sequence when one arrives, and steps those that are due for as long as
there are any; between two steps it looks for new ones and for cancellations, so a step should take no longer than one
token of a batch does, and a long prompt no more than a chunk of it at a time where the runtime can.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tidegate.generate.request import GenerateRequest
from tidegate.generate.usage import FinishReason
from tidegate.token_sink import TokenBatch


class SequenceProgress(NamedTuple):
    """What became of one sequence in a step."""

    id: int
    batch: TokenBatch | None = None  # its new tokens
    cached_tokens: int = 0  # of the prompt; said with the first batch, or with the end where it is known only then
    finished: FinishReason | None = None  # it has ended, and is forgotten here
    error: str = ""  # it has ended for this, and is forgotten here
    refused: bool = False  # it asks for what the engine cannot do: the error is of the request, and not of the engine
    stop_token: bool = False  # whether a stop token, which is not in the batch, ended it


class GenerativeEngine(Protocol):
    """One loaded model. None of the methods may be called from two threads."""

    @property
    def slots(self) -> int:
        """The number of sequences that it takes at a time."""
        ...

    def begin(self, id: int, request: GenerateRequest) -> None:
        """Take in a sequence; nothing of it is computed yet.

        Raises:
            EngineError: the request cannot be computed: a token that the vocabulary lacks, a schema that the runtime
                does not understand, a prompt over the context.
        """
        ...

    def step(self, due: Sequence[int]) -> list[SequenceProgress]:
        """Advance these sequences by about a token each, and return what is new of any sequence. Blocks.

        Args:
            due: ids of sequences that have begun and may go on, the most urgent first. An engine whose batch is smaller
                takes the first of them; the others have their turn next. One that is not named is paused: an engine
                that cannot pause a sequence may go on with it.

        Raises:
            EngineError: the runtime failed; no sequence can go on.
        """
        ...

    def cancel(self, id: int) -> None:
        """Drop a sequence and free what it holds; one that is not known is ignored."""
        ...
