"""Texts to tokens beside the loop: many texts are many jobs, so that they end with their caller and its budget."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.models.text_side import tiny_tokenizer
from tests.support.serving.host import FakeHost, minilm
from tests.support.serving.oip_servers import OneFolder, serving
from tidegate import clock
from tidegate.generate.text.truncated_encoding import encode_truncated
from tidegate.openai import tokens
from tidegate.openai.tokens import INLINE_CHARACTERS, JOB_CHARACTERS, JOB_TEXTS, Tokenizers, jobs_of

LONG = "the tide comes in " * (JOB_CHARACTERS // 18)
TEXTS = [LONG] * 60


class Jobs:
    """What the tokenizer is given at a time, and where."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.texts: list[Sequence[str]] = []
        self.threads: list[int] = []

        def encode(tokenizer: Any, texts: Sequence[str]) -> list[Any]:
            self.texts.append(texts)
            self.threads.append(threading.get_ident())
            return encode_truncated(tokenizer, texts)

        monkeypatch.setattr(tokens, "encode_truncated", encode)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    return Jobs(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@given(st.lists(st.sampled_from([1, 100, JOB_CHARACTERS // 3, JOB_CHARACTERS, 2 * JOB_CHARACTERS]), max_size=200))
def test_no_job_has_more_texts_or_characters_than_one_may(lengths: list[int]) -> None:
    longest = "x" * (2 * JOB_CHARACTERS)
    texts = [longest[:length] for length in lengths]
    cut = list(jobs_of(texts))
    assert [text for job in cut for text in job] == texts
    assert all(len(job) <= JOB_TEXTS for job in cut)
    assert all(len(job) == 1 or sum(map(len, job)) <= JOB_CHARACTERS for job in cut)


async def test_few_characters_are_encoded_in_place_and_all_of_more_beside_the_loop(folder: Path, jobs: Jobs) -> None:
    tokenizers, here = Tokenizers(OneFolder(folder)), threading.get_ident()
    await tokenizers.rows(minilm(), ["x"] * INLINE_CHARACTERS)
    assert jobs.threads == [here]
    await tokenizers.rows(minilm(), ["x"] * (INLINE_CHARACTERS + 1))
    assert here not in jobs.threads[1:]


@pytest.mark.slow
async def test_a_caller_that_leaves_ends_its_work(folder: Path, jobs: Jobs) -> None:
    tokenizers = Tokenizers(OneFolder(folder))
    encoding = asyncio.create_task(tokenizers.rows(minilm(), TEXTS))
    while not jobs.texts:
        await clock.sleep(0)
    encoding.cancel()
    await asyncio.wait([encoding])
    await tokenizers.rows(minilm(), TEXTS[:4])  # and its place is free
    assert sum(map(len, jobs.texts)) < 20


@pytest.mark.slow
async def test_a_few_texts_pass_between_those_of_large_bodies(folder: Path) -> None:
    tokenizers, ended = Tokenizers(OneFolder(folder)), list[str]()

    async def encode(name: str, texts: list[str]) -> None:
        await tokenizers.rows(minilm(), texts)
        ended.append(name)

    async with asyncio.TaskGroup() as group:
        for name in ("a", "b", "c"):
            group.create_task(encode(name, TEXTS))
        await clock.sleep(0)
        group.create_task(encode("few", ["the tide " * 400]))
    assert ended[0] == "few"


@pytest.mark.slow
async def test_a_budget_ends_in_the_middle_of_the_texts(folder: Path, jobs: Jobs) -> None:
    async with (
        serving(FakeHost(), folder) as servers,
        aiohttp.ClientSession() as session,
        session.post(
            f"http://{servers.http}/v1/embeddings",
            data=io.BytesIO(json.dumps({"model": "minilm", "input": TEXTS}).encode()),
            headers={"tidegate-budget-ms": "20"},
        ) as answer,
    ):
        said = await answer.json()
    assert (answer.status, said["error"]["code"]) == (504, "deadline_exceeded")
    assert sum(map(len, jobs.texts)) < len(TEXTS)
    assert not servers.host.calls
    assert [error.code for _, _, error in servers.refused] == ["deadline_exceeded"]
