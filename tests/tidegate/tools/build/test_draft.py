"""A drafted manifest states every choice and the flag that changes it."""

from __future__ import annotations

import msgspec
import pytest

from tidegate.models.manifest import Axis, Bounds, Cost, TensorSpec
from tidegate.models.validate import problems
from tidegate.tools.build.agree import AgreedSignature
from tidegate.tools.build.draft import DraftOptions, batch_axis, draft, mask_of, parse_cost, row_axis
from tidegate.tools.build.errors import BuildError
from tidegate.types import Datatype

IDS = TensorSpec("ids", Datatype.INT64, ("batch", "sequence"), bounds=Bounds(0, 99))
MASK = TensorSpec("attention_mask", Datatype.INT64, ("batch", "sequence"))
VECTOR = TensorSpec("vector", Datatype.FP32, ("batch", 4))
TEXT = AgreedSignature((IDS, MASK), (VECTOR,), {"batch": (1, None), "sequence": (1, 256)})
IMAGE = AgreedSignature((TensorSpec("image", Datatype.FP32, ("batch", 3, 8, 8)),), (VECTOR,), {"batch": (1, None)})


def test_a_text_model_is_counted_in_tokens_and_its_mask_is_known_by_name() -> None:
    found = draft("m", "1", TEXT, DraftOptions())
    assert found.manifest.cost == Cost("tokens", "ids")
    assert mask_of(found.manifest) == msgspec.structs.replace(MASK, bounds=Bounds(0, 1))
    assert (batch_axis(found.manifest), row_axis(found.manifest)) == ("batch", "sequence")
    assert found.manifest.axes == {"batch": Axis(1, 64), "sequence": Axis(1, 256)}
    assert found.open_axes == ("batch",)


def test_an_image_model_is_counted_in_pixels_and_anything_else_in_items() -> None:
    assert draft("m", "1", IMAGE, DraftOptions()).manifest.cost == Cost("pixels", "image")
    flat = AgreedSignature((TensorSpec("x", Datatype.FP32, ("batch", 3)),), (VECTOR,), {"batch": (1, None)})
    assert draft("m", "1", flat, DraftOptions()).manifest.cost == Cost("items", "x")


def test_each_choice_is_a_sentence_that_names_its_flag() -> None:
    assert draft("m", "1", TEXT, DraftOptions()).choices == (
        "ids: values 0 to 99, by the table that they index",
        "attention_mask: values 0 to 1, by its name (--bounds attention_mask=0:1)",
        "axis sequence: 1 to 256, by the artefacts",
        "cost: tokens of ids (--cost tokens:ids)",
    )
    assert draft("m", "1", IMAGE, DraftOptions()).choices[0] == (
        "image: any values; nothing limits them (--bounds image=MIN:MAX)"
    )


def test_an_option_of_the_users_is_not_replaced_by_a_choice() -> None:
    wishes = DraftOptions(
        axes={"batch": (1, 8)}, bounds={"ids": (0, 9), "attention_mask": (0, 1)}, cost="items:ids", default_budget_s=0.5
    )
    found = draft("m", "1", TEXT, wishes)
    assert found.choices == ("axis sequence: 1 to 256, by the artefacts",)
    assert found.open_axes == ()
    assert found.manifest.axes["batch"] == Axis(1, 8)
    assert found.manifest.batching.max_batch_size == 8
    assert found.manifest.inputs[0].bounds == Bounds(0, 9)
    assert found.manifest.default_budget_s == 0.5


def test_a_tokenizer_makes_it_a_text_model() -> None:
    text = draft("m", "1", TEXT, DraftOptions(tokenizer="t.json")).manifest.text
    assert text is not None
    assert (text.tokenizer, text.max_tokens, text.input_ids, text.attention_mask, text.output) == (
        "t.json",
        256,
        "ids",
        "attention_mask",
        "vector",
    )


def test_an_outputs_own_axis_may_be_empty_and_a_fixed_batch_is_one_row() -> None:
    agreed = AgreedSignature(
        (TensorSpec("image", Datatype.FP32, (1, 3, 8, 8)),),
        (TensorSpec("boxes", Datatype.FP32, ("found", 4)),),
        {"found": (1, None)},
    )
    manifest = draft("m", "1", agreed, DraftOptions()).manifest
    assert manifest.axes["found"].min == 0
    assert manifest.batching.max_batch_size == 1
    assert batch_axis(manifest) is None


def test_inputs_with_different_first_axes_cannot_be_joined() -> None:
    agreed = AgreedSignature(
        (TensorSpec("a", Datatype.FP32, ("n",)), TensorSpec("b", Datatype.FP32, ("m",))),
        (VECTOR,),
        {"n": (1, 9), "m": (1, 9), "batch": (1, None)},
    )
    assert draft("m", "1", agreed, DraftOptions()).manifest.batching.max_batch_size == 1


def test_a_draft_lacks_nothing_but_its_variants() -> None:
    assert problems(draft("m", "1", TEXT, DraftOptions(tokenizer="t.json")).manifest) == (
        "variants: must name at least one variant",
    )


@pytest.mark.parametrize(
    ("agreed", "wishes", "message"),
    [
        (TEXT, DraftOptions(axes={"width": (1, 2)}), r"--axis width: not an axis \(axes: batch, sequence\)"),
        (TEXT, DraftOptions(bounds={"x": (1, 2)}), r"--bounds x: not an input \(inputs: ids, attention_mask\)"),
        (TEXT, DraftOptions(cost="words:ids"), "'words' is not one of tokens, pixels, items, bytes"),
        (TEXT, DraftOptions(cost="tokens"), r"'' is not an input \(inputs: ids, attention_mask\)"),
        (IMAGE, DraftOptions(tokenizer="t.json"), "the model has no text input"),
    ],
)
def test_a_wish_that_cannot_be_granted_is_named(agreed: AgreedSignature, wishes: DraftOptions, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        draft("m", "1", agreed, wishes)


def test_strings_have_no_values_to_limit() -> None:
    agreed = AgreedSignature((TensorSpec("words", Datatype.BYTES, ("batch",)),), (VECTOR,), {"batch": (1, 9)})
    assert not [one for one in draft("m", "1", agreed, DraftOptions()).choices if one.startswith("words")]


def test_a_cost_is_a_feature_of_an_input() -> None:
    assert parse_cost("bytes:ids", TEXT.inputs) == Cost("bytes", "ids")
