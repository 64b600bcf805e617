"""Durations on the command line: one spelling, old bare numbers, and every option that takes a time."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate import cli as door
from tidegate.runtime.duration import Duration, printed_duration

# Options that speak of seconds and take no time: rates and tables of points, whose units are in their names.
NO_TIMES = ("-per-s", "--edge-ms", "--pool-ms")
PLAIN = Duration()


def seconds(words: str, kind: Duration = PLAIN) -> float:
    value: float = kind.convert(words, None, None)
    return value


@pytest.mark.parametrize(
    ("words", "found_s"),
    [("200ms", 0.2), ("2s", 2.0), ("1.5m", 90.0), ("1.5min", 90.0), ("24h", 86_400.0), ("90d", 7_776_000.0), ("0s", 0)],
)
def test_a_duration_is_a_number_and_a_unit(words: str, found_s: float) -> None:
    assert seconds(words) == pytest.approx(found_s)


def test_a_bare_number_keeps_the_unit_that_its_option_had() -> None:
    assert seconds("250", Duration(bare="ms")) == 0.25
    assert (seconds("1.5", Duration(bare="s")), seconds("2s", Duration(bare="ms"))) == (1.5, 2.0)


@pytest.mark.parametrize(
    ("kind", "words", "why"),
    [
        (PLAIN, "soon", "'soon' is no duration: a number and ms, s, m, h or d, as in 200ms, 90s, 5m or 1h"),
        (PLAIN, "20", "is no duration"),
        (PLAIN, "-1s", "is no duration"),
        (Duration(bare="s"), "nan", "a number without a unit is in s"),
        (Duration(bare="s"), "-1", "must be at least"),
        (Duration(bare="s", above_zero=True), "0ms", "must be above 0"),
        (Duration(bare="s", min_s=0.1, max_s=60.0), "50ms", "must be at least 100 ms and at most 60 s"),
        (Duration(bare="s", min_s=0.1, max_s=60.0), "2m", "must be at least 100 ms and at most 60 s"),
    ],
)
def test_what_is_no_duration_or_out_of_range_is_refused_in_words(kind: Duration, words: str, why: str) -> None:
    with pytest.raises(click.BadParameter, match=re.escape(why)):
        kind.convert(words, None, None)


@pytest.mark.parametrize(
    ("value_s", "words"),
    [
        (0.0, "0.0 ms"),
        (0.0075, "7.5 ms"),
        (0.2013, "201 ms"),
        (2.0, "2000 ms"),
        (12.5, "12.5 s"),
        (60.0, "60 s"),
        (90.0, "1.5 min"),
        (7200.0, "2 h"),
        (7_776_000.0, "90 d"),
    ],
)
def test_a_duration_is_printed_in_the_unit_that_fits(value_s: float, words: str) -> None:
    assert printed_duration(value_s) == words


@given(st.floats(0.01, 1e7))
def test_what_is_printed_can_be_given_to_an_option(value_s: float) -> None:
    assert seconds(printed_duration(value_s)) == pytest.approx(value_s, rel=0.05)


def options(command: click.Command, *path: str) -> Iterator[tuple[tuple[str, ...], click.Option]]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from options(below, *path, name)
    yield from ((path, one) for one in command.params if isinstance(one, click.Option))


@pytest.mark.slow
def test_every_option_that_takes_a_time_takes_a_duration_and_shows_its_form() -> None:
    times = []
    for path, option in options(door.cli):
        about = f"{' '.join(option.opts)} {option.help or ''}"
        speaks = re.search(r"-(s|ms|seconds|timeout|interval)\b|\b(milli)?seconds\b|\bhow long\b", about, re.I)
        if speaks and not option.opts[0].endswith(NO_TIMES):
            assert isinstance(option.type, Duration), (path, option.opts, option.help)
        if isinstance(option.type, Duration):
            times.append((*path, option.opts[0]))
            shown = option.make_metavar(click.Context(click.Command("x")))
            assert "200ms|2s|1.5m" in shown, (path, shown)
    named = {("record", "--for"), ("fleet", "simulate", "--for"), ("fleet", "simulate", "--ramp")}
    assert named | {("model", "rollout", "--p95-max-ms"), ("keys", "create", "--expires")} <= set(times)
    assert len(times) >= 14
