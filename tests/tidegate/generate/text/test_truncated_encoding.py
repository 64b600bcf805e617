"""Texts to tokens by the library itself: what is cut, and that the texts of one caller do not wait for another's."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.support.models.text_side import tiny_tokenizer
from tidegate import clock
from tidegate.generate.text.truncated_encoding import encode_truncated, truncating_tokenizer

MAX_TOKENS = 16


def tokenizer() -> Any:
    return truncating_tokenizer(tiny_tokenizer().to_str().encode(), MAX_TOKENS)


def test_each_text_has_its_own_tokens_and_a_long_one_is_cut() -> None:
    texts = ["the tide", "the tide " * 1000, "", " " * 1000]
    whole = tiny_tokenizer()
    encodings = encode_truncated(tokenizer(), texts)
    assert [one.ids for one in encodings] == [whole.encode(text).ids[:MAX_TOKENS] for text in texts]
    assert [bool(one.overflowing) for one in encodings] == [len(whole.encode(text).ids) > MAX_TOKENS for text in texts]


@pytest.mark.slow
def test_two_short_texts_do_not_wait_for_a_batch_that_fills_the_librarys_threads() -> None:
    shared = tokenizer()
    big = ["the tide comes in and goes out again " * 400] * 24
    others = threading.Thread(target=shared.encode_batch, args=[big])
    others.start()
    began_at = clock.now()
    took_s = []
    while others.is_alive():
        at = clock.now()
        encode_truncated(shared, ["the tide", "comes in"])
        took_s.append(clock.now() - at)
    assert max(took_s) < 0.5 * (clock.now() - began_at)  # one that waited would have waited for most of the batch
