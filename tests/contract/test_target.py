"""What every `Target` promises, over real gRPC on loopback: one suite for the link stream, dialled from either end, and
for plain OIP calls."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gateway.core.fleet.link_events import LinkRtt, LinkUp
from gateway.targets.unary import UnaryTarget
from tests.support.gateway.targets import MAX_MESSAGE_BYTES, MIB, OFFERS, Bench, connected
from tests.support.serving.hosts import ECHO, echo_request
from tidegate.outcome import (
    ERRORS,
    BadAnswer,
    InternalError,
    ModelNotFound,
    Overloaded,
    ServeError,
    TooLarge,
    Unreachable,
)
from tidegate.types import Parameter

pytestmark = pytest.mark.slow


# answers


async def test_an_answer_comes_with_its_tensors_and_its_callers_id(bench: Bench) -> None:
    reply = await bench.ask(echo_request(b"hello", id="r-1"))

    [output] = reply.response.outputs
    assert (output.name, output.shape, bytes(output.raw)) == ("y", (5,), b"hello")
    assert (reply.response.model_name, reply.response.id) == ("echo", "r-1")


async def test_stage_times_are_known_of_targets_of_our_own(bench: Bench) -> None:
    reply = await bench.ask()

    expected = {} if bench.kind == "foreign" else {"queue": 0.002, "compute": 0.005}
    assert reply.stages == pytest.approx(expected)


async def test_the_far_side_is_told_budget_priority_and_trace(bench: Bench) -> None:
    await bench.ask(budget_s=40.0, priority=3, traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")

    [call] = bench.server.host.calls
    [budget_s] = bench.server.host.budgets_s
    assert budget_s is not None
    assert 20.0 < budget_s <= 40.0
    assert call.priority == 3
    assert call.headers["traceparent"].startswith("00-0af7651916cd43dd8448eb211c80319c-")


async def test_a_demanded_variant_is_demanded_of_targets_of_our_own(bench: Bench) -> None:
    reply = await bench.ask(variant="fp32")

    assert bench.server.host.calls[0].variant == ("" if bench.kind == "foreign" else "fp32")
    assert reply.variant == "fp32"


async def test_the_callers_own_hints_do_not_outlive_this_hop(bench: Bench) -> None:
    hints: dict[str, Parameter] = {
        "timeout": 1,
        "priority": 9,
        "tidegate-variant": "fp64",
        "temperature": 0.5,
        "strict": True,
    }
    request = replace(echo_request(), parameters=hints)

    await bench.ask(request, budget_s=5.0, priority=2)

    [call] = bench.server.host.calls
    assert (call.priority, call.variant) == (2, "")
    assert bench.server.host.budgets_s[0] == pytest.approx(5.0, abs=2.0)
    assert call.request.parameters["temperature"] == 0.5


async def test_an_answer_to_another_request_is_a_bad_answer(bench: Bench) -> None:
    bench.server.host.answered_by = "impostor"

    with pytest.raises(BadAnswer, match="asked echo, answered by impostor"):
        await bench.ask()


# errors


@pytest.mark.parametrize("error_class", ERRORS)
async def test_an_error_of_the_far_side_is_raised_here_under_its_own_class(
    bench: Bench, error_class: type[ServeError]
) -> None:
    bench.server.host.error = error_class("it is so", retry_after_s=0.5)

    with pytest.raises(error_class, match="it is so") as refusal:
        await bench.ask()

    if error_class in (Overloaded, Unreachable):
        assert refusal.value.retry_after_s == pytest.approx(0.5)


async def test_a_defect_of_the_far_side_is_an_internal_error_without_its_details(bench: Bench) -> None:
    bench.server.host.error = ZeroDivisionError("secret")

    with pytest.raises(InternalError) as refusal:
        await bench.ask()

    assert "secret" not in str(refusal.value)


async def test_a_model_that_the_far_side_does_not_have_is_not_found(bench: Bench) -> None:
    with pytest.raises(ModelNotFound):
        await bench.ask(echo_request(model="nothing"))


# size


async def test_bodies_of_20_mib_cross_both_ways(bench: Bench) -> None:
    raw = bytes(range(256)) * (20 * MIB // 256)

    reply = await bench.ask(echo_request(raw), budget_s=60.0)

    assert bytes(reply.response.outputs[0].raw) == raw


async def test_a_request_over_the_limit_is_refused_and_the_next_request_works(bench: Bench) -> None:
    with pytest.raises(TooLarge):
        await bench.ask(echo_request(bytes(MAX_MESSAGE_BYTES + 1)), budget_s=60.0)

    await bench.ask()


async def test_an_answer_over_the_limit_is_refused_and_the_next_request_works(bench: Bench) -> None:
    bench.server.host.answer_bytes = MAX_MESSAGE_BYTES + 1
    with pytest.raises(TooLarge):
        await bench.ask(budget_s=60.0)

    bench.server.host.answer_bytes = None
    await bench.ask()


# events


async def test_an_up_target_says_who_it_is_and_what_it_offers_and_its_round_trips_are_measured(bench: Bench) -> None:
    await bench.until(lambda: any(isinstance(event, LinkRtt) for event in bench.events))

    [up] = [event for event in bench.events if isinstance(event, LinkUp)]
    assert [(offer.name, offer.version) for offer in up.offers] == [("echo", "3")]
    if bench.kind == "link":
        assert (up.name, up.epoch, up.offers) == ("pool/a", 7, OFFERS)
    assert all(0.0 < event.rtt_s < 30.0 for event in bench.events if isinstance(event, LinkRtt))
    if bench.kind in ("dialled", "relayed"):
        assert (up.name, up.epoch, up.offers, up.path_kind) == ("edge/a", 7, OFFERS, "dialled out")
        assert repr(bench.target).startswith("<DeviceTarget edge/a dialled out: ")
    else:
        assert repr(bench.target).startswith(f"<{type(bench.target).__name__} pool/a at 127.0.0.1:")


# only plain OIP


async def test_a_foreign_server_is_described_as_a_manifest_with_open_lengths() -> None:
    async with connected("foreign") as bench:
        assert isinstance(bench.target, UnaryTarget)

        [manifest] = await bench.target.describe(["echo"])

        assert (manifest.name, manifest.version) == ("echo", "3")
        [x] = manifest.inputs
        assert (x.name, x.datatype, x.shape) == ("x", ECHO.inputs[0].datatype, ("x.0",))
        assert [variant.name for variant in manifest.variants] == ["default"]
        with pytest.raises(ModelNotFound):
            await bench.target.describe(["nothing"])
