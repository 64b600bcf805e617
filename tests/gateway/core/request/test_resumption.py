"""The rules by which an answer is gone on with, and the request machine under them in any order of events."""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkDown, LinkUp
from gateway.core.placement.generation_time import GenerationAsk
from gateway.core.placement.placer import Candidate, Placer
from gateway.core.request.answer_so_far import AnswerSoFar
from gateway.core.request.machine import Action, Answer, Cancel, Launch, Refuse, RequestMachine, WakeAt
from gateway.core.request.resumption import (
    LEAST_S,
    LOOK_S,
    MOST,
    UNKNOWN_S,
    Resumption,
    ResumptionTerms,
    StreamTrouble,
    patience_s,
)
from tests.support.gateway.fleets import NOW, ask, spec, variant
from tidegate.fleet.offers import ModelOffer
from tidegate.outcome import (
    BadAnswer,
    DeadlineExceeded,
    Deferred,
    Disconnected,
    InternalError,
    InvalidRequest,
    NothingAlive,
    Overloaded,
    ServeError,
    Unreachable,
)
from tidegate.token_sink import TextDelta, TokenBatch
from tidegate.types import Accepted

TALKING = replace(variant("int4"), slots=4)
TERMS = ResumptionTerms(prompt_tokens=10, max_tokens=40, prompt_weight=0.1, alone=frozenset({"int4"}))
GONE = Unreachable("killed")


def talking_fleet(count: int = 3) -> Fleet:
    fleet = Fleet(lambda model, version: "tokens")
    for letter in "abcdef"[:count]:
        fleet.add(spec(f"edge/{letter}"), NOW)
        comes_up(fleet, f"edge/{letter}")
    return fleet


def comes_up(fleet: Fleet, id: str, at: float = NOW, digest: str = "sha of int4") -> None:
    fleet.fold(LinkUp(id, id, 1, (ModelOffer("minilm", "1", (TALKING,), digest=digest),)), at)


def candidate(fleet: Fleet, id: str) -> Candidate:
    return next(one for one in Placer(fleet).decide(ask(), NOW).candidates if one.target.id == id)


def given(answer: AnswerSoFar, tokens: int, *, at: float = NOW, by: Candidate | None = None) -> None:
    gaps = (by or candidate(talking_fleet(), "edge/a")).offered.cost.token_gaps
    for _ in range(tokens):
        answer.took(TokenBatch(len(answer), (7,)), gaps, at)


def resumption(tokens: int = 0, terms: ResumptionTerms = TERMS) -> Resumption:
    answer = AnswerSoFar(256)
    answer.speaks(256, None, NOW)
    given(answer, tokens)
    return Resumption(terms, answer)


@pytest.mark.parametrize(
    ("error", "resumes", "why"),
    [
        (GONE, 0, ""),
        (None, MOST - 1, ""),
        (Disconnected("cut"), 0, ""),
        (BadAnswer("a gap"), 0, ""),
        (InternalError("defect"), 0, ""),
        (Overloaded("out of memory"), 0, ""),
        (InvalidRequest("no such id"), 0, "another target would say the same"),
        (DeadlineExceeded("late"), 0, "another target would say the same"),
        (NothingAlive("draining"), 0, "another target would say the same"),
        (Deferred("later"), 0, "another target would say the same"),
        (GONE, MOST, f"it was gone on with {MOST} times already"),
    ],
)
def test_which_ends_are_gone_on_with(error: ServeError | None, resumes: int, why: str) -> None:
    assert resumption(5).why_never(error, resumes) == why


def test_what_is_barred_and_what_came_as_words_is_never_gone_on_with() -> None:
    assert resumption(5, TERMS._replace(barred="it follows a JSON schema")).why_never(GONE, 0).startswith("it follows")
    one = resumption(40)
    assert one.is_complete
    one.answer.took(
        TokenBatch(40, (), deltas=(TextDelta("tide"),)),
        candidate(talking_fleet(), "edge/a").offered.cost.token_gaps,
        NOW,
    )
    assert "came as words" in one.why_never(GONE, 0) and not one.is_complete


