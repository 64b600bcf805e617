"""Packing weights: any BERT answers packed as its own code does, and what the network does not compute is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from tests.support.full_disk import small_disk
from tidegate.engines.engine import Engine, EngineError, load_engine
from tidegate.models.manifest import Bounds, Packed
from tidegate.models.packing import Packing
from tidegate.models.repository import Repository
from tidegate.tools.build.cli import model
from tidegate.tools.build.convert.pack import Precision, pack_bert
from tidegate.tools.build.errors import BuildError

pytestmark = pytest.mark.slow

PACKING = Packing("lengths", "attention_mask", ("input_ids", "attention_mask"), ())
IDS = np.arange(24).reshape(3, 8)
MASK = (np.arange(8) < np.array([[8], [3], [5]])).astype(np.int64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of two layers with chance weights, as transformers saves it."""
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=16, hidden_act="gelu_new", initializer_range=0.3,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("bert")
    BertModel(config).save_pretrained(path)  # type: ignore[no-untyped-call]
    return path


def changed(folder: Path, into: Path, **changes: Any) -> Path:
    """The same weights with another configuration; `pooling` and `modules` are sentence-transformers' files."""
    into.mkdir()
    (into / "model.safetensors").symlink_to(folder / "model.safetensors")
    for name, key in (("1_Pooling/config.json", "pooling"), ("modules.json", "modules")):
        if key in changes:
            (into / name).parent.mkdir(exist_ok=True)
            (into / name).write_text(json.dumps(changes.pop(key)))
    config = json.loads((folder / "config.json").read_text())
    (into / "config.json").write_text(json.dumps(config | changes))
    return into


def loaded(source: Path, target: Path, precision: Precision = "fp32") -> Engine:
    pack_bert(source, target, precision)
    return load_engine("torch-packed", target, outputs=("vector",), packing=PACKING)


def hidden(folder: Path) -> Any:
    """What transformers computes: float32[rows, length, 32]."""
    import torch
    from transformers import BertModel

    model = BertModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        return model(torch.from_numpy(IDS), torch.from_numpy(MASK)).last_hidden_state.numpy()


