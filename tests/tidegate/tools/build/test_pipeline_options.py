"""Steps as lines of `tidegate model add`: what they make of a model, and which mistakes are told."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.support.models.tiny_models import classifier, sum_of_tokens
from tidegate.models.repository import Repository
from tidegate.tools.build.add import AddRequest, add_model
from tidegate.tools.build.draft import DraftOptions
from tidegate.tools.build.errors import BuildError

pytestmark = pytest.mark.slow


def test_steps_are_put_around_the_artefacts_and_their_files_come_along(tmp_path: Path) -> None:
    classifier(tmp_path / "edge.onnx", features=8)
    (tmp_path / "names.txt").write_text("a\nb\nc\nd\n")
    steps = (
        "normalise image -> flat scale=0.5",
        "softmax scores -> shares",
        "top_k shares -> best,place k=2",
        f"labels place -> name file={tmp_path / 'names.txt'}",
    )
    tensors = ("shares=FP32[batch,4]", "best=FP32[batch,2]", "place=INT64[batch,2]", "name=BYTES[batch,2]")
    request = AddRequest(
        "sorter", "1", edge=tmp_path / "edge.onnx", pool=None, wishes=DraftOptions(), steps=steps[1:], tensors=tensors
    )
    manifest = add_model(request, tmp_path / "models").manifest
    assert manifest.pipeline is not None
    assert [spec.name for spec in manifest.inputs] == ["x"]
    assert [spec.name for spec in manifest.outputs] == ["best", "name"]
    assert [spec.name for spec in manifest.pipeline.tensors] == ["shares", "place"]
    assert (tmp_path / "models/sorter/1/names.txt").read_text() == "a\nb\nc\nd\n"
    repository = Repository(tmp_path / "models")
    repository.verify(repository.manifest("sorter"), manifest.variants[0])

    (tmp_path / "few.txt").write_text("a\nb\nc\n")
    (tmp_path / "odd.txt").write_bytes(b"\xff\n")
    few = f"labels place -> name file={tmp_path / 'few.txt'}"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"steps": ("softmax scores",)}, "must be KIND INPUT"),
        ({"steps": ("softmx scores -> shares",)}, "at `$.step`: there are tokenize, image_decode"),
        ({"steps": ("soften scores -> shares",)}, "Invalid value 'soften'"),
        ({"steps": ("top_k scores -> best k=many",)}, "Expected `int`, got `str`"),
        ({"steps": ("labels place -> name file=gone.txt",)}, "gone.txt: there is no such file"),
        ({"steps": steps[:1]}, "--tensor image=DATATYPE"),
        ({"tensors": ("shares:FP32",)}, "must be NAME=DATATYPE"),
        ({"tensors": ("shares=FP31[batch]",)}, "'FP31' is not one of"),
        ({"tensors": ("shares=FP32[rows,4]", *tensors[1:])}, "--axis rows=MIN:MAX is missing"),
        ({"steps": (steps[1], "top_k shares -> best,place k=9", steps[3])}, "k: 9 must be from 1 to 4"),
        ({"steps": (*steps[1:3], few)}, f"step labels (few.txt): 4 classes, and {tmp_path / 'few.txt'} has 3 lines"),
        ({"steps": (*steps[1:3], few.replace("few", "odd"))}, "odd.txt: 'utf-8' codec can't decode byte 0xff"),
    ]
    for changed, words in wrong:
        with pytest.raises(BuildError, match=re.escape(words)):
            add_model(replace(request, version="2", **changed), tmp_path / "models")
        assert not (tmp_path / "models/sorter/2").exists()


def test_steps_are_run_before_the_model_is_added(tmp_path: Path) -> None:
    sum_of_tokens(tmp_path / "edge.onnx")
    (tmp_path / "tokenizer.json").write_text("no tokenizer\n")
    step = f"tokenize text -> ids,mask file={tmp_path / 'tokenizer.json'} max_tokens=9"
    wishes = DraftOptions(axes={"batch": (1, 4), "sequence": (1, 8)}, bounds={"ids": (0, 9)})
    request = AddRequest("reader", "1", edge=tmp_path / "edge.onnx", pool=None, wishes=wishes, steps=(step,))
    request = replace(request, tensors=("text=BYTES[batch]",))
    with pytest.raises(BuildError, match=r"step tokenize \(tokenizer.json\): tokenizer.json: is no tokenizer"):
        add_model(request, tmp_path / "models")
    assert not (tmp_path / "models/reader/1").exists()

    Tokenizer(WordLevel({"example": 1, "[UNK]": 0}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    notes = add_model(request, tmp_path / "models").notes
    assert "step tokenize: texts of more than 8 tokens are refused" in "\n".join(notes)
