"""An answer is checked token by token, by what a real vLLM 0.32 has said and by what none should."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cloud_pool.vllm.answer import ServerRefused, VllmAnswer
from cloud_pool.vllm.wire import EventLines
from tests.support.models.replayed import STOP, VOCABULARY_SIZE
from tests.support.pool.replayed_vllm import EXCHANGES, PATH, event_of
from tidegate.generate.engine import SequenceProgress
from tidegate.workers.generation.messages import UnexpectedMessage

RECORDED = {one["name"]: one for one in json.loads(EXCHANGES.read_text())["exchanges"]}


def replay(name: str) -> list[SequenceProgress]:
    """What comes of a recorded answer."""
    exchange = RECORDED[name]
    assert exchange["path"] == PATH
    body = exchange["request"]
    said = body["sampling_params"]
    logprobs = said.get("logprobs")
    answer = VllmAnswer(
        1,
        prompt_tokens=len(body["token_ids"]),
        max_tokens=said["max_tokens"],
        logprobs=logprobs - 1 if logprobs else logprobs,
        stop_tokens=said["stop_token_ids"],
        vocabulary_size=VOCABULARY_SIZE,
    )
    lines = EventLines()
    progress = [one for event in lines.feed(exchange["body"].encode()) if (one := answer.take(event)) is not None]
    answer.end(done=lines.done)
    return progress


def ids_of_all(progress: list[SequenceProgress]) -> list[int]:
    return [token for one in progress if one.batch is not None for token in one.batch.ids]


def test_a_recorded_answer_is_its_tokens_and_its_end() -> None:
    progress = replay("greedy")
    assert ids_of_all(progress)[:6] == [3575, 282, 260, 3432, 5261, 30] and len(ids_of_all(progress)) == 16
    assert [one.batch.first for one in progress if one.batch is not None] == list(range(16))
    assert (progress[-1].finished, progress[-1].stop_token, progress[-1].cached_tokens) == ("length", False, 0)


@pytest.mark.parametrize(
    ("name", "stop"),
    [("ended by the model's stop token", STOP), ("ended by the request's stop token", 30)],
)
def test_a_stop_token_ends_an_answer_and_is_no_part_of_it(name: str, stop: int) -> None:
    progress = replay(name)
    assert stop not in ids_of_all(progress)
    assert (progress[-1].finished, progress[-1].stop_token) == ("stop", True)


def test_stop_tokens_that_are_ignored_do_not_come() -> None:
    progress = replay("stop tokens ignored")
    assert len(ids_of_all(progress)) == 16 and STOP not in ids_of_all(progress)
    assert progress[-1].finished == "length"


def test_what_the_cache_had_of_a_prompt_is_told_with_the_end() -> None:
    assert replay("long prompt")[-1].cached_tokens == 0
    assert replay("long prompt again")[-1].cached_tokens == 256


@pytest.mark.parametrize(
    ("name", "likeliest"),
    [("log-probabilities alone", 0), ("three likeliest tokens", 3), ("sampled", 2), ("sampled of a few", 2)],
)
def test_log_probabilities_are_of_each_token_and_of_the_likeliest_in_its_place(name: str, likeliest: int) -> None:
    for one in replay(name)[:-1]:
        batch = one.batch
        assert batch is not None and len(batch.logprobs) == len(batch.ids)
        assert len(batch.top) == (len(batch.ids) if likeliest else 0)
        for token, logprob, top in zip(batch.ids, batch.logprobs, batch.top, strict=False):
            assert logprob <= 0.0 and len(top) == likeliest
            values = [other.logprob for other in top]
            assert values == sorted(values, reverse=True) and logprob <= values[0]
            assert token not in {other.id for other in top} or logprob in values


def test_a_sampled_token_that_is_not_likely_takes_no_place_among_the_likeliest() -> None:
    unlikely = [
        one.batch
        for one in replay("sampled")[:-1]
        if one.batch is not None and one.batch.ids[0] not in {top.id for top in one.batch.top[0]}
    ]
    assert unlikely, "the recording has such a token"
    assert all(batch.logprobs[0] < batch.top[0][-1].logprob for batch in unlikely)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("prompt over the context", 400),
        ("too many log-probabilities", 400),
        ("schema without a tokenizer", 400),
        ("token that the vocabulary lacks", 500),
    ],
)
def test_an_error_in_a_stream_is_the_servers(name: str, code: int) -> None:
    with pytest.raises(ServerRefused) as refused:
        replay(name)
    assert refused.value.fault.code == code and str(refused.value)


def usage(completion: int, **words: Any) -> bytes:
    said = {"prompt_tokens": 2, "completion_tokens": completion, **words}
    return json.dumps({"choices": [], "usage": said}).encode()


def payload(ids: list[int], logprobs: int | None = None, finish: str | None = None) -> bytes:
    return event_of(ids, logprobs, finish)[6:].strip()


def choice(**words: Any) -> bytes:
    return json.dumps({"choices": [{"index": 0, "token_ids": [4], **words}]}).encode()


DEFECTS = {
    "a token that the vocabulary lacks": [payload([100])],
    "more tokens than were asked for": [payload([4, 4, 4, 4])],
    "tokens after the end": [payload([4], None, "length"), payload([4])],
    "tokens of another answer": [choice(index=1)],
    "two answers": [b'{"choices": [{"index": 0, "token_ids": [4]}, {"index": 1, "token_ids": [4]}]}'],
    "a stop without a stop token": [payload([4], None, "stop")],
    "a stop without a token": [payload([], None, "stop")],
    "an unknown end": [payload([4], None, "abort")],
    "nothing": [b"{}"],
    "a count that is too high": [payload([4], None, "length"), usage(2)],
    "a count that is too low": [payload([4], None, "length"), usage(0)],
    "a count that leaves the stop token out": [payload([4, 9], None, "stop"), usage(1)],
    "another prompt's count": [payload([4], None, "length"), usage(1, prompt_tokens=3)],
    "more from a cache than there was": [
        payload([4], None, "length"),
        usage(1, prompt_tokens_details={"cached_tokens": 3}),
    ],
    "a count before the end": [payload([4]), usage(1)],
    "two ends": [payload([4], None, "length"), usage(1), usage(1)],
}


@pytest.mark.parametrize("events", DEFECTS.values(), ids=DEFECTS)
def test_what_no_server_should_say_is_unexpected(events: list[bytes]) -> None:
    answer = VllmAnswer(1, prompt_tokens=2, max_tokens=3, logprobs=None, stop_tokens=(9,), vocabulary_size=100)
    for event in events[:-1]:
        answer.take(event)
    with pytest.raises(UnexpectedMessage):
        answer.take(events[-1])


@pytest.mark.parametrize(
    "logprobs",
    [
        None,
        {"content": None},
        {"content": []},
        {"content": [{"token_id": 5, "logprob": -1.0}]},
        {"content": [{"token_id": 4, "logprob": -1.0}, {"token_id": 4, "logprob": -1.0}]},
    ],
)
def test_log_probabilities_of_other_tokens_are_unexpected(logprobs: object) -> None:
    answer = VllmAnswer(1, prompt_tokens=2, max_tokens=3, logprobs=1, stop_tokens=(), vocabulary_size=100)
    with pytest.raises(UnexpectedMessage):
        answer.take(choice(logprobs=logprobs))


def test_a_stream_that_ends_before_its_end_is_unexpected() -> None:
    for done, events in ((True, []), (True, [payload([4])]), (False, [payload([4], None, "length"), usage(1)])):
        answer = VllmAnswer(1, prompt_tokens=2, max_tokens=3, logprobs=None, stop_tokens=(), vocabulary_size=100)
        for event in events:
            answer.take(event)
        with pytest.raises(UnexpectedMessage):
            answer.end(done=done)
