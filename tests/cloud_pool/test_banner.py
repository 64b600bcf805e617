"""What a pool says when it serves."""

from __future__ import annotations

from cloud_pool.banner import serving_banner
from tests.cloud_pool.models import TEXT, manifest_of
from tidegate.fleet.offers import ModelOffer, VariantOffer
from tidegate.models.manifest import Axis, TensorSpec
from tidegate.types import Datatype

OFFER = ModelOffer(
    "text",
    "1",
    (VariantOffer("fp32", "fp32", cost=((1.0, 0.004), (64.0, 0.02))), VariantOffer("half", "bf16")),
    state="ready",
)


def test_it_says_what_is_served_where_and_for_how_long_a_call_takes() -> None:
    first, model, *_ = serving_banner("east", "127.0.0.1:8101", "cpu", [(TEXT, OFFER)])
    assert first == "pool/east serves 1 model on cpu, at 127.0.0.1:8101 (OIP gRPC)"
    assert model == (
        "  text 1: ids INT64[batch, sequence], mask INT64[batch, sequence] → "
        "sum FP32[batch, 1], twice INT64[batch, sequence]  (fp32 from 4 ms, half)"
    )


def test_the_call_that_it_shows_is_one_that_the_manifest_allows() -> None:
    manifest = manifest_of(
        inputs=(TensorSpec("flags", Datatype.BOOL, ("n", 3)), TensorSpec("half", Datatype.BF16, (2,))),
        axes={"n": Axis(min=0)},
    )
    lines = serving_banner("p", "h:1", "auto", [(manifest, OFFER), (TEXT, OFFER)])
    assert lines[0].startswith("pool/p serves 2 models")
    assert "    i0 = triton.InferInput('flags', [1, 3], 'BOOL')" in lines
    assert "    i0.set_data_from_numpy(np.zeros([1, 3], np.bool))" in lines
    assert "    i1.set_data_from_numpy(np.zeros([2], np.float32))" in lines
    assert any("infer('text', [i0, i1], client_timeout=1.0)" in line for line in lines)


def test_it_says_how_a_gateway_finds_it() -> None:
    assert (
        serving_banner("p", "h:1", "auto", [(TEXT, OFFER)])[-1]
        == "    targets: [{name: p, tier: pool, address: 'h:1'}]"
    )
