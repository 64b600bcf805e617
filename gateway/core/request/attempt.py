"""Attempt telemetry feeds the estimators with one attempt, once at its launch and once at its end.

Both the gateway's request execution and the simulator report here, so that the estimators learn the same in both:
the queue estimate counts it while it is under way; an answer teaches the cost of its compute, the link's round
trip, health, and whether its chance and its time were claimed rightly; an error teaches the health of the target or
of the path, whichever failed; our own cancellation teaches nothing but that an accept-ack or an answer was
overdue. An answer that the target had promised for an instant that is past is owed (`health/progress.py`): of a probe
its absence is a failure, and of others once the target stalls. An observer on the candidate hears of the launch and of
the end as well.

A target that fails in a millisecond must not look fast for it: it would always look idle, and draw all
traffic into its failure. So a failure that is the target's own enters its cost as the longer of the time that it took
and the 99th percentile of what an answer was predicted to take. A refusal is no failure: it is load, and adds to the
wait that the next request would have there.

An answer without stage times (a foreign server) still teaches: what is left of its total after the expected link and
wait is taken as compute.

What the wait was predicted to be is held against an ack's promise and an answer's time in the queue, unless it was
predicted from a slow start or a pause after a refusal: those are our own caution, and nothing that the target has to
live up to.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp
from typing import Final, NamedTuple

from gateway.core.estimate.calibration import Prediction
from gateway.core.estimate.conformal import crowding_class
from gateway.core.estimate.known_prefixes import PrefixChain
from gateway.core.estimate.link_estimate import LinkEstimate
from gateway.core.estimate.token_calibration import TokenClaim, TokenTimes
from gateway.core.estimate.token_pace import TokenPace
from gateway.core.fleet.concurrency_credit import ConcurrencyCredit
from gateway.core.fleet.queue_estimate import QueueEstimate
from gateway.core.health.breaker import AttemptVerdict, Blame, Breaker, BreakerState, blame
from gateway.core.health.progress import unpromised_s
from gateway.core.placement.completion import chance_after_silence
from gateway.core.placement.generation_time import generation_time
from gateway.core.placement.interval import p95_s
from gateway.core.placement.placer import Candidate, added_work_s
from tidegate.outcome import BadAnswer, CallerError, DeadlineExceeded, InternalError, Overloaded, ServeError
from tidegate.types import Accepted, LoadReport

_P99_SIGMAS: Final = 2.326
_DUE_TIMES: Final = 2.0  # a batch may take twice as long as was thought: that is a bad prediction and no stall
_DUE_MARGINS: Final = 2.0  # margins of 1.645 standard deviations after which a promised answer is due: 99.95 %
# Of an answer's time without stages: what is expected of link and wait errs, and where it is more than the whole, "no
# compute at all" taught a spread of e^4, with which no answer of a foreign server was ever overdue.
_LEAST_COMPUTE: Final = 0.2
_AT_ONCE: Final = 0.1  # of its computation: one that waited for no longer was computed beside all that were sent
_FEW: Final = 10.0  # answers: by so many, twice the longest is still usual
_LONGEST_S: Final = 3600.0  # that an ack may promise: it comes from the network
_NOBODY: Final = Blame(AttemptVerdict.IGNORED, AttemptVerdict.IGNORED)
# Ends that say nothing about how well time was predicted. A target that fails or refuses is the breaker's and the
# wait's business: counted against the claims of its whole tier, eight refusals of one edge emptied all edges for 5 s.
_NO_WORD_ON_TIME: Final = (CallerError, Overloaded, BadAnswer, InternalError)


class ComputedTokens(NamedTuple):
    """What a generation took: tokens of its answer, the work of its prompt, and the engine's seconds for both."""

    made: int
    prompt_units: float
    first_s: float  # until the first token
    rest_s: float  # for the others together
    cached: int = 0  # tokens of the prompt that were not computed again


class ComputedWork(NamedTuple):
    """The work that an answer turned out to be, and the seconds that it was computed, where the answer tells."""

    units: float
    seconds: float
    tokens: ComputedTokens | None = None


