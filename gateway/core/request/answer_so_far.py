"""An answer so far: the ids of the tokens that a stream's caller was given, and how far its reader lets it go on.

It is all that is needed to have an answer gone on with elsewhere: ids and no text, four bytes each, never more than
the model's context. One target after another may speak; each has the reader's credit that is left when it is asked:

    granted    the reader's window, and the credit that it gave since
    allowed    how far the target that speaks may go: `granted`, but one token at least where a target begins

A reader that has taken nothing of its credit pauses its answer, and that silence is the reader's own.

A target of another maker may give words and no ids. They are counted, and cannot be gone on with.

Invariants: ids are only added; `allowed` of a target that speaks never falls behind `granted`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from gateway.core.estimate.token_gaps import TokenGaps
from tidegate.token_sink import TokenBatch


class AnswerSoFar:
    """Mutable: `speaks` by each target that begins, `took` with its tokens, `credited` by the reader.

    Args:
        window: tokens that the reader takes before it has read any.
    """

    __slots__ = (
        "_allowed", "_credit", "_follows", "_given", "_granted", "began_at", "cached_tokens", "heard_at", "ids",
        "prompt_tokens",
    )  # fmt: skip

    def __init__(self, window: int) -> None:
        self.ids = array("i")
        self.prompt_tokens = 0  # as the first target that spoke counted them
        self.cached_tokens = 0  # of those
        self.began_at = 0.0  # the first token came
        self.heard_at = 0.0  # the last token came, or the reader's credit after a pause
        self._given = 0  # tokens, with those that came as words
        self._granted = self._allowed = window
        self._follows = False  # whether the next token has one before it, by which its gap is known
        self._credit: Callable[[int], None] | None = None  # of the target that speaks

    def __len__(self) -> int:
        """Tokens that the caller was given."""
        return self._given

    @property
    def has_words(self) -> bool:
        """Whether some came as words, whose ids are not known."""
        return self._given != len(self.ids)

    @property
    def is_paused(self) -> bool:
        """Whether no token may come before the reader has read some."""
        return self._given >= self._allowed

    @property
    def window(self) -> int:
        """Tokens that a target that is asked now may give before it needs credit."""
        return max(1, self._granted - self._given)

    def has(self, place: int, ids: Sequence[int]) -> bool:
        """Whether these are the tokens from `place` on, as far as there are any."""
        return tuple(self.ids[place : place + len(ids)]) == tuple(ids[: max(0, len(self) - place)])

    def credit_beyond(self, allowed: int) -> int:
        """Tokens that the reader lets come beyond `allowed`."""
        return max(0, self._granted - allowed)

    def silent_s(self, now: float) -> float:
        """For how long no token has come from the target that speaks, though it could."""
        return 0.0 if self.is_paused else now - self.heard_at

    def speaks(self, allowed: int, credit: Callable[[int], None] | None, now: float) -> None:
        """A target begins to give the tokens from here on. Args: allowed: how far it may go without credit."""
        self._allowed, self._credit, self._follows, self.heard_at = allowed, credit, False, now
        self._hand_on()

    def falls_silent(self) -> None:
        """The target that spoke is asked no more."""
        self._credit = None

    def follows_nothing(self) -> None:
        """The next token was kept back: when it is given says nothing of its target's pace."""
        self._follows = False

    def took(self, batch: TokenBatch, gaps: TokenGaps, now: float) -> None:
        """These tokens were given to the caller."""
        if self._follows:
            gaps.record(now - self.heard_at)
        elif not self._given:
            self.began_at = now
        self._follows = True
        self.heard_at = now
        ids = batch.ids
        if len(ids) == 1:  # nearly always, and half the cost
            self._given += 1
            self.ids.append(ids[0])
            return
        self._given += batch.size
        self.ids.extend(ids)

    def credited(self, tokens: int, now: float) -> None:
        """The reader has read so many tokens."""
        self._granted += tokens
        if self._credit is None:
            return
        if self.is_paused:
            self._follows, self.heard_at = False, now
        self._hand_on()

    def _hand_on(self) -> None:
        more = self._granted - self._allowed
        if more > 0 and self._credit is not None:
            self._allowed = self._granted
            self._credit(more)

    def __repr__(self) -> str:
        return f"<AnswerSoFar {self._given} tokens{', paused' if self.is_paused else ''}>"