def test_the_rest_of_an_answer_is_its_tokens_as_a_prompt_and_what_is_expected_beyond() -> None:
    rest = resumption(20).remaining(ask(units=41.0))
    assert (rest.units, rest.body_bytes, rest.generation, rest.ids) == (pytest.approx(1.0 + 3.0 + 19.0), 80, None, True)

    generation = GenerationAsk(2.0, 2.0, 41.0, (5.0, 25.0, 35.0), 21.7, 40, first_by=NOW + 0.1, next_s=0.05)
    rest = resumption(20).remaining(ask()._replace(generation=generation))
    assert rest.generation is not None
    assert rest.generation.lengths == (5.0, 15.0)  # the short ones it was not
    assert (rest.generation.mean_length, rest.generation.max_tokens, rest.generation.first_by) == (10.0, 20, None)
    assert rest.generation.prompt_units == rest.generation.certain_units == pytest.approx(4.0)
    assert rest.generation.next_s == 0.05
    assert rest.units == pytest.approx(4.0 + 9.0)

    longest = resumption(38).remaining(ask()._replace(generation=generation))
    assert longest.generation is not None and longest.generation.lengths == (1.0,)


def test_patience_is_six_times_what_is_usual_within_bounds() -> None:
    one = candidate(talking_fleet(), "edge/a")
    assert patience_s(one) == UNKNOWN_S
    for _ in range(16):
        one.offered.cost.token_gaps.record(0.010)
    assert patience_s(one) == LEAST_S
    for _ in range(100):
        one.offered.cost.token_gaps.record(0.10)
    assert 0.6 <= patience_s(one) <= 0.6 * 1.2
    one.target.ejected = True
    assert patience_s(one) == LEAST_S


def test_a_look_finds_silence_and_departure_and_else_says_when_to_look_again() -> None:
    fleet = talking_fleet()
    speaks, one = candidate(fleet, "edge/a"), resumption()
    assert one.begun(speaks, NOW) == NOW + LOOK_S
    given(one.answer, 20, at=NOW, by=speaks)
    assert one.look(speaks, NOW + 0.1) == pytest.approx(NOW + LEAST_S)
    found = one.look(speaks, NOW + LEAST_S)
    assert found == StreamTrouble("stalled", pytest.approx(LEAST_S))
    assert one.put_off(NOW + LEAST_S) == NOW + LEAST_S + LOOK_S

    fleet.fold(LinkDown("edge/a", "leaving: shutdown", True), NOW)
    given(one.answer, 1, at=NOW + 0.3, by=speaks)
    assert one.look(speaks, NOW + 0.4) == StreamTrouble("drain", pytest.approx(0.1))


def test_a_silence_is_no_stall_before_the_next_token_is_due_by_its_budget() -> None:
    speaks, one = candidate(talking_fleet(), "edge/a"), resumption(terms=TERMS._replace(next_s=0.05))
    given(one.answer, 10, by=speaks)
    given(one.answer, 10, at=NOW + 0.4, by=speaks)  # a second is allowed for twenty: the next is due at NOW + 1.0
    one.begun(speaks, NOW + 0.4)
    for _ in range(300):
        speaks.offered.cost.token_gaps.record(0.01)
    assert one.look(speaks, NOW + 0.9) == pytest.approx(NOW + 1.0)
    assert one.look(speaks, NOW + 1.0) == StreamTrouble("stalled", pytest.approx(0.6))

    given(one.answer, 5, at=NOW + 3.0, by=speaks)  # twenty-five, of which the last were late already
    one.put_off(NOW + 3.0 + LEAST_S - LOOK_S)
    assert isinstance(one.look(speaks, NOW + 3.0 + LEAST_S), StreamTrouble)


def test_a_timer_that_rings_late_makes_no_stall_before_a_second_look() -> None:
    speaks, one = candidate(talking_fleet(), "edge/a"), resumption(20)
    one.begun(speaks, NOW)
    held_up_until = NOW + LOOK_S + 0.8
    again = one.look(speaks, held_up_until)
    assert again == held_up_until + 0.02
    assert isinstance(one.look(speaks, again), StreamTrouble)


def test_a_reader_that_reads_nothing_is_no_silence_but_after_the_last_token() -> None:
    speaks = candidate(talking_fleet(), "edge/a")
    answer = AnswerSoFar(4)
    one = Resumption(TERMS._replace(max_tokens=8), answer)
    answer.speaks(4, lambda tokens: None, NOW)
    given(answer, 4, by=speaks)
    one.begun(speaks, NOW)
    assert one.look(speaks, NOW + LOOK_S) == NOW + 2 * LOOK_S
    answer.credited(4, NOW + 9.0)
    assert answer.silent_s(NOW + 9.1) == pytest.approx(0.1)
    given(answer, 4, at=NOW + 9.2, by=speaks)
    one.begun(speaks, NOW + 9.7)
    assert answer.is_paused and isinstance(one.look(speaks, NOW + 10.2), StreamTrouble)


