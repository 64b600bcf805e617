"""How many rows a request may have that is still to be made."""

from __future__ import annotations

from typing import Any

from gateway.core.fleet.link_events import LinkDown
from gateway.serving.row_limit import most_rows
from tests.support.gateway.fleets import NOW, ask, fleet_of, variant


def test_a_request_may_have_as_many_rows_as_some_target_takes_now() -> None:
    fleet = fleet_of(edge_a=variant(max_batch=4), edge_b=variant(max_batch=8, max_tokens=32), pool_c=variant())

    def rows(longest_row: int = 16, *, enough: int = 32, **demands: Any) -> int | None:
        asked = ask(longest_row=longest_row, **demands)
        return most_rows(fleet.offered("minilm", "1"), asked, NOW, enough=enough)

    assert rows() == rows(64) == 32, "the pool takes any number"
    assert (rows(pin="edge"), rows(64, pin="edge"), rows(pin="edge", enough=3)) == (8, 4, 3)
    fleet.fold(LinkDown("pool/c", "away"), NOW)
    assert (rows(), rows(64)) == (8, 4)
    fleet.targets["edge/b"].breaker.trip("for the test", NOW, 0.5)
    assert rows() == 4
    assert rows(variant="int8") is None, "no target has it"
