"""What may change an answer changes its key, and what cannot does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.core.response_cache.cache_key import cache_key, is_repeatable, manifest_mark, uncacheable
from tests.support.gateway.app import TWO_VARIANTS
from tidegate.models.manifest import Manifest, Stateful
from tidegate.types import Call, Datatype, InferRequest, RequestedOutput, Tensor

X = Tensor("x", Datatype.UINT8, (4,), b"abcd")
REQUEST = InferRequest("echo", (X, Tensor("y", Datatype.UINT8, (2,), b"ef")), parameters={"k": 1})
CALL = Call(REQUEST, "oip-http", 0.0, 1.0, tenant="acme")
Change = Callable[[Call], Call]


def key(call: Call, version: str = "", mark: str = "1f") -> bytes:
    found = cache_key(call, version, mark=mark, tenant=call.tenant)
    assert found is not None
    return found


def asks(**changes: object) -> Change:
    return lambda call: replace(call, request=replace(call.request, **changes))


def differs(**changes: object) -> Change:
    return lambda call: replace(call, **changes)


def with_x(**changes: object) -> Change:
    return lambda call: replace(
        call, request=replace(call.request, inputs=(replace(X, **changes), *REQUEST.inputs[1:]))
    )


@pytest.mark.parametrize(
    "change",
    [
        asks(model_name="other"),
        asks(outputs=(RequestedOutput("x"),)),
        asks(outputs=(RequestedOutput("x", {"classification": 3}),)),
        asks(parameters={"k": 2}),
        asks(parameters={"k": True}),  # which equals 1
        asks(parameters={"k": 1.0}),
        asks(parameters={"k": "1"}),
        asks(parameters={}),
        asks(inputs=tuple(reversed(REQUEST.inputs))),
        asks(inputs=(X,)),
        with_x(raw=b"abce"),
        with_x(shape=(2, 2)),
        with_x(shape=(4, 1)),
        with_x(datatype=Datatype.INT8),
        with_x(name="z"),
        with_x(parameters={"scale": 2}),
        differs(variant="fp32"),
        differs(min_quality=0.9),
        differs(pin="edge"),
        differs(tenant="evil"),
    ],
)
def test_what_may_change_an_answer_changes_the_key(change: Change) -> None:
    assert key(change(CALL)) != key(CALL)


@pytest.mark.parametrize(
    "change",
    [
        asks(id="7"),
        asks(parameters={"k": 1, "priority": 2, "timeout": 5, "tidegate-budget-ms": 100, "traceparent": "00-a-b-01"}),
        with_x(raw=memoryview(b"abcd")),
        with_x(raw=bytearray(b"abcd")),
        differs(deadline=9.0, arrived_at=3.0),
        differs(priority=1),
        differs(protocol="oip-grpc"),
    ],
)
def test_what_only_says_when_and_how_urgently_does_not(change: Change) -> None:
    assert key(change(CALL)) == key(CALL)


def test_the_version_and_the_manifest_are_part_of_it() -> None:
    assert len({key(CALL), key(CALL, "3"), key(CALL, "4"), key(CALL, mark="2e")}) == 4


@given(st.binary(max_size=12), st.binary(max_size=12), st.binary(max_size=12), st.binary(max_size=12))
def test_bytes_cannot_be_moved_from_one_input_into_the_next(a: bytes, b: bytes, c: bytes, d: bytes) -> None:
    def of(first: bytes, second: bytes) -> bytes:
        inputs = tuple(Tensor(name, Datatype.BYTES, (1,), raw) for name, raw in (("x", first), ("y", second)))
        return key(Call(InferRequest("echo", inputs), "oip-http", 0.0))

    assert (of(a, b) == of(c, d)) is ((a, b) == (c, d))


def test_words_that_cannot_be_encoded_have_no_key() -> None:
    assert cache_key(asks(parameters={"k": "\ud800"})(CALL), "", mark="", tenant="") is None


def manifest(**changes: object) -> Manifest:
    return replace(TWO_VARIANTS, **changes)


@pytest.mark.parametrize(
    ("change", "of", "why"),
    [
        (differs(), manifest(), ""),
        (differs(attested=True), manifest(), "attested"),
        (differs(), manifest(require="attested"), "attested"),
        (asks(parameters={"sequence_id": 7}), manifest(), "sequence"),
        (differs(), manifest(sequence=Stateful({"a": "b"})), "sequence"),
        (differs(path=("region",)), manifest(), "upstream"),
        (differs(protocol="deferred"), manifest(), "deferred"),
        (differs(), manifest(variants=tuple(replace(one, sha256="") for one in TWO_VARIANTS.variants)), "foreign"),
        (with_x(raw=bytes(101)), manifest(), "large"),
    ],
)
def test_what_must_be_computed_each_time_says_why(change: Change, of: Manifest, why: str) -> None:
    assert uncacheable(change(CALL), of, 100) == why


@pytest.mark.parametrize(
    ("parameters", "repeatable"),
    [
        ({}, True),
        ({"temperature": 0.0}, True),
        ({"temperature": 0.7}, False),
        ({"temperature": 1}, False),
        ({"temperature": "0"}, False),
        ({"temperature": 0.7, "seed": 3}, True),
    ],
)
def test_a_generation_that_is_drawn_by_chance_is_not_repeatable(
    parameters: dict[str, bool | int | float | str], repeatable: bool
) -> None:
    assert is_repeatable(parameters) is repeatable


def test_another_artefact_under_the_same_version_is_another_mark() -> None:
    first, *others = TWO_VARIANTS.variants
    again = manifest(variants=(replace(first, sha256="1" * 64), *others))
    assert manifest_mark(again) != manifest_mark(TWO_VARIANTS) == manifest_mark(manifest())
