"""One range of a file by RFC 9110's rules; any other `Range` header requests the whole file."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.delivery.artifacts.byte_range import UnsatisfiableRange, byte_range, if_range_matches
from gateway.delivery.artifacts.pacing import BytePacer

SIZE = 100
WHOLE = [
    "", "bytes", "bytes=", "bytes=-", "bytes=a-b", "bytes=5-2", "bytes=0-1,5-9", "items=0-5", "bytes=0-1 2",
    "bytes=" + "9" * 5000 + "-", "bytes=-" + "1" * 19, "bytes=٣-٤", "0-5",
]  # fmt: skip


@pytest.mark.parametrize("header", WHOLE)
def test_what_is_no_single_range_asks_for_the_whole(header: str) -> None:
    assert byte_range(header, SIZE) is None


@pytest.mark.parametrize(
    ("header", "wanted"),
    [
        ("bytes=0-", (0, 100)),
        ("bytes=40-", (40, 60)),
        ("bytes=40-49", (40, 10)),
        ("bytes=99-99", (99, 1)),
        ("bytes=90-1000", (90, 10)),
        ("bytes=-10", (90, 10)),
        ("bytes=-1000", (0, 100)),
        (" Bytes=0-0", (0, 1)),
    ],
)
def test_a_range_is_cut_to_the_file(header: str, wanted: tuple[int, int]) -> None:
    assert byte_range(header, SIZE) == wanted


@pytest.mark.parametrize(("header", "size"), [("bytes=100-", 100), ("bytes=-0", 100), ("bytes=0-", 0), ("bytes=-5", 0)])
def test_a_range_outside_of_the_file_is_refused(header: str, size: int) -> None:
    with pytest.raises(UnsatisfiableRange):
        byte_range(header, size)


@pytest.mark.slow
@given(header=st.text(max_size=60) | st.from_regex(r"bytes=\d{0,20}-\d{0,20}"), size=st.integers(0, 2**40))
def test_no_header_reaches_outside_of_the_file(header: str, size: int) -> None:
    try:
        part = byte_range(header, size)
    except UnsatisfiableRange:
        return
    if part is not None:
        first, count = part
        assert 0 <= first < size and 0 < count <= size - first


def test_a_range_counts_only_for_the_content_that_was_begun() -> None:
    assert if_range_matches("", '"a"') and if_range_matches('"a"', '"a"')
    assert not if_range_matches('"b"', '"a"') and not if_range_matches("Sat, 01 Jan 2000 00:00:00 GMT", '"a"')


@given(readers=st.integers(1, 8), pieces=st.integers(1, 20))
def test_readers_share_the_rate_evenly_and_never_exceed_it(readers: int, pieces: int) -> None:
    pace, now, sent = BytePacer(1000.0), 0.0, [0] * readers
    at = [0.0] * readers
    for _ in range(pieces * readers):
        reader = min(range(readers), key=lambda one: (at[one], sent[one]))
        now = at[reader]
        at[reader] = now + pace.wait_s(100, now)
        sent[reader] += 100

    assert max(sent) - min(sent) <= 100
    assert sum(sent) <= 1000.0 * max(at) + 100 * readers + 1e-6
