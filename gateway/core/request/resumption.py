"""Resumption: an answer whose target was lost, stalls or leaves is gone on with by another target, from its last token.

The other target is given the prompt with the tokens that the caller has, computes both as a prompt, and goes on. What
is decided here is whether that may be, when a silence is a stall, how much work is left, and what the caller is told:

    who may       any target that takes the request (`placement/eligibility.py`: pin, demanded variant, attestation,
                  quality and context hold for each token) and works on token ids. All variants of a version have one
                  vocabulary, by its manifest, so ids mean the same wherever they are
    never         where the caller said so; where state is lost with the target, as that of a JSON schema's grammar;
                  where the tokens came as words, whose ids are not known
    when          the attempt failed by a fault that is not the caller's; or its target leaves, and another is there; or
                  no token came for longer than `patience_s`, though the reader had room and one had come before
    how often     `MOST` times an answer. Each goes on from at least one more token, and is no load that was not there
    how much      `remaining`: the length that is expected of such an answer, given that it is longer than what there
                  is, and prompt and given tokens as a prompt. That and one token have to be possible in time

    patience = max(250 ms, 6 · p99 of the times between this variant's tokens on this target). Until that is known
               max(1 s, 6 · predicted step); 250 ms where the target's breaker is open
               and no less than what is left until the next token is due, up to 1 s: token n is due by the budget of
               next tokens n times after the first one. Most silences end by themselves (a link's bad moment, another
               one's long prompt), and to leave costs a prompt and a place elsewhere
    a stall    is left only where the next token is expected sooner elsewhere than the silence has lasted: of a silence
               that nothing is known of as much is to come as there was. Else all answers of a target that is out for a
               second queue up at the others, for longer than that

A timer that rings late says that this process stood still, and its tokens may wait to be read: then it looks again.

The grade says what the caller may rely on. `exact`: the text is the one that the lost target would have given. That
holds for one artefact (by its digest), tokens that are chosen alike (always the likeliest one, or by seed and
position), and an engine that computes each sequence by itself: in a batch that changes with its company the same
product rounds otherwise, so two likeliest tokens that are equal in bf16 may change places. Everything else is
`continued`: as good a text, and perhaps another one.

It can be wrong: two processors whose kernels round differently may part where two tokens are as likely, and so may a
prompt and single steps on one. A target that computes a long step is taken for a stalled one, which costs its tokens.
Source: docs/generation.md, "When a target dies in the middle".
"""

from __future__ import annotations

from typing import Final, NamedTuple

from gateway.core.fleet.target import TargetView
from gateway.core.placement.ask import Ask
from gateway.core.placement.placer import Candidate
from gateway.core.request.answer_so_far import AnswerSoFar
from gateway.core.request.hedging import EARLY_S
from tidegate.outcome import CallerError, DeadlineExceeded, Deferred, NothingAlive, ServeError
from tidegate.types import Resumed, ResumedGrade

MOST: Final = 4
LEAST_S: Final = 0.25
TIMES: Final = 6.0
UNKNOWN_S: Final = 1.0  # while too few gaps are known
LOOK_S: Final = 0.5  # a target that leaves is found out by then
LOOK_AGAIN_S: Final = 0.02  # after a timer that rang this late
STALLED: Final = "stalled"
LEAVING: Final = "drain"
_ID_BYTES: Final = 4


class ResumptionTerms(NamedTuple):
    """What of a request and its model decides whether and how its answer is gone on with."""

    prompt_tokens: int
    max_tokens: int
    prompt_weight: float = 0.0  # how many tokens of an answer a token of a prompt is worth
    is_repeatable: bool = True  # always the likeliest token, or chosen by seed and position
    alone: frozenset[str] = frozenset()  # variants whose engines compute each sequence by itself
    barred: str = ""  # why it never may, in words
    next_s: float | None = None  # the budget of each further token; None: without


class StreamTrouble(NamedTuple):
    """Why an answer leaves a target that has not failed."""

    why: str  # STALLED or LEAVING
    silent_s: float


