"""The texts of `tidegate up`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tidegate.tools.up.messages import commands, console, process_rows, ready_line, request_line
from tidegate.tools.up.plan import Options, plan
from tidegate.tools.up.screen import LineBudget

PLAN = plan(Options(Path("/data"), Path("/data/models"), edges=1))
SERVED: dict[str, Any] = {
    "model": "minilm", "outcome": "ok", "feature": "tokens", "units": 12, "cost_class": "small", "budget_ms": 2000.0,
    "served_by": "edge/edge-1", "variant": "int8", "reason": "cheapest", "latency_ms": 4.25, "budget_left_ms": 1995.75,
}  # fmt: skip
REFUSED = {"outcome": "nothing_alive", "served_by": "", "variant": "", "reason": "no target is alive"}


def words_of(line: str) -> str:
    return " ".join(line.split())


def test_a_request_line_says_what_it_cost_where_it_went_why_and_what_was_left() -> None:
    assert words_of(request_line(SERVED)) == (
        "minilm 12 tokens (small) budget 2000 ms → edge/edge-1 int8 cheapest 4.2 ms 1996 ms left"
    )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (REFUSED, "→ nowhere nothing_alive 4.2 ms 1996 ms left no target is alive"),
        (REFUSED | {"reason": "x" * 500}, "left " + "x" * 159 + "…"),
        ({"outcome": "late"}, "late, cheapest"),
        ({"units": None}, "minilm budget"),
        ({"budget_ms": None}, "budget -"),
        ({"prompt_tokens": 31, "completion_tokens": 64}, "minilm 31+64 tokens budget"),
        ({"first_token_ms": 120.4, "tokens_per_s": 41.2}, "left ttft 120 ms 41 tok/s"),
        ({"first_token_ms": 12.34}, "left ttft 12.3 ms"),
        ({"units": 4096.0, "cost_class": None, "feature": None}, "minilm 4096 budget"),
    ],
)
def test_a_request_line_leaves_out_what_is_not_known(changed: dict[str, Any], said: str) -> None:
    assert said in words_of(request_line(SERVED | changed))


def test_lines_of_requests_stand_in_columns() -> None:
    other = SERVED | {"model": "digits", "units": 64, "feature": "pixels", "latency_ms": 12.0}
    assert request_line(SERVED).index("→") == request_line(other).index("→")


def test_the_table_shows_each_part_with_the_models_that_the_gateway_knows_of() -> None:
    state = {"targets": [{"address": "127.0.0.1:8006", "models": [{"name": "minilm", "variants": [{"name": "int8"}]}]}]}
    rows = process_rows(PLAN, {"gateway": 7, "edge-1": 8}, state)
    assert [row[0] for row in rows] == ["gateway", "edge-1", "pool", "broker"]
    assert rows[1] == ("edge-1", "127.0.0.1:8006", "8", "minilm int8")
    assert rows[2][2:] == ("-", "")


def test_variants_may_be_plain_names() -> None:
    state = {"targets": [{"address": "127.0.0.1:8005", "models": [{"name": "digits", "variants": ["fp32", "bf16"]}]}]}
    assert process_rows(PLAN, {}, state)[2][3] == "digits fp32, bf16"


def test_the_commands_to_copy_are_whole_shell_words_with_bodies_that_parse() -> None:
    state = {"models": [{"name": "digits"}, {"name": "minilm"}, {"name": "smollm2"}]}
    for title, command in commands(PLAN, "/a path/python", state):
        words = shlex.split(command)
        assert words[0] in ("curl", "/a path/python"), title
        if words[0] == "curl":
            assert json.loads(words[words.index("-d") + 1])


def test_without_the_demo_text_model_the_command_to_copy_asks_what_is_served() -> None:
    (found,) = commands(PLAN, "python", {"models": [{"name": "encoder"}]})
    assert found[1] == "tidegate status --admin http://127.0.0.1:8003"


def test_the_ready_line_is_one_line_that_names_every_process() -> None:
    line = ready_line(PLAN, {"gateway": 7, "broker": 1, "pool": 2, "edge-1": 3})
    assert "\n" not in line
    ready = json.loads(line)
    assert (ready["event"], ready["http"], ready["grpc"]) == ("ready", "http://127.0.0.1:8000", "127.0.0.1:8001")
    assert {(one["role"], one["name"], one["pid"]) for one in ready["processes"]} == {
        ("broker", "broker", 1), ("pool", "pool", 2), ("edge", "edge-1", 3), ("gateway", "gateway", 7),
    }  # fmt: skip
    assert all(one["address"] for one in ready["processes"])


def test_lines_beyond_the_budget_of_a_second_are_counted_and_the_next_second_starts_anew() -> None:
    budget = LineBudget(lines_per_s=2)
    assert [budget.allows(10.1), budget.allows(10.2), budget.allows(10.3), budget.allows(10.9)] == [
        True,
        True,
        False,
        False,
    ]
    assert repr(budget) == "<LineBudget 2/2 this second, 2 hidden>"
    assert budget.take_hidden() == 2
    assert budget.take_hidden() == 0
    assert budget.allows(11.0)


def test_the_consoles_address_is_shown() -> None:
    assert console(PLAN) == "console, in a browser: http://127.0.0.1:8003/"
    assert "console http://127.0.0.1:8003" in process_rows(PLAN, {}, {})[0][1]
