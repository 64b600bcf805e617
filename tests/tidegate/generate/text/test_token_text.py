"""A token by itself: bytes that can be joined, whichever way its vocabulary spells them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.models.text_side import END, tiny_tokenizer
from tidegate.generate.text.token_text import TokenText, TokenTexts

BYTE_LEVEL = tiny_tokenizer()


def sentencepiece(*tokens: str) -> Any:
    """As Llama's of old: `▁` is a space, and bytes that are in no other token have one of their own."""
    vocabulary = {token: id for id, token in enumerate([*tokens, *[f"<0x{byte:02X}>" for byte in range(256)]])}
    tokenizer: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


@given(st.text(max_size=20))
def test_the_bytes_of_a_texts_tokens_are_those_of_the_text(text: str) -> None:
    texts = TokenTexts(BYTE_LEVEL)
    assert b"".join([texts.of(id).raw for id in BYTE_LEVEL.encode(text).ids]) == text.encode()


def test_a_byte_level_vocabulary_has_every_byte() -> None:
    texts = TokenTexts(BYTE_LEVEL)
    alphabet = [texts.of(BYTE_LEVEL.token_to_id(letter)).raw for letter in pre_tokenizers.ByteLevel.alphabet()]
    assert sorted(alphabet) == [bytes([byte]) for byte in range(256)]


def test_a_byte_level_decoder_is_known_in_a_sequence_too() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    assert TokenTexts(tokenizer).of(tokenizer.token_to_id("ð")).raw == b"\xf0"


def test_tokens_that_were_added_as_they_are_have_the_bytes_of_their_text() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens(["｜\ufffd｜"])  # not of the letters that stand for bytes
    texts = TokenTexts(tokenizer)
    assert texts.of(tokenizer.token_to_id("｜\ufffd｜")).raw == "｜\ufffd｜".encode()
    assert texts.of(tokenizer.token_to_id(END)).raw == END.encode()


@pytest.mark.parametrize(("token", "raw"), [
    ("<0xF0>", b"\xf0"), ("<0x9F>", b"\x9f"), ("<0x41>", b"A"), ("▁tide", b" tide"), ("tide", b"tide"), ("<s>", b"<s>"),
    ("海", "海".encode()),
])  # fmt: skip
def test_a_vocabulary_of_sentencepiece_has_bytes_and_keeps_its_spaces(token: str, raw: bytes) -> None:
    tokenizer = sentencepiece("▁tide", "tide", "海")
    assert TokenTexts(tokenizer).of(tokenizer.token_to_id(token)).raw == raw


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece()])
def test_tokens_of_other_vocabularies_have_the_bytes_of_their_text(decoder: Any) -> None:
    tokenizer: Any = Tokenizer(models.WordLevel({"tide": 0, "\ufffd": 1, "[UNK]": 2}, unk_token="[UNK]"))
    if decoder is not None:
        tokenizer.decoder = decoder
    assert [TokenTexts(tokenizer).of(id).raw.strip() for id in (0, 1)] == [b"tide", "\ufffd".encode()]
    assert repr(TokenTexts(tokenizer)) == "<TokenTexts unknown>"


@pytest.mark.parametrize(("raw", "spelled", "is_whole"), [
    (b"tide", "tide", True), ("海".encode(), "海", True), (b"\xf0\x9f", r"\xf0\x9f", False),
    (b" \xf0", r" \xf0", False), ("\ufffd".encode(), "\ufffd", True),
])  # fmt: skip
def test_parts_of_characters_are_spelled_by_their_bytes(raw: bytes, spelled: str, is_whole: bool) -> None:
    assert (TokenText(raw).spelled, TokenText(raw).is_whole) == (spelled, is_whole)