@pytest.mark.parametrize(
    ("terms", "digest", "grade", "because"),
    [
        (TERMS, "sha of int4", "exact", ""),
        (TERMS, "another", "continued", "the same artefact"),
        (TERMS._replace(is_repeatable=False), "sha of int4", "continued", "by chance"),
        (TERMS._replace(alone=frozenset()), "sha of int4", "continued", "rounds by its company"),
    ],
)
def test_the_grade_says_whether_the_text_is_the_same(
    terms: ResumptionTerms, digest: str, grade: str, because: str
) -> None:
    fleet, one = talking_fleet(), resumption(terms=terms)
    lost = candidate(fleet, "edge/a")
    one.begun(lost, NOW)
    comes_up(fleet, "edge/b", digest=digest)
    fleet.fold(LinkDown("edge/a", "gone", False), NOW)  # it offers nothing any more
    given(one.answer, 3)
    resumed = one.resumed(lost, candidate(fleet, "edge/b"), "unreachable", NOW + 0.2)
    assert (resumed.lost, resumed.by, resumed.at, resumed.grade) == ("edge/a", "edge/b", 3, grade)
    assert resumed.gap_s == pytest.approx(0.2) and because in resumed.because


def test_another_variant_is_never_exact() -> None:
    fleet, one = talking_fleet(), resumption()
    lost = candidate(fleet, "edge/a")
    one.begun(lost, NOW)
    other = lost._replace(offered=lost.offered._replace(variant=replace(TALKING, name="bf16")))
    assert one.grade(lost, other) == ("continued", "bf16 goes on for int4")


def test_credit_goes_to_the_target_that_speaks_and_never_twice() -> None:
    first, second = list[int](), list[int]()
    answer = AnswerSoFar(8)
    answer.speaks(8, first.append, NOW)
    given(answer, 8)
    answer.credited(4, NOW)
    assert first == [4]
    answer.falls_silent()
    answer.credited(4, NOW)
    assert first == [4] and answer.window == 8
    answer.speaks(len(answer) + 5, second.append, NOW)  # it was asked when there were five
    assert second == [3]
    answer.credited(2, NOW)
    assert second == [3, 2] and repr(answer) == "<AnswerSoFar 8 tokens>"


def test_a_target_may_give_one_token_to_a_reader_that_has_read_nothing() -> None:
    answer, more = AnswerSoFar(2), list[int]()
    answer.speaks(2, None, NOW)
    given(answer, 2)
    assert answer.is_paused and answer.window == 1
    answer.speaks(3, more.append, NOW)
    answer.credited(1, NOW)
    assert more == []  # that one it had
    answer.credited(1, NOW)
    assert more == [1]
    given(answer, 2)
    assert repr(answer) == "<AnswerSoFar 4 tokens, paused>"
    assert "10+40 tokens" in repr(Resumption(TERMS, answer))


ERRORS = (GONE, Disconnected("cut"), BadAnswer("a gap"), InternalError("defect"), Overloaded("full"))


