"""The tokens of one attempt: those of the attempt that begins first go to the caller, all others' nowhere.

Two attempts may race to the first token. Nothing of an attempt is shown before the request machine has settled on it;
from then on its tokens and the caller's credit pass through here, and are noted in the answer so far, from which
another attempt can go on. An attempt that goes on with an answer counts its tokens from 0, and the caller from the
beginning.

A successor (`gateway/core/request/handover.py`) goes on with an answer of which another attempt still speaks. What it
repeats of that is compared and left out; it begins with the first token that the caller does not have. Tokens of the
other that are kept back wait here, and are given to the caller or to nobody, as the machine decides.

Where the model judges itself (`gateway/core/request/commit_window.py`) the first tokens of an attempt are held here
until the machine says that they are shown, or that the attempt is not needed. They are judged once there are enough.

Invariants: places follow one another, whoever speaks; once an attempt was left (`leave`) nothing of it reaches the
caller, whatever is still on its way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from gateway.core.estimate.token_gaps import TokenGaps
from gateway.core.request.answer_so_far import AnswerSoFar
from tidegate import clock
from tidegate.token_sink import MAX_WINDOW, TokenBatch, TokenSink


class BeginningJudge(NamedTuple):
    """Who is told of a beginning that is held back: at its first token, and once there are `tokens` of it."""

    tokens: int
    held: Callable[[], None]
    judged: Callable[[], None]
    hides_logprobs: bool  # the caller did not ask for them


class AttemptTokens:
    """A `TokenSink` between one attempt and the caller's.

    Args:
        sink: the caller's.
        answer: what the caller was given by this attempt and those before.
        begin: called with this at the first tokens; says whether this attempt is the one that answers.
        gaps: of its target and variant.
        differ: called where its tokens are others than those that the caller has.
        judge: of an attempt whose beginning is held back; None: it is shown as it comes.
    """

    __slots__ = (
        "_answer", "_answered", "_begin", "_credit", "_differ", "_gaps", "_held", "_is_chosen", "_is_judged", "_judge",
        "_kept", "_sink", "_started", "first_at", "wasted", "window",
    )  # fmt: skip

    def __init__(
        self,
        sink: TokenSink,
        answer: AnswerSoFar,
        begin: Callable[[AttemptTokens], bool],
        gaps: TokenGaps,
        differ: Callable[[], None] = lambda: None,
        judge: BeginningJudge | None = None,
    ) -> None:
        self._sink = sink
        self._answer = answer
        self._answered = len(answer)
        self._begin = begin
        self._gaps = gaps
        self._differ = differ
        self._judge = judge
        self._is_judged = False
        self._held: list[TokenBatch] = []  # of its beginning
        self._kept: list[TokenBatch] | None = None  # None: what comes is given at once
        self.first_at: float | None = None
        self._is_chosen: bool | None = None  # None: nothing has come yet
        self._started = 0, 0
        self._credit: Callable[[int], None] | None = None
        self.window = answer.window
        self.wasted = 0  # tokens that came and were not given to the caller

    @property
    def cached_tokens(self) -> int:
        """Of what this attempt was given to compute first: the prompt, and the tokens that it goes on after."""
        return self._started[1]

    @property
    def is_held(self) -> bool:
        """Whether it has a beginning that is neither shown nor left."""
        return self._is_chosen is None and bool(self._held)

    @property
    def is_judged(self) -> bool:
        return self._is_judged

    @property
    def beginning(self) -> list[float] | None:
        """The logarithms of the probabilities of the tokens that judge it; None where its target gives none."""
        assert self._judge is not None
        logprobs = [one for batch in self._held for one in batch.logprobs]
        is_known = len(logprobs) == sum([batch.size for batch in self._held])
        return logprobs[: self._judge.tokens] if is_known else None

    def started(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Kept until its first token is there: a prompt that is computed is no beginning of an answer."""
        self._started = prompt_tokens, cached_tokens

    def put(self, batch: TokenBatch) -> None:
        if self._is_chosen and self._kept is None:  # nearly always
            self._give(batch)
            return
        if self._is_chosen is None and self.first_at is None:
            self.first_at = clock.now()
            if self._judge is not None:
                self._judge.held()  # which may show it at once, or have no use for it
        if self._is_chosen is None:
            if self._judge is not None:
                self._hold(batch, self._judge)
                return
            if self._answered + batch.first < len(self._answer):
                repeated = self._repeats(batch)
                if repeated >= batch.size:
                    return
                batch = batch.beyond(repeated)
            self._is_chosen = self._begin(self)
            if self._is_chosen:
                self._speak()
        if not self._is_chosen:
            self.wasted += batch.size
        elif self._kept is not None:
            self._kept.append(batch)
        else:
            self._give(batch)

    def show(self) -> None:
        """The beginning that was held is given to the caller, and what comes."""
        self._is_chosen = True
        self._speak()
        held, self._held = self._held, []
        for batch in held:
            self._give(batch)
            self._answer.follows_nothing()

    def keep(self) -> None:
        """From now on what comes is given to nobody, until `release`."""
        self._kept = []

    def release(self) -> None:
        """What was kept is given to the caller, and what comes."""
        kept, self._kept = self._kept, None
        for batch in kept or ():
            self._answer.follows_nothing()
            self._give(batch)

    def _hold(self, batch: TokenBatch, judge: BeginningJudge) -> None:
        self._held.append(batch)
        enough = min(judge.tokens, self.window)  # no more may come before its reader has read some
        if not self._is_judged and sum([one.size for one in self._held]) >= enough:
            self._is_judged = True
            judge.judged()

    def _give(self, batch: TokenBatch) -> None:
        if self._judge is not None and self._judge.hides_logprobs:
            batch = batch._replace(logprobs=(), top=())
        self._answer.took(batch, self._gaps, clock.now())
        if self._answered:
            batch = batch._replace(first=self._answered + batch.first)
        self._sink.put(batch)

    def _repeats(self, batch: TokenBatch) -> int:
        """How many of these tokens the caller has; all of them where they are others than it has."""
        place = self._answered + batch.first
        repeated = min(batch.size, len(self._answer) - place)
        if batch.deltas or not self._answer.has(place, batch.ids):
            self.wasted += batch.size
            self._is_chosen = False
            self._differ()
            return batch.size
        self.wasted += repeated
        # It needs the credit of these tokens twice: as far as the reader has room, it gets it.
        if (more := min(repeated, self._answer.credit_beyond(self._answered + self.window))) and self._credit:
            self.window += more
            self._credit(more)
        return repeated

    def on_credit(self, credit: Callable[[int], None]) -> None:
        self._credit = credit

    def leave(self) -> None:
        """The attempt has ended or is not needed any more."""
        if self._is_chosen:
            self._answer.falls_silent()
        self._is_chosen = False
        kept, self._kept = self._kept, None
        held, self._held = self._held, []
        self.wasted += sum([batch.size for batch in (*held, *(kept or ()))])
        self._credit = None  # it holds this: what a request held would be there until garbage is collected

    def _speak(self) -> None:
        answer = self._answer
        if not self._answered:
            answer.prompt_tokens, answer.cached_tokens = self._started
            self._sink.on_credit(lambda count: answer.credited(count, clock.now()))
            self._sink.started(*self._started)
        answer.speaks(self._answered + self.window, self._credit, clock.now())

    def __repr__(self) -> str:
        state = {None: "nothing yet", True: "chosen", False: "not chosen"}[self._is_chosen]
        return f"<AttemptTokens {state}>"


class UnreadTokens:
    """A `TokenSink` for a caller that wants its answer in one piece: tokens come only to be gone on with."""

    __slots__ = ("_credit",)

    window = MAX_WINDOW

    def __init__(self) -> None:
        self._credit: Callable[[int], None] | None = None

    def started(self, prompt_tokens: int, cached_tokens: int) -> None:
        pass

    def put(self, batch: TokenBatch) -> None:
        if self._credit is not None:
            self._credit(batch.size)

    def on_credit(self, credit: Callable[[int], None]) -> None:
        self._credit = credit

    def __repr__(self) -> str:
        return "<UnreadTokens>"