class AttemptTelemetry:
    """One attempt under way. Mutable only by `answered`, `failed` and `cancelled`, of which one is called, once."""

    __slots__ = (
        "_body_bytes",
        "_breaker",
        "_concurrency",
        "_first_at",
        "_key",
        "_ledger",
        "_link",
        "_pace",
        "_path",
        "_path_probe",
        "_plain",
        "_prefix",
        "_probe",
        "_progress",
        "_scaling",
        "_stake",
        "_toll",
        "_units",
        "candidate",
        "launched_at",
        "within_s",
    )

    def __init__(
        self,
        candidate: Candidate,
        key: int,
        units: float,
        now: float,
        body_bytes: int = 0,
        *,
        prefix: PrefixChain = (),
    ) -> None:
        """Note the launch. `key` is unique among this gateway's attempts; `body_bytes` are the request's.

        Args:
            prefix: the blocks of a generation's prompt.
        """
        offered = candidate.offered
        target = offered.target
        self.candidate = candidate
        self.launched_at = now
        self._key = key
        # What is computed from the target's own words comes first: where that fails, no attempt is under way anywhere.
        self.within_s = p95_s(candidate)  # the promise that is held against what comes
        work_s = call_s = 0.0  # a generation has a slot, or waits for one: it is not ahead of single answers
        if candidate.tokens is None:
            work_s, call_s = added_work_s(candidate), offered.cost.call_s()
        self._units = units
        self._body_bytes = body_bytes
        self._prefix = prefix
        self._ledger = ledger = target.queue_estimate
        # Others say nothing of how many they do at a time that a limit would go by.
        counts = candidate.tokens is not None or target.spec.tier == "site"
        self._concurrency = target.concurrency if counts else None
        self._link = link = target.link
        acknowledges, due_s, is_usual = link.acknowledges, 0.0, False
        if not acknowledges:
            due_s, is_usual = self._unpromised_s()
        self._stake = candidate.claim
        self._scaling = target.scaling
        if self._scaling is not None:
            self._demand(now)
        self._toll = candidate.observer
        if self._toll is not None:
            self._toll.launched(now)
        self._breaker, self._path = target.breaker, target.path_breaker
        closed = BreakerState.CLOSED  # then nothing is a probe
        self._probe = self._breaker.state is not closed and self._breaker.launched(now)
        self._path_probe = self._path.state is not closed and self._path.launched(now)
        target.asked_at = now
        self._plain = now >= target.plain_from
        self._first_at: float | None = None
        self._pace: TokenPace | None = None
        if candidate.tokens is None:
            ledger.launch(key, work_s, now, self._stake and self._stake.place, call_s=call_s)
        else:
            ledger.launch(key, 0.0, now)
            self._pace = offered.cost.pace
            self._pace.launched(candidate.compute_s)
        self._progress = target.progress
        if not acknowledges:
            ledger.accepted(key)
            self._progress.due(key, now + due_s, now, offered.model, promised=is_usual)
        link.sent(key, now, body_bytes)

    @property
    def queue_estimate(self) -> QueueEstimate:
        """The queue estimate that counts the attempt: the target's as it was at the launch."""
        return self._ledger

    @property
    def link(self) -> LinkEstimate:
        """The estimate of the link that the attempt was sent over."""
        return self._link

    @property
    def breakers(self) -> tuple[tuple[Breaker, bool], tuple[Breaker, bool]]:
        """The breakers of the target and of its path, each with whether the attempt is its probe."""
        return (self._breaker, self._probe), (self._path, self._path_probe)

    @property
    def has_begun(self) -> bool:
        """Whether its first token is here."""
        return self._first_at is not None

    def accepted(self, now: float, word: Accepted) -> None:
        """Note that the target took it: its queue is another matter, but the link works."""
        key, candidate = self._key, self.candidate
        self._link.accepted(key, now)
        self._path.heard(now)
        self._ledger.accepted(key)
        offered = candidate.offered
        offered.target.refusals = 0
        due_s = _DUE_TIMES * word.finish_in_s + 0.5 * candidate.link_s + _DUE_MARGINS * candidate.margin_s
        self._progress.due(key, now + min(due_s, _LONGEST_S), now, offered.model)
        if not self._plain or self._pace is not None:
            return
        expected_s = max(0.0, candidate.ahead_s - (now - self.launched_at - candidate.link_s))
        promised_s = max(0.0, word.finish_in_s - candidate.compute_s)
        self._ledger.apply_ack(promised_s - expected_s, now)

    def begun(self, now: float, cached_tokens: int) -> None:
        """Note its first token. Args: cached_tokens: of the prompt, that its target had."""
        if self._concurrency is not None and self._first_at is None:
            self._concurrency.begun()
        self._first_at = now
        self._prompt_computed(cached_tokens)

    def answered(
        self,
        stages: Mapping[str, float],
        load: LoadReport | None,
        now: float,
        body_bytes: int = 0,
        *,
        work: ComputedWork | None = None,
    ) -> float:
        """Note an answer with its stage times and size; returns the link's share of its time, in seconds.

        Args:
            work: where it was not what was placed: a generation that ended early, or whose reader held it up.
        """
        if self._concurrency is not None:
            self._done_at_once(self._concurrency, stages)
        self._ledger.finish(self._key, now, computed=True)
        self._progress.answered(self._key, now)
        self._link.ended(self._key, now, heard=True)
        self.candidate.offered.target.refusals = 0
        if self._stake is not None:
            prediction = self._stake.prediction
            if isinstance(prediction, TokenClaim):
                prediction.answered(now, self._times(work, now))
            else:
                prediction.answered(now)
        self._told(late=self._is_overdue(now))
        self._end(blame(None), now, 0.0)
        offered, total_s = self.candidate.offered, now - self.launched_at
        if load is not None:
            self._ledger.report(load, "link", now)
        is_usual = not offered.target.ejected and self.launched_at >= offered.target.trusted_since
        if is_usual and not self._link.acknowledges:
            # What a server held back while it hung, and gives once it is back, is not what it usually takes.
            offered.cost.answer_times.record(self._units, total_s, now)
        compute_s = stages.get("compute")
        if self._scaling is not None:
            self._served(now, stages.get("queue", 0.0))
        if self._toll is not None:
            self._toll.answered(stages.get("queue", 0.0), compute_s, now)
        if compute_s is None:
            unloaded_s = total_s - self.candidate.link_s - self.candidate.wait_s
            offered.cost.record(self._units, max(unloaded_s, _LEAST_COMPUTE * total_s))
            if self._pace is not None:
                self._learn_pace(self._pace, work and work.tokens, self.candidate.wait_s, now)
            return min(total_s, self.candidate.link_s)
        units, seconds, tokens = (self._units, compute_s, None) if work is None else work
        offered.cost.record(units, seconds)
        if self._pace is not None:
            queue_s = stages.get("queue", 0.0)
            self._learn_pace(self._pace, tokens, queue_s, now)
            if self._plain:
                self._pace.wait_error.record(self.candidate.ahead_s, queue_s)
            link_s = max(0.0, total_s - queue_s - compute_s)
            self._link.record(link_s, now, self._body_bytes + body_bytes)
            return link_s
        alone = not self._ledger.batches  # else batch-mates, which are not known here, slow it
        if offered.cost.measured and alone:
            variant = offered.model, offered.version, offered.variant.name
            offered.target.degradation.answered(variant, offered.cost.table_s(units), seconds, now)
        queue_s = stages.get("queue", 0.0)
        if self._plain:
            self._ledger.error.record(self.candidate.ahead_s, queue_s)
        link_s = max(0.0, total_s - queue_s - compute_s)
        self._link.record(link_s, now, self._body_bytes + body_bytes)
        return link_s

    def failed(self, error: ServeError, now: float, draw: float) -> None:
        """Note an error; `draw` is uniform in [0, 1)."""
        self._gone()
        self._ledger.finish(self._key, now)
        is_fault = self.is_stalled(now)
        # Only a refusal surely came from the far side: other errors may be our own word for silence.
        self._link.ended(self._key, now, heard=isinstance(error, Overloaded))
        if not isinstance(error, _NO_WORD_ON_TIME):
            self._told(late=True)
            if self._stake is not None:
                self._settle_failed(self._stake.prediction, now, is_fault=is_fault)
        target = self.candidate.offered.target
        if isinstance(error, Overloaded):
            target.refused(error.retry_after_s, now)
        if self._scaling is not None and isinstance(error, Overloaded | DeadlineExceeded):
            self._scaling.ended(in_time=False)
        blamed = blame(error)
        if blamed.target is AttemptVerdict.FAILURE:
            cost, total_s = self.candidate.offered.cost, now - self.launched_at
            cost.record(self._units, max(total_s, cost.predict_s(self._units) * exp(_P99_SIGMAS * cost.sigma)))
        elif isinstance(error, DeadlineExceeded):
            blamed = self._blame_for_debt(now)
        self._end(blamed, now, draw)
        self._progress.ended(self._key, now)
        if self._toll is None:
            return
        if isinstance(error, Overloaded) or (isinstance(error, DeadlineExceeded) and not is_fault):
            self._toll.refused(now, full=isinstance(error, Overloaded))
        else:
            self._toll.failed(now)

    def contradicted(self, now: float, draw: float) -> None:
        """Note that another target answered the request that this one had called invalid: a wrong answer, after all."""
        target = self.candidate.offered.target
        if target.spec.has_bounds_of_its_own:
            return
        self._breaker.disputed(now, draw)
        target.degradation.ended(failed=True, now=now)

    def stalled(self, error: ServeError, now: float, draw: float) -> None:
        """Note that its answer left it after a silence.

        Where acks are overdue as well nothing comes over the path, which has failed. Else the target may be busy with
        a long prompt: one silence ends many attempts at once, and is no five failures in a row.
        """
        if self._link.silent_since is not None:
            self.failed(error, now, draw)
        else:
            self.cancelled(now)

    def cancelled(self, now: float, *, hopeless: bool = False) -> None:
        """Note that we gave it up ourselves. Where even its ack was overdue, that says something about the link.

        Args:
            hopeless: it was taken out of a queue in which it would have been late: as good as a refusal, and as cheap.
        """
        self._gone()
        if hopeless:
            self._ledger.finish(self._key, now)
        else:
            self._ledger.abandon(self._key, now)
        self._link.ended(self._key, now, heard=False)
        if self._stake is not None:
            prediction = self._stake.prediction
            if hopeless:
                self._settle_failed(prediction, now, is_fault=False)
            elif isinstance(prediction, TokenClaim):
                left = self._left_of_first(prediction, now)
                prediction.given_up(now, first_at=self._first_at, is_fault=self.is_stalled(now), left=left)
            else:
                prediction.given_up(now, is_fault=self.is_stalled(now))
        if self._is_overdue(now):
            self._told(late=True)
        self._end(_NOBODY if hopeless and not self._probe else self._blame_for_debt(now), now, 0.0)
        self._progress.ended(self._key, now)
        if self._toll is not None and hopeless:
            self._toll.refused(now, full=False)
        elif self._toll is not None:
            self._toll.cancelled(now)

    def _done_at_once(self, concurrency: ConcurrencyCredit, stages: Mapping[str, float]) -> None:
        """Tell how many its target was at when it answered: it is still one of them."""
        if self._first_at is not None:
            concurrency.left(well=True)
        elif stages.get("queue", 0.0) <= _AT_ONCE * stages.get("compute", 0.0):  # else others were before it
            concurrency.answered(self._ledger.in_flight)

    def _gone(self) -> None:
        if self._concurrency is not None and self._first_at is not None:
            self._concurrency.left(well=False)

    def _left_of_first(self, claim: TokenClaim, now: float) -> float | None:
        """The chance that the first token would still have been in time, after the silence until now; None: unknown."""
        tokens, first_by = self.candidate.tokens, claim.budget.first_by
        if tokens is None or first_by is None or self._first_at is not None:
            return None
        candidate = self.candidate
        path = self._link.path(now)
        takes = generation_time(path, candidate.wait_s, tokens, (1.0,), trust=candidate.trust).first
        by_now, by_due = takes.by(now - self.launched_at), takes.by(first_by - self.launched_at)
        return chance_after_silence(by_now, by_due, claim.claims.first)

    def _settle_failed(self, prediction: Prediction | TokenClaim, now: float, *, is_fault: bool) -> None:
        if isinstance(prediction, TokenClaim):
            prediction.failed(now, first_at=self._first_at, is_fault=is_fault)
        else:
            prediction.failed(now, is_fault=is_fault)

    def _prompt_computed(self, cached_tokens: int) -> None:
        """Its target has the whole prompt in its cache now; told once."""
        if self._pace is not None and self._prefix:
            self._pace.prefixes.computed(self._prefix, cached_tokens)
            self._prefix = ()

    def _times(self, work: ComputedWork | None, now: float) -> TokenTimes | None:
        """Its tokens as they came here; None where they came in one piece, or are not known."""
        if self._first_at is None or work is None or work.tokens is None:
            return None
        return TokenTimes(work.tokens.made, self._first_at, now)

    def _learn_pace(self, pace: TokenPace, tokens: ComputedTokens | None, queue_s: float, now: float) -> None:
        """Learn from a generation's end: by its engine's times, or by the instants of its tokens."""
        candidate, first_at = self.candidate, self._first_at
        assert candidate.tokens is not None  # as of each generation
        if tokens is None:
            return
        self._prompt_computed(tokens.cached)
        if tokens.first_s > 0.0:
            first_s = tokens.first_s
            each_s = tokens.rest_s / (tokens.made - 1) if tokens.made > 1 else None
        elif first_at is not None:
            first_s = first_at - self.launched_at - candidate.link_s - queue_s
            each_s = TokenTimes(tokens.made, first_at, now).each_s
        else:
            return
        pace.record(tokens.prompt_units, first_s, each_s, candidate.tokens.batch)

    def _unpromised_s(self) -> tuple[float, bool]:
        """In how many seconds the answer is due of a target that acknowledges nothing, and whether it has shown that.

        What it has shown is as good as a promise. Of few answers the longest says little: they get more time.
        """
        candidate = self.candidate
        usual = candidate.offered.cost.answer_times.usual(self._units)
        if usual is None:
            return _DUE_TIMES * candidate.finish_s + _DUE_MARGINS * candidate.margin_s, False
        # Not before it is expected either: more may be ahead of it than ever was.
        if candidate.tokens is not None:  # how long an answer gets is not known before: its size says less
            return min(_LONGEST_S, max(candidate.finish_s, unpromised_s(usual.p99_s))), False
        due_s = (1.0 + _FEW / usual.answers) * usual.p99_s
        return min(_LONGEST_S, max(candidate.finish_s, due_s)), True

    def _demand(self, now: float) -> None:
        """Tell what this asks of the pool: more replicas shorten the wait, and nothing else of an attempt's time."""
        assert self._scaling is not None
        candidate, claim = self.candidate, self._stake
        cost = candidate.offered.cost
        left_s = claim.place.deadline - now if claim is not None else candidate.finish_s + candidate.margin_s
        slack_s = left_s - candidate.link_s - candidate.compute_s
        self._scaling.arrived(cost.table_s(self._units), cost.fixed_s(), slack_s, now)

    def _served(self, now: float, queue_s: float) -> None:
        """Whether the wait made it late; what was late for another reason is nothing that replicas would mend."""
        assert self._scaling is not None
        if self._stake is None or now <= self._stake.place.deadline:
            self._scaling.ended(in_time=True)
        elif now - queue_s <= self._stake.place.deadline:
            self._scaling.ended(in_time=False)

    def is_stalled(self, now: float) -> bool:
        """Whether its answer is owed, by a target that has stalled."""
        progress = self._progress
        return now >= progress.look_at and progress.is_owed(self._key, now) and progress.is_stalled(now)

    def _blame_for_debt(self, now: float) -> Blame:
        """What it says that no answer came where one was due: a probe failed, or a stall lasts."""
        is_fault = self._progress.is_owed(self._key, now) if self._probe else self.is_stalled(now)
        return _NOBODY._replace(target=AttemptVerdict.FAILURE) if is_fault else _NOBODY

    def _is_overdue(self, now: float) -> bool:
        return now - self.launched_at > self.within_s

    def _told(self, *, late: bool) -> None:
        """It is known whether the answer came within its prediction, which of a generation is its length's."""
        if self._pace is not None:
            return
        crowding = crowding_class(self.candidate.ahead_s, self.candidate.compute_s)
        self.candidate.offered.target.interval_width.record(crowding, late=late)

    def _end(self, blamed: Blame, now: float, draw: float) -> None:
        if self._pace is not None:
            self._pace.ended(self.candidate.compute_s)
        if blamed.target is AttemptVerdict.SUCCESS and not self._probe:
            self._breaker.answered_late(now)
        self._breaker.record(blamed.target, now, draw, probe=self._probe)
        self._path.record(blamed.path, now, draw, probe=self._path_probe)
        if AttemptVerdict.FAILURE in blamed:
            self.candidate.offered.target.degradation.ended(failed=True, now=now)
        elif blamed.target is AttemptVerdict.SUCCESS:
            self.candidate.offered.target.degradation.ended(failed=False, now=now)
        if blamed.path is AttemptVerdict.SUCCESS and not self._path_probe:
            self._path.heard(now)  # an answer is a sign of life, whenever its request was sent

    def __repr__(self) -> str:
        return f"<AttemptTelemetry {self._key} at {self.candidate.target.id} since {self.launched_at:.3f}>"
