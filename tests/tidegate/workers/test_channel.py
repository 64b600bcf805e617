"""Frames between a process and its worker."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from numpy.typing import NDArray

from tidegate.workers import channel
from tidegate.workers.channel import (
    ALIGNMENT,
    ArraySpec,
    CancelRun,
    EngineLoaded,
    FrameError,
    LoadEngine,
    RunCompleted,
    RunEngine,
    RunFailed,
)
from tidegate.workers.generation.messages import SequenceEnded, StepTaken


def joined(parts: list[Any]) -> bytes:
    return b"".join(bytes(part) for part in parts)


def travel(arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    frame = joined(channel.pack_with(RunEngine(7, "key"), channel.lay_out(arrays)))
    header_bytes, payload_bytes = channel.parse_prefix(frame[: channel.PREFIX_BYTES])
    body = frame[channel.PREFIX_BYTES :]
    message = channel.parse_to_child(body[:header_bytes])
    assert isinstance(message, RunEngine)
    assert (message.id, message.key, len(body)) == (7, "key", header_bytes + payload_bytes)
    return channel.unpack(message.arrays, body[header_bytes:])


dtypes = st.sampled_from(["?", "u1", "i2", "i4", "<i8", "f2", "f4", ">f8", "u2"])


@pytest.mark.slow
@given(st.dictionaries(st.text(max_size=9), arrays_of.arrays(dtypes, arrays_of.array_shapes(min_side=0)), max_size=4))
def test_any_arrays_arrive_as_they_left(arrays: dict[str, NDArray[Any]]) -> None:
    arrived = travel(arrays)
    assert list(arrived) == list(arrays)
    for name, array in arrays.items():
        assert arrived[name].dtype == array.dtype
        np.testing.assert_array_equal(arrived[name], array)


def test_a_transposed_array_arrives_in_its_own_order() -> None:
    array = np.arange(6).reshape(2, 3).T
    assert travel({"x": array})["x"].tolist() == array.tolist()


def test_arrays_of_bytes_and_text_arrive_as_bytes() -> None:
    arrived = travel({"x": np.array([[b"a", b""], [b"\x00c", b"d"]], object), "y": np.array(["ö"])})
    assert arrived["x"].tolist() == [[b"a", b""], [b"\x00c", b"d"]]
    assert arrived["y"].tolist() == ["ö".encode()]


def test_arrays_are_aligned_and_alias_the_payload() -> None:
    parts = channel.pack_with(RunCompleted(1, 0.5), channel.lay_out({"a": np.ones(3, np.uint8), "b": np.ones(5)}))
    payload = joined(parts[2:])
    assert len(payload) == 2 * ALIGNMENT
    specs = (ArraySpec("a", "|u1", (3,), 3), ArraySpec("b", "<f8", (5,), 40))
    buffer = bytearray(payload)
    array = channel.unpack(specs, buffer)["b"]
    buffer[ALIGNMENT : ALIGNMENT + 8] = bytes(8)
    assert array[0] == 0.0


@pytest.mark.parametrize("array", [np.array([1j]), np.array([3, "x", None], object), np.array(["2020-01-01"], "M8[D]")])
def test_what_does_not_travel_is_named(array: NDArray[Any]) -> None:
    with pytest.raises(FrameError, match="'odd'"):
        channel.lay_out({"odd": array})


def test_messages_without_arrays_travel() -> None:
    load = LoadEngine(3, "key", "onnx", "/a/b", ("y",), 2, "cpu")
    frame = channel.pack(load)
    assert channel.parse_to_child(frame[channel.PREFIX_BYTES :]) == load
    assert channel.parse_from_child(channel.pack(RunFailed(3, "no"))[channel.PREFIX_BYTES :]) == RunFailed(3, "no")


@pytest.mark.parametrize("prefix", [b"\xff\xff\xff\xff\x00\x00\x00\x00", b"\x01\x00\x00\x00\xff\xff\xff\xff"])
def test_sizes_over_the_bounds_are_refused_before_memory_is_taken(prefix: bytes) -> None:
    with pytest.raises(FrameError, match="over the limits"):
        channel.parse_prefix(prefix)


@pytest.mark.parametrize(
    "header", [b"", b"\xc1", b"\x81\xa1t\xa5other", channel.pack(CancelRun(1))[channel.PREFIX_BYTES :]]
)
def test_a_header_that_does_not_parse_is_a_frame_error(header: bytes) -> None:
    with pytest.raises(FrameError):
        channel.parse_from_child(header)


def test_a_message_of_the_wrong_direction_is_refused() -> None:
    with pytest.raises(FrameError):
        channel.parse_to_child(channel.pack(RunFailed(1, "no"))[channel.PREFIX_BYTES :])


@pytest.mark.parametrize(
    "spec",
    [
        ArraySpec("x", "<f4", (3,), 8),
        ArraySpec("x", "<f4", (-1, 0), 8),
        ArraySpec("x", "nonsense", (2,), 8),
        ArraySpec("x", "<c8", (1,), 8),
        ArraySpec("x", "(2,<f4", (2,), 8),
        ArraySpec("x", "f4,f4", (1,), 8),
        ArraySpec("x", "<f4", (32,), 128),
        ArraySpec("x", "O", (2,), 8),
    ],
    ids=["too small", "negative", "no dtype", "does not travel", "cut off", "of fields", "past the end", "bytes cut"],
)
def test_arrays_that_do_not_match_their_payload_are_refused(spec: ArraySpec) -> None:
    with pytest.raises(FrameError):
        channel.unpack((spec,), b"\xff" * ALIGNMENT)


def _answer(*, compute_s: float = 0.1, gc_s: float = 0.0, shape: tuple[int, ...] = (2,), size_bytes: int = 8) -> bytes:
    told = RunCompleted(1, compute_s, (ArraySpec("x", "<f4", shape, size_bytes),), gc_s=gc_s)
    return channel.pack(told)[channel.PREFIX_BYTES :]


@pytest.mark.parametrize("shape", [(-1,), (-1, 2), (-2, -1)])
def test_a_shape_with_a_negative_size_is_a_frame_error(shape: tuple[int, ...]) -> None:
    assert channel.parse_from_child(_answer())
    with pytest.raises(FrameError, match="arrays"):
        channel.parse_from_child(_answer(shape=shape))


def test_an_array_of_a_negative_length_is_a_frame_error() -> None:
    with pytest.raises(FrameError, match="arrays"):
        channel.parse_from_child(_answer(size_bytes=-56))


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -1.0])
def test_a_time_that_nobody_can_have_taken_is_a_frame_error(seconds: float) -> None:
    frames = [
        _answer(compute_s=seconds),
        _answer(gc_s=seconds),
        channel.pack(EngineLoaded(1, seconds))[channel.PREFIX_BYTES :],
        channel.pack(StepTaken(step_s=seconds))[channel.PREFIX_BYTES :],
        channel.pack(StepTaken(ended=(SequenceEnded(1, "stop", False, seconds, 0.1),)))[channel.PREFIX_BYTES :],
        channel.pack(StepTaken(ended=(SequenceEnded(1, "stop", False, 0.1, seconds),)))[channel.PREFIX_BYTES :],
    ]
    for frame in frames:
        with pytest.raises(FrameError, match="does not parse"):
            channel.parse_from_child(frame)


def test_a_payload_that_no_array_claims_is_refused() -> None:
    with pytest.raises(FrameError, match="64 bytes, but 128 came"):
        channel.unpack((ArraySpec("x", "|u1", (3,), 3),), bytes(128))


def test_a_long_error_message_is_cut() -> None:
    assert channel.shorten("short") == "short"
    assert len(channel.shorten("x" * 100_000)) < 5000
