"""The agreement watch follows each device's variants, demotes one that drifts, and lets it come back.

For each (target, model, version, variant) two kinds of `DriftTest` run side by side: one over all of its scores, and
one for each slice of inputs by size, so that a fault that only long inputs show is not averaged away by short ones. A
`ChangeTest` compares with the device's own past. An answer enters three tests, and a device is shadowed once in
`every_s` at most; hence

    alarm_at = 3 · month / every_s

is the evidence that an intact device reaches once a month in expectation at most, over all its models together.

    followed ── evidence ≥ alarm_at ──→ drifting ── the return test ──→ followed, with new tests
                                          │
                                          ├ demoted: placement skips it
                                          └ not demoted, while at most half of its group may be (one at least)

A change alone accuses nobody, since inputs change as well: the scores since then also have to be nearer to the limit
than to what was recorded. A device that was demoted for it is back once they are shown not to be, or once distances are
shown to be usual again, and its past is kept: a fault below the limit neither comes back as it went nor becomes usual.

The group are the targets that were seen to answer with the same variant of the same version. Where more than half of
them drift it is not a device's fault: the reference, the variant itself, or the inputs have changed. Then no further
one is demoted, since a wrong pool would otherwise talk a fleet out of every right answer, and the drift is told as the
model's (`common`). One that comes back and drifts again within a week needs ten times the evidence each time.

Bounded: the `most` entries that were seen last, drifting ones kept before others. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final, Literal, NamedTuple

from gateway.core.agreement.change_test import ChangeGambler, ChangeTest
from gateway.core.agreement.drift_test import DriftTest, bounded
from gateway.core.agreement.expectation import FLOOR, TOKEN_FLOOR, AgreementTerms, slice_words
from gateway.core.agreement.return_test import ReturnTest

MONTH_S: Final = 30 * 86_400.0
MOST_FOLLOWED: Final = 4096
EVERY_S: Final = 10.0
_RECENT: Final = 32
_RELAPSE_S: Final = 7 * 86_400.0

Turn = Literal["demoted", "suspected", "returned"]


class AnswerSource(NamedTuple):
    """Which variant of which model on which target gave an answer."""

    target: str
    model: str
    version: str
    variant: str

    def __str__(self) -> str:
        return f"{self.model} {self.version} {self.variant} on {self.target}"


class ShadowedAnswer(NamedTuple):
    """One answer that was computed again."""

    source: AnswerSource
    reference: str  # the target and the variant that it was compared with
    score: float  # the disagreement, from 0 to 1
    terms: AgreementTerms
    slice: int  # by size (`expectation.slice_of`)
    feature: str  # in which size is counted
    apart: float | None = None  # how far apart both answers lie, from 0 to 1; None: as the score says


class AgreementTurn(NamedTuple):
    """What has become of a source with its latest answer."""

    turn: Turn
    source: AnswerSource
    evidence: str
    at: float


@dataclass(slots=True)
class FollowedSource:
    """Mutable: the tests of one source, and what is shown of it."""

    terms: AgreementTerms
    limit: float
    whole: DriftTest
    change: ChangeTest
    slices: dict[int, DriftTest] = field(default_factory=dict)
    recent: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    shadowed: int = 0
    score_sum: float = 0.0
    drifting_since: float | None = None
    demoted: bool = False
    evidence: str = ""
    slice: int | None = None  # the only slice that drifts, which has to agree again; None: all do
    returning: ReturnTest | None = None
    usual_again: ReturnTest | None = None  # of distances; None: it does not drift, or not for a change
    relapses: int = 0
    returned_at: float = 0.0

    @property
    def mean(self) -> float:
        return self.score_sum / self.shadowed if self.shadowed else 0.0

    @property
    def recent_mean(self) -> float | None:
        """Of the latest answers, `_RECENT` at most; None: of none since it came back."""
        return fmean(score for _, score in self.recent) if self.recent else None

    def renew(self, limit: float) -> None:
        """Begin the tests anew; what was usual is kept where the device was held against it."""
        if self.usual_again is not None and limit == self.limit:
            self.change.resume()
        else:
            self.change = _change_test(self.terms, limit)
        self.limit, self.whole, self.slices, self.usual_again = limit, DriftTest(limit), {}, None


class AgreementWatch:
    """Mutable: told of shadowed answers. `sources` are those followed, the one seen last at the end.

    Args:
        every_s: how often a device is shadowed at most, in seconds; the threshold follows from it.
    """

    def __init__(self, every_s: float = EVERY_S, most: int = MOST_FOLLOWED) -> None:
        self.every_s = max(every_s, 1e-3)
        self.alarm_at = 3.0 * MONTH_S / self.every_s
        self.sources: dict[AnswerSource, FollowedSource] = {}
        self.drifting: dict[AnswerSource, FollowedSource] = {}
        self._most = most
        self._asked_at: dict[str, float] = {}  # by target, the one asked last at the end

    def is_due(self, target: str, now: float) -> bool:
        """Whether the target may be shadowed again."""
        asked_at = self._asked_at.get(target)
        return asked_at is None or now - asked_at >= self.every_s

    def asked(self, target: str, now: float) -> None:
        """An answer of this target is being computed again."""
        self._asked_at.pop(target, None)
        self._asked_at[target] = now
        if len(self._asked_at) > self._most:
            del self._asked_at[next(iter(self._asked_at))]

    def drifting_among(self, model: str, version: str) -> list[AnswerSource]:
        """The sources of this version whose agreement is to be shown anew; those demoted first."""
        found = [one for one in self.drifting if (one.model, one.version) == (model, version)]
        return sorted(found, key=lambda one: not self.drifting[one].demoted)

    def record(self, answer: ShadowedAnswer, now: float) -> AgreementTurn | None:
        """Take in a compared answer; what has become of its source, if anything."""
        source, score = answer.source, bounded(answer.score)
        state = self._followed(answer)
        state.shadowed += 1
        state.score_sum += score
        state.recent.append((answer.slice, score))
        if state.returning is not None:
            return self._returning(state, state.returning, answer, score, now)
        in_slice = state.slices.get(answer.slice)
        if in_slice is None:
            in_slice = state.slices[answer.slice] = DriftTest(state.limit)
        whole, sliced = state.whole.record(score), in_slice.record(score)
        state.change.record(answer.slice, _apart(answer), score)
        accused_above = (answer.terms.recorded + state.limit) / 2.0
        if max(whole, sliced) >= self.alarm_at:
            only = whole < self.alarm_at
            state.returning = _return_test(state, answer, sliced_only=only)
            state.evidence = _evidence(state, answer, sliced_only=only)
            state.slice = answer.slice if only else None
        elif (change := state.change.shown(self.alarm_at, accused_above)) is not None:
            usual = state.change.usual_share
            state.returning = _return_test(state, answer, level=accused_above)
            state.usual_again = ReturnTest(usual, [usual], all_or_nothing=True, level=usual, relapses=state.relapses)
            state.evidence = _evidence_of_change(state, answer, change)
            state.slice = None
        else:
            return None
        state.drifting_since = now
        self.drifting[source] = state
        state.demoted = self._may_be_demoted(source)
        return AgreementTurn("demoted" if state.demoted else "suspected", source, state.evidence, now)

    def common(self) -> Iterator[tuple[tuple[str, str, str], float, str]]:
        """Each (model, version, variant) of which most devices drift: since when, and the evidence."""
        groups: dict[tuple[str, str, str], list[FollowedSource]] = {}
        for source, state in self.drifting.items():
            groups.setdefault(source[1:], []).append(state)
        for group, states in groups.items():
            if all(one.demoted for one in states):
                continue
            watched = self._watched(group)
            since = max(one.drifting_since or 0.0 for one in states)
            words = f"{len(states)} of {watched} devices drift, so it is the reference, the variant or the inputs"
            yield group, since, f"{words}; {states[-1].evidence}"

    def _returning(
        self, state: FollowedSource, test: ReturnTest, answer: ShadowedAnswer, score: float, now: float
    ) -> AgreementTurn | None:
        if state.slice in (None, answer.slice):
            test.record(score)
        usual, source = state.usual_again, answer.source
        share = None if usual is None else state.change.share(answer.slice, _apart(answer))
        if usual is not None and share is not None:
            usual.record(share)
            test = usual if usual.returns else test
        if not test.returns:
            if not state.demoted and score > state.limit and self._may_be_demoted(source):
                state.demoted = True
                return AgreementTurn("demoted", source, state.evidence, now)
            return None
        words = f"{test.agreed} answers in a row agree with {answer.reference} again"
        state.relapses = state.relapses + 1
        state.returned_at = now
        state.drifting_since, state.demoted, state.evidence, state.returning = None, False, "", None
        state.recent.clear()
        state.renew(state.limit)
        del self.drifting[source]
        return AgreementTurn("returned", source, words, now)

    def _followed(self, answer: ShadowedAnswer) -> FollowedSource:
        """The source's state, which is the last of all from now on."""
        source, limit = answer.source, answer.terms.limit
        state = self.sources.pop(source, None)
        if state is None:
            state = FollowedSource(answer.terms, limit, DriftTest(limit), _change_test(answer.terms, limit))
        elif state.limit != limit:  # its manifest says something else now
            state.renew(limit)
            if state.returning is not None:
                state.returning = _return_test(state, answer)
        state.terms = answer.terms
        self.sources[source] = state
        if len(self.sources) > self._most:
            gone = next((one for one in self.sources if one not in self.drifting), None)
            if gone is not None:  # itself, where all others drift: it is not followed then
                del self.sources[gone]
        return state

    def _watched(self, group: tuple[str, ...]) -> int:
        return sum(one[1:] == group for one in self.sources)

    def _may_be_demoted(self, source: AnswerSource) -> bool:
        """Whether at most half of the group would be demoted with it, or it alone."""
        group = source[1:]
        demoted = sum(state.demoted for one, state in self.drifting.items() if one[1:] == group and one != source)
        drifting = sum(one[1:] == group for one in self.drifting)
        most = max(1, self._watched(group) // 2)
        return demoted < most and drifting <= most

    def forgive(self, now: float) -> None:
        """Forget relapses of sources that have agreed for a week."""
        for state in self.sources.values():
            if state.relapses and state.returning is None and now - state.returned_at > _RELAPSE_S:
                state.relapses = 0

    def __repr__(self) -> str:
        return f"<AgreementWatch {len(self.sources)} followed, {len(self.drifting)} drifting>"


def _change_test(terms: AgreementTerms, limit: float) -> ChangeTest:
    return ChangeTest(limit, TOKEN_FLOOR if terms.metric == "tokens" else FLOOR)


def _return_test(
    state: FollowedSource, answer: ShadowedAnswer, *, sliced_only: bool = False, level: float | None = None
) -> ReturnTest:
    was = _recent(state, answer, sliced_only=sliced_only)
    exact = answer.terms.metric == "top1"
    # Below the limit a classifier errs so seldom that there are long runs without an error.
    relapses = state.relapses + (exact and level is not None)
    return ReturnTest(state.limit, was, all_or_nothing=exact, level=level, relapses=relapses)


def _apart(answer: ShadowedAnswer) -> float:
    return answer.score if answer.apart is None else answer.apart


def _recent(state: FollowedSource, answer: ShadowedAnswer, *, sliced_only: bool) -> list[float]:
    return [score for at, score in state.recent if not sliced_only or at == answer.slice]


def _evidence(state: FollowedSource, answer: ShadowedAnswer, *, sliced_only: bool) -> str:
    scores = _recent(state, answer, sliced_only=sliced_only)
    where = f" of {slice_words(answer.slice, answer.feature)}" if sliced_only else ""
    source = answer.source
    return (
        f"{source.model} {source.version} {source.variant}: the last {len(scores)} shadowed answers{where} differ from "
        f"{answer.reference} by {fmean(scores):.3g} on average, where at most {state.limit:.3g} is usual "
        f"({answer.terms.metric} of {answer.terms.output})"
    )


def _evidence_of_change(state: FollowedSource, answer: ShadowedAnswer, change: ChangeGambler) -> str:
    source = answer.source
    return (
        f"{source.model} {source.version} {source.variant}: the last {change.count} shadowed answers lie "
        f"{change.times:.2g} times as far from {answer.reference} as is usual of this device, and differ by "
        f"{change.mean:.3g} on average, where at most {state.limit:.3g} is usual "
        f"({answer.terms.metric} of {answer.terms.output})"
    )
