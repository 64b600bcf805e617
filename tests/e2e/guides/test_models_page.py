"""The guides to models and to pipelines: each command is typed, with files of the digits and of tiny models."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.guides.guide import Page
from tests.e2e.guides.reader import NEEDS_A_NETWORK, Reader
from tidegate.models.repository import Repository

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.timeout(400),
    NEEDS_A_NETWORK,
]

MADE = '''
from pathlib import Path
import numpy as np, torch
from sklearn.datasets import load_digits
from torch import nn
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
from tests.support.models.text_side import tiny_tokenizer

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
np.savez("test.npz", image=images[-200:], labels=labels[-200:])
np.savez("validation.npz", image=images[-400:-200], labels=labels[-400:-200])

tokenizer = tiny_tokenizer()
PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained("bge-small")
size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
BertModel(BertConfig(vocab_size=tokenizer.get_vocab_size(), **size)).save_pretrained("bge-small")


class Reviews(nn.Module):
    """Scores of three classes, from the mean of its tokens' vectors."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(tokenizer.get_vocab_size(), 8), nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask[:, :, None].float()
        return self.out((self.words(input_ids) * mask).sum(1) / mask.sum(1))


ids, axes = torch.ones(2, 5, dtype=torch.int64), {0: "batch", 1: "sequence"}
for name in ("int8", "fp32"):
    torch.onnx.export(
        Reviews(), (ids, ids), f"{name}.onnx", dynamo=False, input_names=["input_ids", "attention_mask"],
        output_names=["logits"], dynamic_axes={"input_ids": axes, "attention_mask": axes, "logits": {0: "batch"}},
    )
Path("labels.txt").write_text("bad\\nfair\\ngood\\n")
'''


@pytest.fixture(scope="module")
def reader(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """In a folder with the model of the digits, built already, and with a reader's own files under the pages' names."""
    folder = tmp_path_factory.mktemp("models-page")
    made = Reader(folder)
    try:
        shutil.copytree(digits, folder / ".tidegate" / "models")
        repository = Repository(digits)
        version = repository.folder(repository.manifest("digits"))
        shutil.copy(version / "int8.onnx", folder / "cnn-int8.onnx")
        shutil.copy(version / "fp32.pt2", folder / "cnn.pt2")
        (folder / "made.py").write_text(MADE)
        made.run("python made.py")
        yield made
    finally:
        made.close()


def test_the_page_of_models_goes_as_it_says(reader: Reader) -> None:
    with Page("docs/models.md") as page:
        reader.run(page.take("tidegate model build digits"))
        assert "edge: top1 0.9" in reader.run(page.take("tidegate model add cnn"))
        assert "name: digits" in reader.run(page.take("tidegate model show digits"))
        assert "packed 1 layers, bf16" in reader.run(page.take("tidegate model pack"))
        assert "added bge" in reader.run(page.take("tidegate model add bge"))
        assert "held out" in reader.run(page.take("tidegate model calibrate digits"))
        assert "held out" in reader.run(page.take("tidegate model calibrate cnn"))


def test_the_page_of_pipelines_goes_as_it_says(reader: Reader) -> None:
    with Page("docs/pipelines.md") as page:
        shutil.copy(reader.folder / "bge-small" / "tokenizer.json", reader.folder)
        assert "added reviews" in reader.run(page.take("tidegate model add reviews"))
        digits = {"int8.onnx": "cnn-int8.onnx", "fp32.pt2": "cnn.pt2"}
        assert "added digit-files" in reader.run(page.take("tidegate model add digit-files", digits))
