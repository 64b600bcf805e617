"""Teacher forcing: at each position of a known answer, whether a model's likeliest token is the known one.

Greedy texts that differ in one token differ in most that follow, so a comparison of whole texts says little beyond its
first difference. Here each position is judged behind the *known* tokens before it. No engine has to score a given text
for that: a greedy run goes along the known answer for as long as it agrees, and behind the first difference a new run
begins with the known tokens up to there.

    known      a b c d e f g      run 1: a b X …       differs at 2; what comes behind X is not looked at
                                  run 2:       d e f g     behind a b c        6 of 7 positions agree

So an answer takes one run more than it has differences, each a prompt to compute again; a run is ended at its first
difference. A stop token that ended the known answer is one more position.

Where log-probabilities come with the tokens, the perplexity of the known answer is counted. A known token that is not
among the likeliest counts as the last of those: the figure is then a lower bound.

Pure.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from math import exp

import msgspec

from tidegate.generate.request import GenerateRequest
from tidegate.generate.usage import Generated
from tidegate.token_sink import TokenBatch, TokenSink, TopLogprob

Generate = Callable[[GenerateRequest, TokenSink], Awaitable[Generated]]


class KnownAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prompt and a greedy answer to it, as token ids. One of `ids` and `stopped` is not empty."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]  # without a stop token
    stopped: bool = False  # whether a stop token came next; otherwise the answer was cut there

    @property
    def positions(self) -> int:
        return len(self.ids) + self.stopped

    def __repr__(self) -> str:
        return f"<KnownAnswer {len(self.prompt)}+{len(self.ids)} tokens{', stopped' if self.stopped else ''}>"


class TokenAgreement(msgspec.Struct, frozen=True):
    """How far a model agrees with one known answer, or with several."""

    positions: int = 0
    agreed: int = 0
    answers: int = 0
    leading: int = 0  # positions before the first difference of each answer, in all
    equal: int = 0  # answers without a difference
    scored: int = 0  # positions with a log-probability
    logprob: float = 0.0  # of the known tokens, in all

    @property
    def share(self) -> float:
        """Of the positions that agree; 1 where there are none."""
        return self.agreed / self.positions if self.positions else 1.0

    @property
    def perplexity(self) -> float | None:
        """Of the known tokens under the model; None where no log-probabilities were asked for."""
        return exp(-self.logprob / self.scored) if self.scored else None

    def __str__(self) -> str:
        return (
            f"{self.agreed} of {self.positions} tokens ({self.share:.4f}), {self.equal} of {self.answers} answers "
            "without a difference"
        )


def total(agreements: Iterable[TokenAgreement]) -> TokenAgreement:
    """All of them together."""
    every = [msgspec.structs.asdict(one) for one in agreements]
    return TokenAgreement(**{key: sum(one[key] for one in every) for key in every[0]}) if every else TokenAgreement()


class TextDiffers(Exception):
    """The text is not the known one any more; what raises it has all that is wanted of the run."""


class KnownTextSink:
    """A `TokenSink` that raises at the first token which is not the known one. Its window is the whole text."""

    __slots__ = ("_known", "ids", "likeliest", "window")

    def __init__(self, known: Sequence[int], window: int) -> None:
        self.window = window
        self.ids: list[int] = []
        self.likeliest: list[tuple[TopLogprob, ...]] = []
        self._known = known

    def started(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Nothing: only the tokens are wanted."""

    def put(self, batch: TokenBatch) -> None:
        self.ids += batch.ids
        self.likeliest += batch.top
        if tuple(self.ids) != tuple(self._known[: len(self.ids)]):
            raise TextDiffers

    def on_credit(self, credit: Callable[[int], None]) -> None:
        """Nothing: the window is large enough."""

    def __repr__(self) -> str:
        return f"<KnownTextSink {len(self.ids)} of {len(self._known)} tokens>"


class TeacherForcing:
    """Mutable: `judge_next()` until it `is_judged`; or ask for `next_request()`, and `take` what came of it.

    Args:
        logprobs: how many likeliest tokens are asked for in each place; 0: no log-probabilities.
    """

    __slots__ = ("_agreed", "_at", "_known", "_leading", "_logprob", "_logprobs", "_scored")

    def __init__(self, known: KnownAnswer, *, logprobs: int = 0) -> None:
        self._known = known
        self._logprobs = logprobs
        self._at = 0  # the first position that is not judged
        self._agreed = 0
        self._leading: int | None = None  # None: there was no difference
        self._scored = 0
        self._logprob = 0.0

    def next_request(self) -> GenerateRequest | None:
        """The greedy run behind what is judged; None when all is."""
        known, left = self._known, self._known.positions - self._at
        if left == 0:
            return None
        return GenerateRequest(known.prompt + known.ids[: self._at], left, logprobs=self._logprobs or None)

    def take(self, ids: Sequence[int], *, stopped: bool, likeliest: Sequence[Sequence[TopLogprob]] = ()) -> None:
        """Judge the answer to the last request.

        Args:
            ids: without a stop token.
            stopped: whether a stop token ended it.
            likeliest: for each of the ids, the likeliest tokens in its place.
        """
        known = self._known.ids
        for index, id in enumerate(ids):
            if index < len(likeliest) and self._at < len(known):
                self._score(known[self._at], likeliest[index])
            if self._at >= len(known) or id != known[self._at]:
                self._differs()
                return
            self._at, self._agreed = self._at + 1, self._agreed + 1
        if self._at == self._known.positions:
            return
        if stopped and self._at == len(known):
            self._at, self._agreed = self._at + 1, self._agreed + 1
        else:  # it stopped too early, or was cut by something else: either way the known token did not come
            self._differs()

    @property
    def is_judged(self) -> bool:
        return self._at == self._known.positions

    async def judge_next(self, generate: Generate) -> None:
        """Judge the next run, which `generate` computes with its tokens put into a sink meanwhile.

        Args:
            generate: ends a generation whose sink raises, and raises the same.
        """
        request = self.next_request()
        if request is None:
            return
        sink = KnownTextSink(self._known.ids[self._at :], request.max_tokens)
        try:
            stopped = (await generate(request, sink)).usage.finish_reason == "stop"
        except TextDiffers:
            stopped = False
        self.take(sink.ids, stopped=stopped, likeliest=sink.likeliest)

    @property
    def agreement(self) -> TokenAgreement:
        """Of the positions that are judged."""
        leading = self._at if self._leading is None else self._leading
        equal = int(self._leading is None)
        return TokenAgreement(
            self._at, self._agreed, answers=1, leading=leading, equal=equal, scored=self._scored, logprob=self._logprob
        )

    def _differs(self) -> None:
        if self._leading is None:
            self._leading = self._at
        self._at += 1

    def _score(self, id: int, likeliest: Sequence[TopLogprob]) -> None:
        if likeliest:
            found = next((one.logprob for one in likeliest if one.id == id), likeliest[-1].logprob)
            self._scored, self._logprob = self._scored + 1, self._logprob + found

    def __repr__(self) -> str:
        return f"<TeacherForcing {self._agreed} of {self._at} agree, {self._known.positions - self._at} to go>"
