"""A small Llama that was trained to sort twelve digits: a task with known answers, on which int4 is worse than bf16.

`804172935061:` is gone on with as `001123456789`. Trained for less than a minute of a core, bf16 sorts nearly all and
int4 some three of four. The model is kept with the other models of tests (`model_cache.py`).
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Final

import msgspec
import pytest

from tests.support.models.model_cache import model_cache
from tests.support.models.tiny_llama import END, write_byte_tokenizer
from tidegate.models.repository import Repository, save_manifest

NAME: Final = "sorter"
DIGITS: Final = 12
_STEPS: Final = 1400
_ROWS: Final = 128
_WIDTH: Final = 32
_RATE: Final = 3e-3


@pytest.fixture(scope="session")
def sorting_repository() -> Repository:
    """A repository with the sorter in both variants. Read it, never write to it."""
    pytest.importorskip("onnxruntime_genai", reason="the extra edge-llm is not installed")
    return sorter_repository()


def sorter_repository() -> Repository:
    """The same outside of tests."""
    root = model_cache() / "sorting-models"
    root.parent.mkdir(parents=True, exist_ok=True)
    with open(root.parent / "sorting-models.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / NAME / "1" / "model.yaml").exists():
            with TemporaryDirectory() as source:
                _in_a_process(f"from tests.support.models.sorting_llama import train; train({source!r})")
                _in_a_process(
                    "from tidegate.tools.build.cli import model; model()",
                    *["add", NAME, "--generative", source, "--repository", str(root)],
                )
            _say_that_int4_is_worse(root)
    return Repository(root)


def _say_that_int4_is_worse(root: Path) -> None:
    """Have the manifest say so where the build did not see it.

    It measures quality on a few short answers, and what training comes to differs from processor to processor: on some,
    int4 gives all of these answers as bf16 does. On the task it is worse all the same, which is what is measured here.
    """
    (manifest,) = Repository(root).manifests()
    found = {one.name: one for one in manifest.variants}
    int4, best = found["int4"], found["bf16"].quality
    assert int4.quality is not None and best is not None
    if int4.quality.value >= best.value:
        quality = msgspec.structs.replace(int4.quality, value=best.value - 1.0 / best.samples)
        lesser = msgspec.structs.replace(int4, quality=quality)
        variants = tuple(lesser if one is int4 else one for one in manifest.variants)
        save_manifest(root / NAME / "1", msgspec.structs.replace(manifest, variants=variants))


def tasks(count: int, seed: int) -> list[tuple[str, str]]:
    """Prompts and right answers."""
    draw = Random(seed)
    rows = ["".join(draw.choices("0123456789", k=DIGITS)) for _ in range(count)]
    return [(f"{row}:", "".join(sorted(row))) for row in rows]


def write_tasks(path: Path, count: int, seed: int) -> Path:
    """The same as a file for `tidegate model calibrate --tasks`."""
    path.write_text("".join(json.dumps({"prompt": one, "answer": it}) + "\n" for one, it in tasks(count, seed)))
    return path


def _in_a_process(program: str, *words: str) -> None:
    """Torch keeps its threads and its memory to itself, and the build asks for a process of its own."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode != 0:
        raise RuntimeError(f"making the sorter failed:\n{done.stdout}\n{done.stderr}")


def train(folder: str) -> None:
    """Write the trained model into `folder` as Hugging Face's tools do."""
    import torch
    from tokenizers import Tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    write_byte_tokenizer(Path(folder))
    vocabulary = Tokenizer.from_file(str(Path(folder) / "tokenizer.json")).get_vocab()
    ids = torch.tensor([vocabulary[digit] for digit in "0123456789"])
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=_WIDTH,
        intermediate_size=2 * _WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=_WIDTH // 2,  # 16 is the least that ONNX Runtime takes
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=END,
        pad_token_id=END,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    chance = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, _STEPS)
    colon, end = torch.full((_ROWS, 1), vocabulary[":"]), torch.full((_ROWS, 1), END)
    for _ in range(_STEPS):
        rows = torch.randint(0, 10, (_ROWS, DIGITS), generator=chance)
        tokens = torch.cat([ids[rows], colon, ids[rows.sort(dim=1).values], end], dim=1)
        labels = tokens.clone()
        labels[:, : DIGITS + 1] = -100  # the prompt is given
        optimizer.zero_grad()
        model(input_ids=tokens, labels=labels).loss.backward()
        optimizer.step()
        schedule.step()
    model.to(torch.bfloat16).save_pretrained(folder)  # type: ignore[no-untyped-call]
