"""Attempts by what became of them: how good predictions were, what hedges and fallbacks brought, which target answered.

Read from each finished request's own record (`gateway/core/history/recorder.py`), so that nothing is counted twice and
nothing is added to the path of a request but one walk over its handful of notes.

    prediction   of an attempt that was answered: how much later than expected it came; and of a first attempt, whether
                 within its 95 % promise (`gateway/core/placement/interval.py`), by tier, which keeps its word where 95
                 in 100 are kept
    hedge        a second attempt beside a silent first: it `won`, was `cancelled` since another answer came first, or
                 `lost` by failing; or was `suppressed`, for lack of budget
    fallback     an attempt after a failure, by the error before it: `answered`, `failed` or `cancelled`
    resumed      answers that another target went on with, by grade and reason, and how long no token came meanwhile;
                 and the tokens that were computed again for it, or made and given to no one
    handover     an attempt that was to go on with another's answer while that one still spoke: it `took over`, was
                 `cancelled`, since it was late, said something else or the other ended first, or `failed`
    target       attempts by target, of a bounded number of them (`bounded_labels.py`)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Final

from prometheus_client.metrics_core import Metric

from gateway.core.history.recorder import AnswerRecord, RequestEvent, RequestRecord
from gateway.observe.metrics.bounded_labels import BoundedNames
from tidegate.metrics.families import counter, histogram
from tidegate.metrics.histogram import ERRORS_S, Histogram
from tidegate.types import PLANNED, TargetId

GAPS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.5, 2.5, 5.0, 10.0)
HEDGES: Final = frozenset({"hedge", "race", "last-resort"})  # reasons of attempts beside another


class AttemptCounts:
    """Mutable: `landed` takes in one finished request.

    Args:
        most_targets: have series of their own.
        suppressed: how many hedges there was no budget for, so far.
    """

    def __init__(self, most_targets: int, suppressed: Callable[[], int] = lambda: 0) -> None:
        self._suppressed = suppressed
        self._names = BoundedNames(most_targets)
        self._errors: dict[str, Histogram] = {}  # by tier
        self._promises: Counter[tuple[str, str]] = Counter()  # (tier, kept or broken)
        self._hedges: Counter[str] = Counter({"won": 0, "lost": 0, "cancelled": 0})
        self._fallbacks: Counter[tuple[str, str]] = Counter()  # (cause, result)
        self._handovers: Counter[str] = Counter({"took_over": 0, "cancelled": 0, "failed": 0})
        self._resumes: Counter[tuple[str, str]] = Counter()  # (grade, reason)
        self._gaps = Histogram(GAPS_S)
        self._wasted = 0
        self._targets: Counter[tuple[str, str]] = Counter()  # (target, result)

    def landed(self, record: RequestRecord) -> None:
        notes = record.notes
        if len(record.reasons) == 1 and notes[-1].what == "answered" and notes[0].what == "launched":
            self._ended(record, notes[0], notes[-1], "")  # nearly all: the walk would find these two, and no other
            return
        self._wasted += record.wasted_tokens
        for resumed in record.answer.route.resumed if record.answer is not None else ():
            self._resumes[resumed.grade, resumed.why] += 1
            self._gaps.observe(resumed.gap_s)
        if PLANNED in record.reasons:
            self._handed_over(record)
        launched: dict[int, RequestEvent] = {}
        cause = ""
        for note in notes:
            what = note.what
            if what == "launched":
                launched[note.attempt] = note
            elif what in ("answered", "failed", "cancelled"):
                begun = launched.pop(note.attempt, None)
                if begun is not None:
                    self._ended(record, begun, note, cause)
                if what == "failed":
                    cause = note.words.partition(":")[0]
        for begun in launched.values():  # abandoned: no answer of theirs was awaited any more
            self._ended(
                record, begun, RequestEvent(record.arrived_at + record.elapsed_s, "cancelled", begun.attempt), cause
            )

    def _ended(self, record: RequestRecord, begun: RequestEvent, end: RequestEvent, cause: str) -> None:
        what = end.what
        self._targets[self._names.of(begun.target), what] += 1
        if what == "answered":
            self._predicted(record, begun, end.at - begun.at)
        if begun.attempt == 0:
            return
        reason = record.reasons[begun.attempt] if begun.attempt < len(record.reasons) else ""
        if reason in HEDGES:
            won = isinstance(record.end, AnswerRecord) and record.end.attempt == begun.attempt
            self._hedges["won" if won else "lost" if what == "failed" else "cancelled"] += 1
        elif reason == "fallback":
            self._fallbacks[cause or "hopeless", what] += 1

    def _handed_over(self, record: RequestRecord) -> None:
        number = record.reasons.index(PLANNED)  # one is tried, at most
        happened = {note.what for note in record.notes if note.attempt == number}
        self._handovers["took_over" if "begun" in happened else "failed" if "failed" in happened else "cancelled"] += 1

    def _predicted(self, record: RequestRecord, begun: RequestEvent, took_s: float) -> None:
        tier = TargetId.parse(begun.target).tier
        errors = self._errors.get(tier)
        if errors is None:
            errors = self._errors[tier] = Histogram(ERRORS_S)
        errors.observe(took_s - begun.seconds)
        decision = record.decision
        if begun.attempt == 0 and decision is not None and decision.chosen >= 0:
            self._promises[tier, "kept" if took_s <= decision.promised_s else "broken"] += 1

    def families(self, present: Collection[str]) -> Iterator[Metric]:
        """Args: present: the targets that there are; others' series end."""
        for gone in self._names.keep(present):
            for result in ("answered", "failed", "cancelled"):
                self._targets.pop((gone, result), None)
        words = "How much later than predicted attempts were answered; negative is sooner."
        errors = (((tier,), one) for tier, one in self._errors.items())
        yield histogram("tidegate_predicted_latency_error_seconds", words, ("tier",), errors)
        words = "Answered first attempts by whether they came within their 95 % promise."
        yield counter("tidegate_prediction_promises", words, ("tier", "result"), self._promises.items())
        hedges = {**self._hedges, "suppressed": self._suppressed()}
        words = "Attempts beside a silent one by what became of them; suppressed: there was no budget."
        yield counter("tidegate_hedge", words, ("result",), (((result,), n) for result, n in hedges.items()))
        words = "Attempts after a failed one, by its error."
        yield counter("tidegate_fallback_attempts", words, ("cause", "result"), self._fallbacks.items())
        words = "Answers that another target went on with after their first token, by grade and reason."
        yield counter("tidegate_resumes", words, ("grade", "reason"), self._resumes.items())
        words = "Targets asked to go on with an answer while another still spoke, by what became of it."
        yield counter(
            "tidegate_handovers", words, ("result",), (((result,), n) for result, n in self._handovers.items())
        )
        words = "From the last token of one target to the first of the one that went on."
        yield histogram("tidegate_resume_gap_seconds", words, (), [((), self._gaps)])
        words = "Tokens that were computed again by another target, or made and given to no one."
        yield counter("tidegate_wasted_tokens", words, (), [((), self._wasted)])
        words = "Attempts by target; `rest` is all that have no series of their own."
        yield counter("tidegate_target_attempts", words, ("target", "result"), self._targets.items())

    def __repr__(self) -> str:
        return f"<AttemptCounts {sum(self._targets.values())} attempts>"
