"""The digest of a vocabulary changes with what an id means, and with nothing else."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tidegate.generate.vocabulary import vocabulary_digest


def of(**vocabulary: int) -> str:
    return vocabulary_digest(Tokenizer(WordLevel(vocabulary, unk_token="a")))


def test_it_says_what_ids_mean() -> None:
    assert of(a=0, b=1) == of(b=1, a=0)
    assert of(a=0, b=1) != of(a=1, b=0)
    assert of(a=0, b=1) != of(a=0, bc=1)
    assert of(a=0, b=1) != of(a=0, b=1, c=2)


def test_added_tokens_count() -> None:
    tokenizer = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    before = vocabulary_digest(tokenizer)
    tokenizer.add_special_tokens(["<end>"])
    assert vocabulary_digest(tokenizer) != before
