"""Events out of bytes, however these were cut on their way, and never more of them than is allowed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.targets.openai.event_lines import EventReader
from tidegate.outcome import BadAnswer

LINES = st.text(st.characters(blacklist_characters="\r\n", blacklist_categories=("Cs",)), min_size=1, max_size=40)


@pytest.mark.slow
@given(st.lists(st.lists(LINES, min_size=1, max_size=3), max_size=8), st.data(), st.sampled_from(["\n", "\r\n"]))
def test_events_are_the_same_wherever_their_bytes_are_cut(
    events: list[list[str]], data: st.DataObject, end: str
) -> None:
    stream = "".join(
        "".join(f"data: {line}{end}" for line in lines) + f": a comment{end}id: 7{end}{end}" for lines in events
    ).encode()
    reader, found = EventReader(), []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        found += reader.feed(stream[:cut])
        stream = stream[cut:]
    assert found == ["\n".join(lines).encode() for lines in events]


@pytest.mark.parametrize(("stream", "expected"), [
    (b"data:x\n\n", [b"x"]),
    (b"data: x\n\ndata: y\n\n", [b"x", b"y"]),
    (b"data\n\n", [b""]),
    (b": only a comment\n\n", []),
    (b"event: error\nerror: {}\n\n", [b"{}"]),  # as llama-server said it for some years
    (b"\n\n\n", []),
    (b"data: not ended\n", []),
])  # fmt: skip
def test_fields_that_count(stream: bytes, expected: list[bytes]) -> None:
    assert list(EventReader().feed(stream)) == expected


@pytest.mark.parametrize("endless", [b"x", b"data: x\n", b"data: " + b"x" * 90, b"data:\n", b"error\n"])
def test_an_event_without_an_end_is_given_up_at_its_bound(endless: bytes) -> None:
    reader, fed = EventReader(most_bytes=1000), 0
    with pytest.raises(BadAnswer, match="more than 1000 bytes"):
        for _ in range(10_000):
            fed += len(endless)
            assert list(reader.feed(endless)) == []
    assert fed < 10_000


def test_comments_may_come_for_ever() -> None:
    reader = EventReader(most_bytes=100)
    for _ in range(1000):
        assert list(reader.feed(b": still here\n\n")) == []


def test_events_before_one_that_is_too_large_count_though_they_came_in_one_piece() -> None:
    events = EventReader(most_bytes=100).feed(b"data: one\n\ndata: two\n\ndata: " + b"x" * 100 + b"\n\n")
    assert [next(events), next(events)] == [b"one", b"two"]
    with pytest.raises(BadAnswer, match="more than 100 bytes"):
        next(events)
