"""A request's work is read from shapes alone."""

from __future__ import annotations

import pytest

from tidegate.models.manifest import Cost, Feature, Manifest, TensorSpec, Variant
from tidegate.models.work import Work, fits, work_of
from tidegate.types import Datatype, InferRequest, Tensor


def variant(name: str, *where: str) -> Variant:
    return Variant(
        name=name,
        artefact="a",
        engine="onnx",
        precision=name,
        where=where,  # type: ignore[arg-type]
        sha256="0" * 64,
        size_bytes=1,
    )


def manifest(feature: Feature) -> Manifest:
    inputs = (TensorSpec("x", Datatype.INT64, ("batch", "sequence")),)
    variants = (variant("int8", "edge"), variant("fp32", "pool", "edge"))
    return Manifest("m", "1", inputs=inputs, outputs=(), variants=variants, cost=Cost(feature, "x"))


def request(*shape: int, name: str = "x") -> InferRequest:
    return InferRequest("m", (Tensor(name, Datatype.INT64, shape, bytes(16)),))


@pytest.mark.parametrize(
    ("feature", "shape", "work"),
    [
        ("tokens", (3, 7), Work(units=21.0, rows=3, longest_row=7)),
        ("pixels", (2, 1, 8, 8), Work(units=128.0, rows=2, longest_row=8)),
        ("items", (5, 7), Work(units=5.0, rows=5, longest_row=7)),
        ("bytes", (1, 2), Work(units=16.0, rows=1, longest_row=2)),
        ("tokens", (4,), Work(units=4.0, rows=4, longest_row=1)),
        ("tokens", (), Work(units=1.0, rows=1, longest_row=1)),
    ],
)
def test_work_is_counted_by_the_manifests_feature(feature: Feature, shape: tuple[int, ...], work: Work) -> None:
    assert work_of(manifest(feature), request(*shape)) == work


def test_a_request_without_the_cost_input_is_one_unit() -> None:
    assert work_of(manifest("tokens"), request(3, 7, name="y")) == Work(units=1.0, rows=1, longest_row=1)


@pytest.mark.parametrize(
    ("max_batch", "max_tokens", "fit"), [(None, None, True), (3, 7, True), (2, None, False), (None, 6, False)]
)
def test_work_fits_a_variant_up_to_and_including_its_limits(
    max_batch: int | None, max_tokens: int | None, fit: bool
) -> None:
    assert fits(Work(21.0, 3, 7), max_batch=max_batch, max_tokens=max_tokens) is fit


def test_variants_are_found_by_name_and_by_place() -> None:
    model = manifest("tokens")
    assert [one.name for one in model.variants_for("edge")] == ["int8", "fp32"]
    assert [one.name for one in model.variants_for("pool")] == ["fp32"]
    assert model.variant("fp32") is model.variants[1]
    assert model.variant("bf16") is None


def test_the_platform_is_the_engine_of_the_first_variant() -> None:
    model = manifest("tokens")
    assert model.platform == "tidegate_onnx"
    assert Manifest("m", "1", inputs=(), outputs=(), variants=(), cost=Cost("items", "x")).platform == "tidegate"
