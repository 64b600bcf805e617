"""The demo models as they are kept: whole, what their manifests say, and close to references computed another way."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.models.trusted import trust_file
from tidegate.engines.engine import Engine, load_engine
from tidegate.models.example import example_arrays
from tidegate.models.manifest import Bounds, EngineName, Manifest
from tidegate.models.packing import packing_of
from tidegate.models.repository import Repository
from tidegate.models.trusted_digests import FILE_NAME
from tidegate.tools.build.demo.corpus import texts
from tidegate.tools.build.demo.demo_models import RECIPES, STANDARD, build_demo, intact_manifest
from tidegate.tools.build.evaluate.measure import cosines, top1
from tidegate.tools.build.progress import no_progress

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # whoever comes first waits for the build

FULL = ("fp32", "fp32-export", "fp32-onnx")
EVERY = (*FULL, "bf16", "int8")

Embed = Callable[[Engine, list[str], int], NDArray[Any]]


@pytest.fixture(scope="module")
def minilm(demo_repository: Repository) -> Manifest:
    return demo_repository.manifest("minilm")


@pytest.fixture(scope="module")
def engines(demo_repository: Repository, minilm: Manifest) -> dict[str, Engine]:
    return {
        variant.name: load_engine(
            variant.engine,
            demo_repository.artefact(minilm, variant),
            outputs=("sentence_embedding",),
            threads=1,
            packing=packing_of(minilm, variant.packed),
        )
        for variant in minilm.variants
    }


@pytest.fixture(scope="module")
def embed(demo_repository: Repository) -> Embed:
    from tokenizers import Tokenizer

    path = demo_repository.tokenizer(demo_repository.manifest("minilm"))
    assert path is not None
    tokenizer = Tokenizer.from_file(str(path))

    def run(engine: Engine, sentences: list[str], most_tokens: int) -> NDArray[Any]:
        rows = []
        for encoding in tokenizer.encode_batch(sentences):
            ids = encoding.ids if len(encoding.ids) <= most_tokens else [*encoding.ids[: most_tokens - 1], 102]
            array = np.array([ids], dtype=np.int64)
            rows.append(engine.infer({"input_ids": array, "attention_mask": np.ones_like(array)})["sentence_embedding"])
        return np.concatenate(rows)

    return run


@pytest.fixture(scope="module")
def reference() -> NDArray[Any]:
    """Embeddings by transformers alone, without anything of ours: its own masking, pooling by hand, in float64."""
    import torch
    from transformers import BertModel, BertTokenizerFast, logging

    from tidegate.tools.build.demo.minilm import weights_folder

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = weights_folder()
    model = BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    tokenizer = BertTokenizerFast(vocab=str(folder / "vocab.txt"), do_lower_case=True)
    rows = []
    for text in texts(24):
        encoded = tokenizer(text, truncation=True, max_length=128, return_tensors="pt")
        with torch.inference_mode():
            hidden = model(**encoded).last_hidden_state[0].numpy().astype(np.float64)
        mean = hidden.mean(axis=0)
        rows.append(mean / np.linalg.norm(mean))
    return np.stack(rows)


def test_every_demo_model_is_whole(demo_repository: Repository) -> None:
    for name in STANDARD:
        assert intact_manifest(demo_repository.root, name, RECIPES[name][1]) is not None


def test_minilm_is_described_as_clients_were_promised(minilm: Manifest) -> None:
    assert [(spec.name, spec.datatype.value, spec.shape, spec.bounds) for spec in minilm.inputs] == [
        ("input_ids", "INT64", ("batch", "sequence"), Bounds(0, 30521)),
        ("attention_mask", "INT64", ("batch", "sequence"), Bounds(0, 1)),
    ]
    assert [(spec.name, spec.datatype.value, spec.shape) for spec in minilm.outputs] == [
        ("sentence_embedding", "FP32", ("batch", 384))
    ]
    assert (minilm.axes["sequence"].min, minilm.axes["sequence"].max, minilm.axes["batch"].max) == (1, 256, 64)
    assert (minilm.default_budget_s, minilm.max_batch_size, minilm.batching.pad_axis) == (2.0, 0, "sequence")
    (edge,), (pool, faster) = minilm.variants_for("edge"), minilm.variants_for("pool")
    assert (edge.name, edge.precision, edge.max_tokens, edge.max_batch) == ("int8", "int8", 128, 4)
    assert (pool.name, pool.precision, pool.engine, pool.max_tokens) == ("fp32", "fp32", "torch-packed", None)
    assert (faster.name, faster.precision, faster.engine) == ("bf16", "bf16", "torch-packed")
    assert faster.quality is not None and 0.9998 <= faster.quality.value < 1.0


@pytest.mark.parametrize(
    ("variant", "least"),
    [("fp32", 0.99999), ("fp32-export", 0.99999), ("fp32-onnx", 0.99999), ("bf16", 0.9998), ("int8", 0.985)],
)
def test_embeddings_are_those_of_the_published_model(
    engines: dict[str, Engine], embed: Embed, reference: NDArray[Any], variant: str, least: float
) -> None:
    cosine = cosines(reference, embed(engines[variant], texts(24), 128))
    assert cosine.mean() >= least


@pytest.mark.parametrize("variant", EVERY)
@pytest.mark.parametrize(("batch", "sequence"), [(1, 1), (1, 256), (7, 33), (64, 2)])
def test_every_shape_in_the_manifest_is_answered_with_unit_vectors(
    minilm: Manifest, engines: dict[str, Engine], variant: str, batch: int, sequence: int
) -> None:
    inputs = example_arrays(minilm, {"batch": batch, "sequence": sequence}, seed=3)
    answer = engines[variant].infer(inputs)["sentence_embedding"]
    assert answer.shape == (batch, 384)
    assert np.linalg.norm(answer, axis=1) == pytest.approx(np.ones(batch), abs=1e-4)


@pytest.mark.parametrize("variant", EVERY)
def test_a_row_without_any_token_is_answered_with_zeros_and_disturbs_no_other(
    minilm: Manifest, engines: dict[str, Engine], variant: str
) -> None:
    inputs = example_arrays(minilm, {"batch": 3, "sequence": 9}, seed=4)
    inputs["attention_mask"][1] = 0
    answer = engines[variant].infer(inputs)["sentence_embedding"]
    assert not answer[1].any()
    assert np.linalg.norm(answer[[0, 2]], axis=1) == pytest.approx([1.0, 1.0], abs=1e-4)


@pytest.mark.parametrize("variant", FULL)
def test_a_padded_row_is_answered_as_it_is_alone(minilm: Manifest, engines: dict[str, Engine], variant: str) -> None:
    alone = example_arrays(minilm, {"batch": 1, "sequence": 11}, seed=5)
    padded = {name: np.pad(array, ((0, 2), (0, 30))) for name, array in alone.items()}
    expected = engines[variant].infer(alone)["sentence_embedding"][0]
    np.testing.assert_allclose(engines[variant].infer(padded)["sentence_embedding"][0], expected, atol=1e-5)


def test_every_runtime_gives_the_same_embeddings(minilm: Manifest, engines: dict[str, Engine]) -> None:
    inputs = example_arrays(minilm, {"batch": 6, "sequence": 40}, seed=6)
    inputs["attention_mask"][:, 1:] = np.arange(1, 40) < np.array([[1], [7], [40], [16], [17], [39]])
    inputs["attention_mask"][2, 5] = 0  # inside of a row: nobody attends it, and what follows keeps its place
    first, *others = (engines[name].infer(inputs)["sentence_embedding"] for name in FULL)
    for other in others:
        np.testing.assert_allclose(first, other, atol=1e-5)
    assert cosines(first, engines["bf16"].infer(inputs)["sentence_embedding"]).min() > 0.9998


def test_packed_rows_are_answered_as_each_is_alone(minilm: Manifest, engines: dict[str, Engine]) -> None:
    rows = [example_arrays(minilm, {"sequence": length}, seed=length) for length in (1, 256, 16, 17, 5)]
    packed = {name: np.concatenate([row[name][0] for row in rows]) for name in rows[0]}
    packed["lengths"] = np.array([1, 256, 16, 17, 5])
    together = engines["fp32"].infer(packed)["sentence_embedding"]
    alone = [engines["fp32-onnx"].infer(row)["sentence_embedding"][0] for row in rows]
    np.testing.assert_allclose(together, np.stack(alone), atol=1e-5)


def test_the_tokenizer_neither_cuts_nor_pads(demo_repository: Repository, minilm: Manifest) -> None:
    from tokenizers import Tokenizer

    path = demo_repository.tokenizer(minilm)
    tokenizer = Tokenizer.from_file(str(path))
    short, long = tokenizer.encode_batch(["one", "word " * 400])
    assert (len(short.ids), len(long.ids)) == (3, 402)


def test_digits_reach_the_accuracies_of_their_manifest_and_the_pool_is_better(demo_repository: Repository) -> None:
    from tidegate.tools.build.demo.digits import held_out

    images, labels = held_out()
    digits = demo_repository.manifest("digits")
    reached = {}
    for variant in digits.variants:
        engine = load_engine(variant.engine, demo_repository.artefact(digits, variant), outputs=("probabilities",))
        answers = [engine.infer({"image": images[at : at + 30]})["probabilities"] for at in range(0, len(images), 30)]
        scores = np.concatenate(answers)
        assert scores.sum(axis=1) == pytest.approx(np.ones(len(scores)), abs=1e-4)
        reached[variant.name] = top1(scores, labels)
        assert variant.quality is not None
        assert reached[variant.name] == pytest.approx(variant.quality.value, abs=0.003)
    assert 0.95 < reached["int8"] < reached["fp32"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, of TorchScript, which many still have
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_every_runtime_gives_the_same_digits(demo_repository: Repository, tmp_path: Path) -> None:
    import torch

    from tidegate.tools.build.demo.digits import held_out

    images, _ = held_out()
    digits = demo_repository.manifest("digits")
    (pool,) = digits.variants_for("pool")
    program = demo_repository.artefact(digits, pool)
    exported, example = torch.export.load(program).module(), torch.from_numpy(images[:16])

    class Digits(torch.nn.Module):  # an exported module itself cannot be put into eval mode, which exporters do
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            answer: torch.Tensor = exported(image)
            return answer

    module, names = Digits().eval(), {"input_names": ["image"], "output_names": ["probabilities"]}
    torch.jit.trace(module, (example,), check_trace=False).save(str(tmp_path / "m.pt"))  # type: ignore[no-untyped-call]
    torch.onnx.export(module, (example,), str(tmp_path / "m.onnx"), dynamo=False, **names)
    kinds: dict[EngineName, Path] = {
        "torch-export": program, "torchscript": tmp_path / "m.pt", "onnx": tmp_path / "m.onnx",
    }  # fmt: skip
    trusted = trust_file(tmp_path / "m.pt", tmp_path)
    trust_file(program, tmp_path)
    first, *others = (
        load_engine(kind, path, outputs=("probabilities",), trusted=trusted).infer({"image": images[:16]})[
            "probabilities"
        ]
        for kind, path in kinds.items()
    )
    for other in others:
        np.testing.assert_allclose(first, other, atol=1e-5)


def test_no_part_of_the_digits_has_an_image_of_another() -> None:
    from tidegate.tools.build.demo.digits import _split

    parts = {name: images for name, (images, _) in _split().items()}
    assert {name: len(images) for name, images in parts.items()} == {
        "training": 1122, "calibration": 225, "held out": 450
    }  # fmt: skip
    images = [image.tobytes() for part in parts.values() for image in part]
    assert len(set(images)) == len(images)


def test_the_exported_program_runs_without_transformers_or_onnx(demo_repository: Repository, minilm: Manifest) -> None:
    program_variant = minilm.variant("fp32-export")
    assert program_variant is not None
    program = (
        "import sys\n"
        "for name in ('transformers', 'onnx', 'onnxruntime', 'sklearn', 'safetensors', 'tokenizers'):\n"
        "    sys.modules[name] = None\n"
        "from pathlib import Path\n"
        "import numpy as np\n"
        "from tidegate.engines.engine import load_engine\n"
        "engine = load_engine('torch-export', Path(sys.argv[1]), outputs=('e',))\n"
        "ids = np.ones((2, 5), dtype=np.int64)\n"
        "print(engine.infer({'input_ids': ids, 'attention_mask': ids})['e'].shape)\n"
    )
    command = [sys.executable, "-c", program, str(demo_repository.artefact(minilm, program_variant))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "(2, 384)\n", done.stderr
    assert done.stderr == ""


def test_packed_variants_run_without_transformers(demo_repository: Repository, minilm: Manifest) -> None:
    pool = minilm.variants_for("pool")[0]
    program = (
        "import sys\n"
        "for name in ('transformers', 'onnx', 'onnxruntime', 'sklearn', 'tokenizers'):\n"
        "    sys.modules[name] = None\n"
        "from pathlib import Path\n"
        "import numpy as np\n"
        "from tidegate.engines.engine import load_engine\n"
        "engine = load_engine('torch-packed', Path(sys.argv[1]), outputs=('e',))\n"
        "ids = np.ones(7, dtype=np.int64)\n"
        "inputs = {'input_ids': ids, 'attention_mask': ids, 'lengths': np.array([3, 4])}\n"
        "print(engine.infer(inputs)['e'].shape)\n"
    )
    command = [sys.executable, "-c", program, str(demo_repository.artefact(minilm, pool))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("(2, 384)\n", "")


def test_what_is_whole_is_kept_and_what_is_not_is_built_again(
    demo_repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    from tidegate.tools.build.demo import digits

    # How well it is trained is asked of the models that are kept (above); here four epochs do, instead of forty.
    monkeypatch.setattr(digits, "train", partial(_trained_briefly, digits.train))
    shutil.copytree(demo_repository.root / "digits", tmp_path / "digits")
    shutil.copy(demo_repository.root / FILE_NAME, tmp_path)
    assert build_demo("digits", tmp_path, no_progress)[1] == "kept"
    (tmp_path / "digits" / RECIPES["digits"][1] / "int8.onnx").write_bytes(b"cut off")
    manifest, how = build_demo("digits", tmp_path, no_progress)
    assert how == "built"
    Repository(tmp_path).verify(manifest, manifest.variants_for("edge")[0])


def _trained_briefly(train: Callable[..., Any], *what: Any, epochs: int, **how: Any) -> Any:
    return train(*what, epochs=min(4, epochs), **how)


def test_the_versions_that_are_looked_for_are_those_that_are_built() -> None:
    from tidegate.tools.build.demo import digits, minilm, smollm2

    assert {name: recipe.version for name, recipe in RECIPES.items()} == {
        minilm.NAME: minilm.VERSION,
        digits.NAME: digits.VERSION,
        smollm2.NAME: smollm2.VERSION,
    }
