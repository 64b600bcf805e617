"""A signed home is believed by gateways with its key, for its own sequence, for as long as the state is kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.access.sequence_home import SequenceHomes
from tidegate.outcome import InvalidRequest

ONE, TWO = b"a" * 32, b"b" * 32


def test_any_gateway_with_the_key_reads_it() -> None:
    token = SequenceHomes([ONE]).token("minilm", "acme/7", "pool/a", 130.9)
    assert SequenceHomes([ONE]).target(token, "minilm", "acme/7", 100.0) == "pool/a"
    assert SequenceHomes([TWO, ONE]).target(token, "minilm", "acme/7", 100.0) == "pool/a", "keys can be exchanged"
    assert SequenceHomes([ONE]).target(token, "minilm", "acme/7", 130.0) is None, "its time is over"
    assert len(token) < 100


@pytest.mark.parametrize(
    ("model", "id", "keys"),
    [
        ("other", "acme/7", [ONE]),
        ("minilm", "globex/7", [ONE]),
        ("minilm", "acme/'7", [ONE]),
        ("minilm", 7, [ONE]),
        ("minilm", "acme/7", [TWO]),
    ],
)
def test_a_token_of_anything_else_is_refused(model: str, id: int | str, keys: list[bytes]) -> None:
    token = SequenceHomes([ONE]).token("minilm", "acme/7", "pool/a", 130.0)
    with pytest.raises(InvalidRequest, match="not signed for this sequence"):
        SequenceHomes(keys).target(token, model, id, 100.0)


@given(st.text(max_size=700))
def test_what_a_client_makes_up_is_refused_in_words(text: str) -> None:
    with pytest.raises(InvalidRequest):
        SequenceHomes([ONE]).target(text, "minilm", 7, 100.0)


@given(st.integers(0, 100), st.integers(0, 127))
def test_a_token_with_another_character_is_not_believed(place: int, code: int) -> None:
    homes = SequenceHomes([ONE])
    token = homes.token("minilm", 7, "pool/a", 130.0)
    changed = token[: place % len(token)] + chr(code) + token[place % len(token) + 1 :]
    try:
        assert homes.target(changed, "minilm", 7, 100.0) == "pool/a"  # a last character has bits that say nothing
    except InvalidRequest:
        assert changed != token


@pytest.mark.parametrize("keys", [[], [b"short"], [ONE, b""]])
def test_a_key_that_can_be_guessed_is_refused(keys: list[bytes]) -> None:
    with pytest.raises(ValueError, match="key"):
        SequenceHomes(keys)