def test_on_a_full_disk_the_error_names_the_file(folder: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        disk.fill()
        with pytest.raises(OSError, match="No space left on device") as refused:
            pack_bert(folder, disk.folder / "m.safetensors", "fp32")
        assert refused.value.filename == str(disk.folder / "m.safetensors")


def test_the_mean_over_real_tokens_is_that_of_the_models_own_code(folder: Path, tmp_path: Path) -> None:
    engine = loaded(changed(folder, tmp_path / "m", modules=[]), tmp_path / "m.safetensors")
    keep = MASK[:, :, None]
    expected = (hidden(folder) * keep).sum(axis=1) / keep.sum(axis=1)
    answer = engine.infer({"input_ids": IDS, "attention_mask": MASK})["vector"]
    np.testing.assert_allclose(answer, expected, atol=1e-5)


def test_the_first_token_is_taken_where_the_model_is_pooled_so_and_normalised(folder: Path, tmp_path: Path) -> None:
    source = changed(
        folder,
        tmp_path / "m",
        pooling={"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
        modules=[{"type": "sentence_transformers.models.Normalize"}],
    )
    first = hidden(folder)[:, 0]
    answer = loaded(source, tmp_path / "m.safetensors").infer({"input_ids": IDS, "attention_mask": MASK})["vector"]
    np.testing.assert_allclose(answer, first / np.linalg.norm(first, axis=1, keepdims=True), atol=1e-5)


def test_bf16_is_half_the_size_and_close(folder: Path, tmp_path: Path) -> None:
    inputs = {"input_ids": IDS, "attention_mask": MASK}
    full = loaded(folder, tmp_path / "full.safetensors").infer(inputs)["vector"]
    half = loaded(folder, tmp_path / "half.safetensors", "bf16").infer(inputs)["vector"]
    assert half.dtype == np.float32
    assert 0.99 < float((full * half).sum(axis=1).min()) < 1.0
    sizes = [(tmp_path / f"{name}.safetensors").stat().st_size for name in ("half", "full")]
    assert sizes[0] < 0.6 * sizes[1]


def test_a_packed_model_is_added_by_its_suffix_described_by_its_tables_and_measured(
    folder: Path, tmp_path: Path
) -> None:
    run = CliRunner().invoke
    packed, models = str(tmp_path / "m.safetensors"), str(tmp_path / "models")
    done = run(model, ["pack", str(folder), packed, "--precision", "bf16"])
    assert done.output.startswith("packed 2 layers, bf16, pooled by the mean, normalised")
    done = run(model, ["add", "mine", "--pool", packed, "--output", "vector", "--repository", models])
    assert done.exit_code == 0, done.output
    manifest = Repository(tmp_path / "models").manifest("mine")
    (variant,) = manifest.variants
    assert (variant.engine, variant.precision, variant.packed) == (
        "torch-packed", "bf16", Packed("sequence", mask="attention_mask"),
    )  # fmt: skip
    assert manifest.axes["sequence"].max == 16
    assert manifest.batching.pad_axis == "sequence"
    assert {spec.name: spec.bounds for spec in manifest.inputs} == {
        "input_ids": Bounds(0, 39), "attention_mask": Bounds(0, 1),
    }  # fmt: skip
    done = run(model, ["measure", "mine", "--seconds", "0.2", "--repository", models])
    assert done.exit_code == 0, done.output
    assert yaml.safe_load(done.stdout)["models"]["mine"]["pool_ms"]


@pytest.mark.parametrize("suffix", [".engine", ".plan"])
def test_an_engine_of_tensorrt_is_known_by_its_suffix_and_refused_with_the_way_out(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"m{suffix}").write_bytes(b"plan")
    command = ["add", "mine", "--pool", str(tmp_path / f"m{suffix}"), "--repository", str(tmp_path / "models")]
    done = CliRunner().invoke(model, command)
    assert done.exit_code == 1
    assert "TensorRT" in done.output
    assert "engine: onnx" in done.output


def test_an_engine_that_is_named_goes_before_the_suffix(tmp_path: Path) -> None:
    (tmp_path / "m.bin").write_bytes(b"no program")
    command = ["add", "mine", "--pool", str(tmp_path / "m.bin"), "--repository", str(tmp_path / "models")]
    assert "unknown kind of artefact '.bin'" in CliRunner().invoke(model, command).output
    done = CliRunner().invoke(model, [*command, "--engine", "torch-export"])
    assert "m.bin: it is a program" in done.output
    done = CliRunner().invoke(model, [*command, "--engine", "torch-export", "--trust"])
    assert "m.bin: is not an exported program" in done.output


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "roberta"}, "model_type is 'roberta', but only 'bert' can be packed"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"hidden_act": "swish"}, "hidden_act is 'swish'; known are gelu"),
        ({"pooling": {"pooling_mode_max_tokens": True}}, "pools by pooling_mode_max_tokens"),
    ],
)
def test_what_the_network_does_not_compute_is_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(BuildError, match=words):
        pack_bert(changed(folder, tmp_path / "m", **changes), tmp_path / "m.safetensors", "fp32")


def test_a_folder_without_weights_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(BuildError, match=r"model\.safetensors: "):
        pack_bert(tmp_path, tmp_path / "m.safetensors", "fp32")


def test_plain_weights_are_no_artefact_and_the_error_names_the_way(folder: Path) -> None:
    with pytest.raises(EngineError, match=r"metadata 'tidegate' says no network .*`tidegate model pack`"):
        load_engine("torch-packed", folder / "model.safetensors", outputs=("vector",))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input_ids": np.array([1, 40])}, "ids go from 0 to 39"),
        ({"lengths": np.array([1])}, r"\[2\] tokens for \[1\]"),
        ({"lengths": np.array([2, 0])}, "rows are of 1 to 16 tokens"),
        ({"extra": np.array([1])}, "takes input_ids, attention_mask and lengths"),
    ],
)
def test_what_would_index_past_a_table_is_an_engine_error(
    folder: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    engine = loaded(folder, tmp_path / "m.safetensors")
    packed = {"input_ids": np.array([1, 2]), "attention_mask": np.array([1, 1]), "lengths": np.array([2])}
    with pytest.raises(EngineError, match=words):
        engine.infer(packed | changes)