class Resumption:
    """The rules for one answer. Mutable: the answer so far, and the last look."""

    __slots__ = ("_artefact", "_look_at", "answer", "terms")

    def __init__(self, terms: ResumptionTerms, answer: AnswerSoFar) -> None:
        self.terms = terms
        self.answer = answer
        self._look_at = 0.0
        self._artefact = ""  # by which the target that speaks began: one that is lost may offer nothing any more

    @property
    def is_complete(self) -> bool:
        """Whether the caller has all the tokens that it asked for: only the end's own words are missing."""
        return len(self.answer) >= self.terms.max_tokens and not self.answer.has_words

    def why_never(self, error: ServeError | None, resumes: int) -> str:
        """Why the answer ends here, in words; "" where it may be gone on with.

        Args:
            error: by which its target was lost; None: it was not.
            resumes: how often it was gone on with.
        """
        if self.terms.barred:
            return self.terms.barred
        if self.answer.has_words:
            return "its tokens came as words, whose ids are not known"
        if isinstance(error, CallerError | DeadlineExceeded | NothingAlive | Deferred):
            return "another target would say the same"
        return f"it was gone on with {resumes} times already" if resumes >= MOST else ""

    def remaining(self, ask: Ask) -> Ask:
        """The rest of the answer as placement sees it. Args: ask: the whole."""
        given, terms = len(self.answer), self.terms
        prompt_units = 1.0 + (terms.prompt_tokens + given) * terms.prompt_weight
        left = max(1, terms.max_tokens - given)
        generation, expected = ask.generation, float(left)
        if generation is not None:
            lengths = tuple([length - given for length in generation.lengths if length > given]) or (1.0,)
            expected = sum(lengths) / len(lengths)
            generation = generation._replace(
                prompt_units=prompt_units,
                certain_units=prompt_units,  # an answer that breaks off later is worth more than one that does now
                most_units=prompt_units + left - 1,
                lengths=lengths,
                mean_length=expected,
                max_tokens=left,
                first_by=None,
                prompt_tokens=terms.prompt_tokens + given,
            )
        return ask._replace(
            units=prompt_units + expected - 1.0,
            body_bytes=ask.body_bytes + _ID_BYTES * given,
            generation=generation,
            ids=True,
            again=True,
        )

    def begun(self, candidate: Candidate, now: float) -> float:
        """A target speaks: when to look after it first."""
        self._artefact = _digest(candidate)
        self._look_at = now + min(LOOK_S, patience_s(candidate))
        return self._look_at

    def look(self, candidate: Candidate, now: float) -> StreamTrouble | float:
        """What is wrong with the target that speaks, or when to look again."""
        # After the last token no credit is needed for the end's own words.
        silent_s = now - self.answer.heard_at if self.is_complete else self.answer.silent_s(now)
        was_late = now - self._look_at > LOOK_AGAIN_S
        patient_s = patience_s(candidate)
        if self.terms.next_s is not None and not self.is_complete:
            due_at = self.answer.began_at + len(self.answer) * self.terms.next_s
            patient_s = max(patient_s, min(UNKNOWN_S, due_at - self.answer.heard_at))
        if silent_s >= patient_s - EARLY_S:  # or the next look would be due now
            if not was_late:
                return StreamTrouble(STALLED, silent_s)
            self._look_at = now + LOOK_AGAIN_S
            return self._look_at
        if not candidate.target.up:
            return StreamTrouble(LEAVING, silent_s)
        self._look_at = now + min(LOOK_S, patient_s - silent_s)
        return self._look_at

    def put_off(self, now: float) -> float:
        """There is nowhere else to go: when to look again."""
        self._look_at = now + LOOK_S
        return self._look_at

    def look_again(self, now: float) -> float:
        """What is known of the target that speaks will be news in a moment: when to look."""
        self._look_at = now + LOOK_AGAIN_S
        return self._look_at

    def grade(self, lost: Candidate, by: Candidate) -> tuple[ResumedGrade, str]:
        """How alike the text is to the one that the lost target would have given, and by which rule."""
        if lost.variant.name != by.variant.name:
            return "continued", f"{by.variant.name} goes on for {lost.variant.name}"
        if not self._artefact or self._artefact != _digest(by):
            return "continued", "the two do not have the same artefact, by its digest"
        if not self.terms.is_repeatable:
            return "continued", "tokens are chosen by chance, without a seed"
        if by.variant.name not in self.terms.alone:
            return "continued", f"{by.variant.name} is computed in batches, and rounds by its company"
        return "exact", ""

    def resumed(self, lost: Candidate, by: Candidate, why: str, now: float) -> Resumed:
        """What is said of it, as the first token of `by` is here."""
        grade, because = self.grade(lost, by)
        gap_s = max(0.0, now - self.answer.heard_at)
        return Resumed(
            lost=lost.target.id,
            by=by.target.id,
            at=len(self.answer),
            gap_s=gap_s,
            grade=grade,
            why=why,
            because=because,
        )

    def __repr__(self) -> str:
        return f"<Resumption of {self.terms.prompt_tokens}+{self.terms.max_tokens} tokens, {self.answer!r}>"


def shown_in_s(candidate: Candidate) -> float:
    """In how many seconds a generation's next token is expected from there."""
    tokens = candidate.tokens
    return candidate.link_s + candidate.wait_s + (candidate.compute_s if tokens is None else tokens.first_s)


def patience_s(candidate: Candidate) -> float:
    """How long its target may be silent between two tokens."""
    if candidate.target.ejected:
        return LEAST_S
    p99_s = candidate.offered.cost.token_gaps.p99_s
    if p99_s is not None:
        return max(LEAST_S, TIMES * p99_s)
    return UNKNOWN_S if candidate.tokens is None else max(UNKNOWN_S, TIMES * candidate.tokens.step_s)


def _digest(candidate: Candidate) -> str:
    """Of what its target offers under the model's name: the artefact of its first variant."""
    model, version = candidate.offered.model, candidate.offered.version
    target: TargetView = candidate.target
    return next((one.digest for one in target.offers if (one.name, one.version) == (model, version)), "")
