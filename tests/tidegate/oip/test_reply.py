"""The headers of an answer."""

from __future__ import annotations

from tidegate.oip.http.event_stream import resumed_comments
from tidegate.oip.reply import reply_parameters
from tidegate.types import InferResponse, LoadReport, Reply, Resumed, Route

RESPONSE = InferResponse("minilm", "1", ())


def test_an_answer_says_where_why_and_how_much_time_is_left() -> None:
    reply = Reply(
        RESPONSE,
        stages={"queue": 0.001, "compute": 0.0084},
        route=Route("pool/east", "fallback", "fp32", attempts=2, fallback=True, degraded=True, provisional=True),
        budget_left_s=1.23456,
    )
    assert reply_parameters(reply) == {
        "tidegate-served-by": "pool/east",
        "tidegate-route": "fallback; variant=fp32; attempts=2; hedged=0; fallback=1; degraded=1; provisional=1",
        "tidegate-budget-left-ms": "1234.6",
        "server-timing": "queue;dur=1.000, compute;dur=8.400",
    }


def test_an_answer_that_was_gone_on_with_says_by_whom_after_how_much_and_how_alike() -> None:
    resumed = (
        Resumed("edge/attic", "pool/main", at=57, gap_s=0.2124, grade="exact", why="stalled"),
        Resumed("pool/main", "edge/hall", at=80, gap_s=0.03, grade="continued", why="unreachable"),
    )
    first = "from=edge/attic to=pool/main at=57 gap-ms=212 grade=exact"
    second = "from=pool/main to=edge/hall at=80 gap-ms=30 grade=continued"
    reply = Reply(RESPONSE, route=Route("edge/hall", "resumed", "int4", attempts=3, resumed=resumed))
    assert reply_parameters(reply)["tidegate-resumed"] == f"{first}, {second}"
    assert resumed_comments(resumed) == f": tidegate-resumed {first}\n\n: tidegate-resumed {second}\n\n".encode()
    assert resumed_comments(()) == b""


def test_a_late_answer_says_by_how_much() -> None:
    assert reply_parameters(Reply(RESPONSE, budget_left_s=-0.05)) == {"tidegate-budget-left-ms": "-50.0"}


def test_nothing_is_said_that_is_not_known() -> None:
    assert reply_parameters(Reply(RESPONSE)) == {}


def test_a_load_is_for_machines_and_stays_out_of_the_parameters() -> None:
    reply = Reply(RESPONSE, load=LoadReport(3, 17, 2, 1, 0.025))
    assert reply_parameters(reply) == {}
