"""The reasons for which a manifest is refused beyond the types of its keys."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tidegate.models.manifest import (
    Axis,
    Batching,
    Bounds,
    Cost,
    Manifest,
    Quality,
    QueuePolicy,
    Stateful,
    TensorSpec,
    Text,
    Variant,
    Where,
)
from tidegate.models.validate import file_name_problem, name_problem, problems
from tidegate.types import Datatype

VARIANT = Variant(
    name="int8", artefact="m.onnx", engine="onnx", precision="int8", where=("edge",), sha256="a" * 64, size_bytes=1
)
IDS = TensorSpec("ids", Datatype.INT64, ("batch", "sequence"), bounds=Bounds(0, 100))
MASK = TensorSpec("mask", Datatype.INT64, ("batch", "sequence"), bounds=Bounds(0, 1))
MANIFEST = Manifest(
    name="m",
    version="1",
    inputs=(IDS, MASK),
    outputs=(TensorSpec("vector", Datatype.FP32, ("batch", 4)),),
    variants=(VARIANT,),
    cost=Cost("tokens", "ids"),
    axes={"batch": Axis(1, 8), "sequence": Axis(1, 16)},
    batching=Batching(pad_axis="sequence", max_work=512),
    text=Text("tokenizer.json", 16, "ids", "mask", "vector"),
)


def changed(**changes: Any) -> Manifest:
    return msgspec.structs.replace(MANIFEST, **changes)


def levels(level: int, **policy: Any) -> Manifest:
    """With a queue policy of one level."""
    return changed(batching=Batching(priority_queue_policy={level: QueuePolicy(**policy)}))


def with_variant(**changes: Any) -> Manifest:
    return changed(variants=(msgspec.structs.replace(VARIANT, **changes),))


def with_ids(**changes: Any) -> Manifest:
    return changed(inputs=(msgspec.structs.replace(IDS, **changes), MASK))


def with_text(**changes: Any) -> Manifest:
    assert MANIFEST.text is not None
    return changed(text=msgspec.structs.replace(MANIFEST.text, **changes))


def test_a_right_manifest_has_no_problems() -> None:
    assert problems(MANIFEST) == ()


def test_a_manifest_without_text_limits_or_quality_is_right_too() -> None:
    bare = changed(text=None, batching=Batching(), variants=(VARIANT,), inputs=(TensorSpec("ids", Datatype.FP32, ()),))
    assert problems(msgspec.structs.replace(bare, cost=Cost("items", "ids"))) == ()


@pytest.mark.parametrize(
    ("manifest", "key", "value"),
    [
        (changed(name="a/b"), "name:", "'a/b'"),
        (changed(version=".1"), "version:", "'.1'"),
        (changed(axes={**MANIFEST.axes, "batch": Axis(3, 2)}), "axes.batch:", "min 3 and max 2"),
        (changed(axes={**MANIFEST.axes, "batch": Axis(-1, 2)}), "axes.batch:", "min -1"),
        (changed(outputs=(), text=None), "outputs:", "at least one"),
        (changed(inputs=(IDS, MASK, IDS)), "inputs.name:", "'ids' is there twice"),
        (with_ids(shape=("batch", "sequenze")), "inputs[0] (ids).shape:", "'sequenze' is not a declared axis"),
        (with_ids(shape=(-1, "sequence")), "inputs[0] (ids).shape:", "-1 is not a length"),
        (with_ids(shape=("batch", 10**30)), "inputs[0].shape[1]:", "100 bits; at most 2^53"),
        (changed(batching=Batching(max_work=10**400)), "batching.max_work:", "1329 bits"),
        (changed(axes={**MANIFEST.axes, "batch": Axis(-(2**54), 2)}), "axes.batch.min:", "55 bits"),
        (levels(2**60), "batching.priority_queue_policy:", "61 bits"),
        (with_ids(bounds=Bounds(2, 1)), "inputs[0] (ids).bounds:", "min 2 and max 1"),
        (with_ids(bounds=Bounds(0, float("inf"))), "inputs[0] (ids).bounds:", "max inf"),
        (
            with_ids(datatype=Datatype.UINT8, bounds=Bounds(0, 256)),
            "inputs[0] (ids).bounds:",
            "does not fit into UINT8",
        ),
        (with_ids(datatype=Datatype.BYTES), "inputs[0] (ids).bounds:", "BYTES elements have no bounds"),
        (changed(variants=()), "variants:", "at least one"),
        (changed(variants=(VARIANT, VARIANT)), "variants.name:", "'int8' is there twice"),
        (
            changed(variants=(VARIANT, msgspec.structs.replace(VARIANT, name="b", sha256="b" * 64))),
            "variants.sha256:",
            "'m.onnx' has two different digests",
        ),
        (with_variant(name="int 8"), "variants[0] (int 8).name:", "'int 8'"),
        (with_variant(artefact="../m.onnx"), "variants[0] (int8).artefact:", "'../m.onnx'"),
        (with_variant(artefact="model.yaml"), "variants[0] (int8).artefact:", "is the manifest itself"),
        (with_variant(sha256="A" * 64), "variants[0] (int8).sha256:", "A" * 64),
        (with_variant(size_bytes=-1), "variants[0] (int8).size_bytes:", "-1"),
        (with_variant(where=("edge", "edge")), "variants[0] (int8).where:", "twice"),
        (with_variant(max_batch=0), "variants[0] (int8).max_batch:", "0"),
        (with_variant(max_tokens=0), "variants[0] (int8).max_tokens:", "0"),
        (with_variant(quality=Quality("cosine", -1.5, 3)), "variants[0] (int8).quality.value:", "-1.5"),
        (with_variant(quality=Quality("top1", -0.5, 3)), "variants[0] (int8).quality.value:", "-0.5"),
        (with_variant(quality=Quality("top1", float("nan"), 3)), "variants[0] (int8).quality.value:", "nan"),
        (with_variant(quality=Quality("top1", 0.5, 0)), "variants[0] (int8).quality.samples:", "0"),
        (changed(cost=Cost("tokens", "vector")), "cost.input:", "'vector' is not an input (inputs: ids, mask)"),
        (changed(default_budget_s=0.0), "default_budget_s:", "0"),
        (changed(default_budget_s=float("nan")), "default_budget_s:", "nan"),
        (changed(max_batch_size=-1), "max_batch_size:", "-1"),
        (changed(batching=Batching(max_batch_size=0)), "batching.max_batch_size:", "0"),
        (changed(batching=Batching(max_work=0)), "batching.max_work:", "0"),
        (changed(batching=Batching(max_queue_size=0)), "batching.max_queue_size:", "0"),
        (changed(batching=Batching(max_queue_delay_s=-0.1)), "batching.max_queue_delay_s:", "-0.1"),
        (changed(batching=Batching(policy="fifo")), "batching.policy:", "deadline, adaptive, window, eager, none"),  # type: ignore[arg-type]
        (changed(batching=Batching(policy="eager", max_queue_delay_s=0.1)), "batching.max_queue_delay_s:", "eager"),
        (changed(batching=Batching(policy="window")), "batching.max_queue_delay_s:", "above 0"),
        (changed(batching=Batching(policy="adaptive", target_batch_s=0.0)), "batching.target_batch_s:", "0 must be"),
        (changed(batching=Batching(target_batch_s=0.1)), "batching.target_batch_s:", "deadline takes none"),
        (changed(batching=Batching(preferred_batch_size=(4,))), "batching.preferred_batch_size:", "deadline"),
        (
            changed(batching=Batching(policy="window", max_queue_delay_s=0.1, preferred_batch_size=(64,))),
            "batching.preferred_batch_size:",
            "64",
        ),
        (levels(5), "batching.priority_queue_policy:", "no level 5"),
        (levels(4, demote_when_full=True), "batching.priority_queue_policy.4.demote_when_full:", "max_queue_size"),
        (levels(4, max_queue_size=-1), "batching.priority_queue_policy.4.max_queue_size:", "-1"),
        (
            levels(1, default_timeout_microseconds=-7),
            "batching.priority_queue_policy.1.default_timeout_microseconds:",
            "-7",
        ),
        (levels(1, timeout_action="WAIT"), "batching.priority_queue_policy.1.timeout_action:", "REJECT, DELAY"),
        (
            levels(1, timeout_action="DELAY"),
            "batching.priority_queue_policy.1.timeout_action:",
            "default_timeout_microseconds",
        ),
        (
            changed(batching=Batching(default_queue_policy=QueuePolicy(allow_timeout_override=False))),
            "batching.default_queue_policy.allow_timeout_override:",
            "deadline",
        ),
        (changed(batching=Batching(pad_axis="width")), "batching.pad_axis:", "'width'"),
        (with_text(tokenizer="a/b.json"), "text.tokenizer:", "'a/b.json'"),
        (with_text(sha256=""), "text.sha256:", "'' must be 64 lower-case hexadecimal digits, or left out"),
        (with_text(input_ids="vector"), "text.input_ids:", "'vector' is not an input"),
        (with_text(attention_mask="nope"), "text.attention_mask:", "'nope' is not an input"),
        (with_text(output="ids"), "text.output:", "'ids' is not an output (outputs: vector)"),
        (with_text(max_tokens=17), "text.max_tokens:", "17 must be from 1 to 16"),
        (with_text(max_tokens=0), "text.max_tokens:", "0"),
    ],
)
def test_a_mistake_is_one_problem_that_names_the_key_and_the_value(manifest: Manifest, key: str, value: str) -> None:
    (problem,) = problems(manifest)
    assert problem.startswith(key)
    assert value in problem


def test_all_mistakes_are_found_in_one_go() -> None:
    found = problems(changed(name="", version="", default_budget_s=-1.0, variants=(), inputs=(), text=None))
    assert [problem.split(":")[0] for problem in found] == [
        "name",
        "version",
        "inputs",
        "variants",
        "cost.input",
        "default_budget_s",
        "batching.pad_axis",
    ]


@pytest.mark.parametrize("shape", [(), (16,), ("batch", 16), ("batch", "nowhere")])
def test_the_longest_text_follows_from_the_ids_whatever_their_shape(shape: tuple[int | str, ...]) -> None:
    found = problems(with_ids(shape=shape))
    assert not [problem for problem in found if problem.startswith("text.max_tokens")]


def test_bounds_may_span_the_whole_of_an_unsigned_64_bit_integer() -> None:
    assert problems(with_ids(datatype=Datatype.UINT64, bounds=Bounds(0, 2**64 - 1))) == ()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\\b", "a\0b", "model.yaml"])
def test_a_name_that_leaves_its_folder_is_no_file_name(name: str) -> None:
    assert file_name_problem(name) is not None


@pytest.mark.parametrize("name", ["m.onnx", "a b.pt2", "..m", "tokenizer.json"])
def test_a_plain_name_is_a_file_name(name: str) -> None:
    assert file_name_problem(name) is None


@pytest.mark.parametrize("name", ["", "-a", ".a", "a b", "a/b", "ä", "a" * 129, "a\n"])
def test_a_name_that_does_not_fit_urls_topics_and_folders_alike_is_refused(name: str) -> None:
    assert name_problem(name) is not None


STATE = TensorSpec("h", Datatype.FP32, ("batch", 4), optional=True)


def remembering(state_inputs: dict[str, str], **how: Any) -> Manifest:
    in_pools = msgspec.structs.replace(VARIANT, where=("pool",))
    return changed(inputs=(IDS, MASK, STATE), sequence=Stateful(state_inputs, **how), variants=(in_pools,))


def test_a_model_may_remember() -> None:
    assert problems(remembering({"h": "vector"})) == ()


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (remembering({}), "must name at least one input"),
        (remembering({"h": "vector"}, ttl_s=0.0), "sequence.ttl_s: 0 must be above 0"),
        (remembering({"h": "vector"}, max_sequences=0), "sequence.max_sequences: 0"),
        (remembering({"hidden": "vector"}), "'hidden'"),
        (remembering({"h": "hidden"}), "'hidden'"),
        (remembering({"mask": "vector"}), "'mask' must be optional"),
        (remembering({"mask": "vector"}), "'mask' and 'vector' must have one datatype and shape"),
        (remembering({"ids": "vector"}), "cost.input: 'ids' is a state"),
    ],
)
def test_what_a_model_cannot_remember_is_named(manifest: Manifest, words: str) -> None:
    assert any(words in problem for problem in problems(manifest)), problems(manifest)


@pytest.mark.parametrize("where", [("edge",), ("edge", "pool")])
def test_a_model_that_remembers_has_no_variant_for_devices_which_keep_no_state(where: tuple[Where, ...]) -> None:
    pools = remembering({"h": "vector"})
    on_devices = msgspec.structs.replace(VARIANT, name="other", where=where)
    (problem,) = problems(msgspec.structs.replace(pools, variants=(*pools.variants, on_devices)))
    assert problem.startswith("variants[1] (other).where: pools alone keep the state of sequences")
