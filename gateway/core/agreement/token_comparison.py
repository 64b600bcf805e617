"""Token comparison: how far two variants of a generating model disagree, from one greedy answer of one of them.

Two greedy texts that differ in one token differ in most that follow, so texts are not compared. The *known* answer of
one variant is followed by greedy runs of the other (`tidegate/generate/teacher_forcing.py`): each position is judged
behind the known tokens before it, and a run is ended at its first difference. So an answer costs one run more than it
has differences, which is why it is left at the `MOST_DIFFERENCES`-th one and after `MOST_POSITIONS`.

    ended by                        score
    its last position, n in all     differences / n
    the r-th difference, at n       (r − 1) / (n − 1)

The second is what the share of differences is on average where one stops at the r-th: r / n would be too large, and
accuse devices that agree (Girshick, Mosteller, Savage, "Unbiased estimates for certain binomial sampling problems",
1946). To stop early serves another end as well: broken weights often say one word again and again, and behind ten times
the same word every model goes on with it. The first positions tell.

An answer that was sampled is not compared, nor one that followed a schema, had stop tokens of its own or none, or went
on with another answer: its prompt is (`greedy_prompt`), by a greedy answer that its device is asked for.

It can be wrong where positions at the beginning of an answer differ more often by nature than later ones, which are
more of the recorded share: docs/agreement.md has the spread of a real model.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from tidegate.generate.request import OUTPUT_IDS, GenerateRequest, generate_request, ids_of
from tidegate.generate.teacher_forcing import KnownAnswer, TeacherForcing
from tidegate.generate.usage import usage_if_generated
from tidegate.models.generative import Generative
from tidegate.outcome import InvalidRequest
from tidegate.types import InferRequest, InferResponse

MOST_POSITIONS: Final = 32
MOST_DIFFERENCES: Final = 3
MOST_PROMPT: Final = 2048  # tokens, each of which is computed again for each run


class GreedyPrompt(NamedTuple):
    """What a greedy answer is asked for."""

    request: GenerateRequest  # of at most `MOST_POSITIONS` tokens
    is_own: bool  # whether the caller's own answer begins as the greedy one does


def greedy_prompt(request: InferRequest, model: Generative) -> GreedyPrompt | None:
    """The prompt whose greedy answers are compared; None where it is not known as ids, or too long."""
    if any(one.elements > MOST_PROMPT for one in request.inputs):
        return None  # before it is unpacked, which is done on the way of its caller
    try:
        asked = generate_request(request, default_max_tokens=MOST_POSITIONS)
    except InvalidRequest:
        return None
    room = model.context - len(asked.prompt)
    if model.is_text_only or room < 1:
        return None
    greedy = GenerateRequest(asked.prompt, min(MOST_POSITIONS, room))
    changed = asked.schema or asked.stop_tokens or asked.ignore_stop or asked.answered
    return GreedyPrompt(greedy, is_own=not (asked.sampling.temperature or changed))


def known_answer(prompt: GreedyPrompt, response: InferResponse, model: Generative) -> KnownAnswer | None:
    """The beginning of a greedy answer that another variant is to follow; None where it has no tokens.

    It ends with the first id that is none of the vocabulary, which no variant follows.
    """
    output = next((one for one in response.outputs if one.name == OUTPUT_IDS), None)
    usage = usage_if_generated(response)
    if output is None or usage is None:
        return None
    try:
        ids = ids_of(output)
    except InvalidRequest:
        return None
    known = ids[:MOST_POSITIONS]
    strange = next((at for at, id in enumerate(known) if not 0 <= id < model.vocabulary_size), None)
    if strange is not None:
        return KnownAnswer(prompt.request.prompt, known[: strange + 1])
    stopped = usage.finish_reason == "stop" and len(ids) < MOST_POSITIONS
    return KnownAnswer(prompt.request.prompt, known, stopped=stopped) if known or stopped else None


class TokenComparison:
    """Mutable: ask for `next_request()`, and `take` what came of it, until there is none; then there is a `score`."""

    __slots__ = ("_forcing", "_known")

    def __init__(self, known: KnownAnswer) -> None:
        self._known = known
        self._forcing = TeacherForcing(known)

    def next_request(self) -> GenerateRequest | None:
        """The greedy run behind what is judged; None when enough is."""
        return None if self._is_left else self._forcing.next_request()

    @property
    def expected(self) -> tuple[int, ...]:
        """The tokens that the next run gives if it agrees."""
        return self._known.ids[self._forcing.agreement.positions :]

    def take(self, ids: Sequence[int], *, stopped: bool) -> None:
        """Judge a run.

        Args:
            ids: up to its first difference at least, without a stop token.
            stopped: whether a stop token ended it.
        """
        left = self._known.positions - self._forcing.agreement.positions
        self._forcing.take(ids[:left], stopped=stopped)  # a target may give more than it was asked for

    @property
    def score(self) -> float:
        """The share of positions that differ, from 0 to 1."""
        found = self._forcing.agreement
        differences = found.positions - found.agreed
        if self._is_left:
            return (differences - 1) / (found.positions - 1)
        return differences / found.positions

    @property
    def _is_left(self) -> bool:
        found = self._forcing.agreement
        return found.positions - found.agreed >= MOST_DIFFERENCES

    def __repr__(self) -> str:
        return f"<TokenComparison {self._forcing!r}>"
