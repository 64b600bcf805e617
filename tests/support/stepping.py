"""Driving a generating engine by hand, as a worker's loop does."""

from __future__ import annotations

from tidegate.generate.engine import GenerativeEngine, SequenceProgress
from tidegate.generate.request import GenerateRequest
from tidegate.token_sink import TopLogprob


class Text:
    """What came of one sequence."""

    def __init__(self) -> None:
        self.ids: tuple[int, ...] = ()
        self.logprobs: tuple[float, ...] = ()
        self.top: tuple[tuple[TopLogprob, ...], ...] = ()
        self.cached_tokens = 0
        self.end: SequenceProgress | None = None

    def take(self, progress: SequenceProgress) -> None:
        assert self.end is None, "nothing comes after the end"
        if progress.batch is not None:
            assert progress.batch.first == len(self.ids)
            if not self.ids:
                self.cached_tokens = progress.cached_tokens
            self.ids += progress.batch.ids
            self.logprobs += progress.batch.logprobs
            self.top += progress.batch.top
        if progress.finished is not None or progress.error:
            self.end = progress

    def __repr__(self) -> str:
        return f"<Text {self.ids} {self.end}>"


def run(engine: GenerativeEngine, *requests: GenerateRequest, most_steps: int = 10_000) -> list[Text]:
    """The whole texts, all at once; the one with the fewest tokens is stepped first."""
    texts = {id: Text() for id in range(1, 1 + len(requests))}
    for id, request in enumerate(requests, 1):
        engine.begin(id, request)
    for _ in range(most_steps):
        due = sorted((id for id in texts if texts[id].end is None), key=lambda id: len(texts[id].ids))
        if not due:
            return list(texts.values())
        for progress in engine.step(due):
            texts[progress.id].take(progress)
    raise AssertionError(f"{engine!r} has not ended all after {most_steps} steps: {texts}")


def run_one(engine: GenerativeEngine, request: GenerateRequest) -> Text:
    (text,) = run(engine, request)
    return text
