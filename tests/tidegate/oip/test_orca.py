"""A load report beside an answer, in both forms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.oip.orca import load_from_text, load_text
from tidegate.types import LoadReport

LOAD = LoadReport(1, 2, 3, 4, 0.5)

counts = st.integers(min_value=0, max_value=2**53)


@given(
    st.builds(
        LoadReport, counts, counts, counts, counts, st.floats(min_value=0, allow_nan=False, allow_infinity=False)
    ),
    st.sampled_from(["text", "JSON", "json "]),
)
def test_a_load_crosses_either_form_unchanged(load: LoadReport, form: str) -> None:
    assert load_from_text(load_text(load, form)) == load


def test_the_forms_are_those_of_orca() -> None:
    assert load_text(LOAD).startswith("TEXT named_metrics.tidegate_epoch=1, named_metrics.tidegate_sequence=2, ")
    assert load_text(LOAD, "json") == (
        'JSON {"named_metrics":{"tidegate_epoch":1,"tidegate_sequence":2,"tidegate_queued":3,'
        '"tidegate_in_flight":4,"tidegate_queue_delay_s":0.5}}'
    )


def test_an_unknown_form_is_answered_in_text() -> None:
    assert load_text(LOAD, "protobuf") == load_text(LOAD)


@pytest.mark.slow
@given(st.text(), st.sampled_from(["", "TEXT ", "JSON "]))
def test_any_text_is_a_load_or_none(text: str, form: str) -> None:
    assert load_from_text(form + text) is None


@pytest.mark.parametrize("broken", ["epoch=-1", "queued=x", "queue_delay_s=nan", "queue_delay_s=-1"])
def test_a_damaged_load_is_none(broken: str) -> None:
    name = broken.partition("=")[0]
    good = load_text(LOAD).split(", ")
    parts = [f"{part.partition(name)[0]}{broken}" if f"_{name}=" in part else part for part in good]
    assert parts != good
    assert load_from_text(", ".join(parts)) is None


@pytest.mark.parametrize(
    "metrics",
    ["[]", "{}", '{"named_metrics": 3}', '{"named_metrics": {"tidegate_epoch": []}}', "[" * 5000],
)
def test_foreign_json_is_none(metrics: str) -> None:
    assert load_from_text("JSON " + metrics) is None


def test_numbers_that_json_has_and_a_load_has_not_are_none() -> None:
    huge = load_text(LOAD, "json").replace('"tidegate_epoch":1,', '"tidegate_epoch":1e999,')
    assert load_from_text(huge) is None
