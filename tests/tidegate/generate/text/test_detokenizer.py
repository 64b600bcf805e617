"""Text out of tokens, one at a time: no part of a character, nothing lost, and a bounded look back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tests.support.models.text_side import tiny_tokenizer
from tidegate.generate.text.detokenizer import Detokenizer

TINY = tiny_tokenizer()


class Counting:
    """A decoder that notes how many tokens it is given at a time. Args: fixed: whether it knows whole characters."""

    def __init__(self, tokenizer: Any = TINY, *, fixed: bool = False) -> None:
        self._tokenizer = tokenizer
        self._fixed = fixed
        self.most = 0

    def decode(self, ids: Sequence[int]) -> str:
        self.most = max(self.most, len(ids))
        text: str = self._tokenizer.decode(list(ids))
        return text

    def fixed_text(self, id: int) -> str | None:
        text = self.decode([id])
        return text if self._fixed and "\ufffd" not in text else None


def spoken(tokenizer: Any, ids: Sequence[int], prompt: Sequence[int] = (), *, fixed: bool = False) -> list[str]:
    one = Detokenizer(Counting(tokenizer, fixed=fixed), prompt)
    return [*(one.push(id) for id in ids), one.flush()]


@pytest.mark.slow
@given(st.text(max_size=40), st.booleans())
def test_the_pieces_of_any_text_are_the_text_and_hold_whole_characters(text: str, fixed: bool) -> None:
    pieces = spoken(TINY, TINY.encode(text).ids, fixed=fixed)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece or "\ufffd" in text for piece in pieces)


@given(st.lists(st.integers(0, TINY.get_vocab_size() - 1), max_size=40), st.booleans())
def test_tokens_that_are_no_text_lose_nothing_that_is(ids: list[int], fixed: bool) -> None:
    """What is no UTF-8 may give another number of U+FFFD in pieces than at once; characters are the same."""
    at_once = TINY.decode(ids)
    assert "".join(spoken(TINY, ids, fixed=fixed)).replace("\ufffd", "") == at_once.replace("\ufffd", "")


def test_a_character_waits_for_its_last_token() -> None:
    ids = TINY.encode("🌊").ids
    assert len(ids) == 4
    assert spoken(TINY, ids) == ["", "", "", "🌊", ""]


def test_a_character_that_is_never_finished_is_shown_as_broken_at_the_end() -> None:
    assert spoken(TINY, TINY.encode("🌊").ids[:2]) == ["", "", "\ufffd"]


def test_special_tokens_are_not_text() -> None:
    end = TINY.token_to_id("<|im_end|>")
    assert "".join(spoken(TINY, [*TINY.encode("the").ids, end])) == "the"


@pytest.mark.parametrize("token", ["the", "🌊"])
def test_each_token_costs_the_same_however_long_the_text_or_the_nonsense_is(token: str) -> None:
    decoder, id = Counting(), TINY.encode(token).ids[0]  # of the wave: its first byte, again and again
    one = Detokenizer(decoder, [id] * 1000)
    for _ in range(1000):
        one.push(id)
    assert decoder.most <= 20


def test_a_character_behind_nonsense_is_whole() -> None:
    broken, wave = TINY.encode("🌊").ids[:1], TINY.encode("🌊").ids
    assert "".join(spoken(TINY, broken * 50 + wave)).endswith("🌊")


def test_the_space_before_a_word_is_there_where_the_decoder_strips_the_first() -> None:
    vocabulary = {"<unk>": 0, "▁the": 1, "▁tide": 2, "s": 3}
    tokenizer: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    assert tokenizer.decode([1, 2, 3]) == "the tides"
    assert spoken(tokenizer, [1, 2, 3]) == ["the", " tide", "s", ""]
    assert spoken(tokenizer, [2, 3], prompt=[1]) == [" tide", "s", ""]