class Life:
    """One machine among three targets, with events in a random order; every rule is checked as it goes."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.fleet, self.now = talking_fleet(), NOW
        self.answer = AnswerSoFar(self.chance.choice([2, 16, 256]))
        self.machine = RequestMachine(
            ask(budget_s=self.chance.choice([0.05, 5.0, 60.0])),
            Placer(self.fleet),
            resumption=Resumption(TERMS, self.answer),
        )
        self.under_way: dict[int, Candidate] = {}
        self.over: list[int] = []
        self.speaker: int | None = None
        self.wake_at: float | None = None
        self.ends: list[Action] = []
        self.resumed = self.launches = 0

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Launch(attempt, one):
                    assert not self.ends and attempt == self.launches
                    assert action.answered in (0, len(self.answer))
                    assert bool(action.answered) == (len(self.answer) > 0)
                    assert self.speaker is None, "two would speak"
                    self.under_way[attempt] = one
                    self.launches += 1
                case Cancel(attempt):
                    self.leaves(attempt)
                case WakeAt(at):
                    self.wake_at = at
                case Answer() | Refuse():
                    self.ends.append(action)
        assert len(self.ends) <= 1 and self.machine.done == bool(self.ends)

    def leaves(self, attempt: int) -> None:
        del self.under_way[attempt]
        self.over.append(attempt)
        if self.speaker == attempt:
            self.speaker = None
            self.answer.falls_silent()

    def step(self) -> None:
        chance = self.chance
        what = chance.choice(["token"] * 6 + ["fails", "time", "late", "moves", "accepted", "answers", "credit"])
        self.now += chance.choice([0.0, 0.001, 0.01, 0.1])
        attempt = chance.choice(list(self.under_way)) if self.under_way else None
        if self.speaker is not None and chance.random() < 0.9:
            attempt = self.speaker
        if what == "time" or attempt is None:
            assert self.wake_at is not None
            self.now = max(self.now, self.wake_at)
            self.perform(self.machine.timer(self.now))
        elif what == "token":
            self.token(attempt)
        elif what == "fails":
            self.leaves(attempt)
            self.perform(self.machine.failed(attempt, chance.choice(ERRORS), self.now))
        elif what == "late" and self.over:
            gone = chance.choice(self.over)
            said = (
                self.machine.begun(gone, self.now)
                + self.machine.failed(gone, GONE, self.now)
                + self.machine.answered(gone, self.now)
                + self.machine.accepted(gone, Accepted(0, 0.1), self.now)
            )
            assert said == []
        elif what == "moves":
            id = chance.choice(list(self.fleet.targets))
            if chance.random() < 0.5:
                self.fleet.fold(LinkDown(id, "leaving", chance.random() < 0.5), self.now)
            else:
                comes_up(self.fleet, id, self.now)
        elif what == "accepted":
            self.perform(self.machine.accepted(attempt, Accepted(0, 0.1), self.now))
        elif what == "credit":
            self.answer.credited(chance.choice([1, 5]), self.now)
        elif what == "answers" and chance.random() < 0.1:
            self.leaves(attempt)
            self.perform(self.machine.answered(attempt, self.now))

    def token(self, attempt: int) -> None:
        one = self.under_way[attempt]
        if self.speaker != attempt:
            self.perform(self.machine.begun(attempt, self.now))
            assert list(self.under_way) == [attempt], "all others are cancelled"
            self.speaker = attempt
            self.resumed += len(self.answer) > 0
            self.answer.speaks(len(self.answer) + self.answer.window, lambda tokens: None, self.now)
        if len(self.answer) < TERMS.max_tokens and not self.answer.is_paused:
            given(self.answer, 1, at=self.now, by=one)

    def live(self) -> None:
        self.perform(self.machine.arrived(self.now))
        for _ in range(1000):
            if self.ends:
                break
            self.step()
        assert self.ends and not self.under_way
        end = self.ends[0]
        if isinstance(end, Answer):
            assert len(end.route.resumed) <= MOST and end.route.attempts == self.launches
            assert all(one.at <= len(self.answer) for one in end.route.resumed)
        assert self.machine.timer(self.now + 99.0) == self.machine.cancelled(self.now) == []


@pytest.mark.slow
def test_any_order_of_events_ends_an_answer_once_and_orphans_nothing() -> None:
    ends, resumed = dict[str, int](), 0
    for seed in range(3000):
        life = Life(seed)
        try:
            life.live()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        end = life.ends[0]
        name = "answered" if isinstance(end, Answer) else end.error.code if isinstance(end, Refuse) else ""
        ends[name] = ends.get(name, 0) + 1
        resumed += life.resumed
    assert resumed > 1500 and ends["answered"] > 500, (resumed, ends)
    assert {"unreachable", "deadline_exceeded"} <= set(ends)


def test_a_caller_that_leaves_while_another_target_is_asked_leaves_nothing() -> None:
    life = Life(1)
    life.machine = RequestMachine(ask(), Placer(life.fleet), resumption=Resumption(TERMS, life.answer))
    life.perform(life.machine.arrived(NOW))
    life.token(0)
    life.leaves(0)
    life.perform(life.machine.failed(0, GONE, NOW))
    assert "RESUMING, waiting for [1]" in repr(life.machine)
    assert life.machine.cancelled(NOW) == [Cancel(1)]
