"""A Llama of two layers with random weights and a vocabulary of bytes: real engines on it take milliseconds.

The fixture `tiny_llama` is a folder as Hugging Face's tools write it, `tiny_genai` the same for onnxruntime-genai.
What it says is noise, and the same in each run.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

import pytest

VOCABULARY_SIZE: Final = 260
CONTEXT: Final = 256
END: Final = 2


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with weights, configuration and tokenizer. Read it, never write to it."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def tiny_genai(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ONNX file, with what onnxruntime-genai needs beside it. Read it, never write to it."""
    pytest.importorskip("onnxruntime_genai", reason="the extra edge-llm is not installed")
    from tidegate.tools.build.convert.genai import MODEL, convert_to_genai

    folder = tmp_path_factory.mktemp("tiny-genai")
    convert_to_genai(tiny_llama, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny_llama / name, folder / name)
    return folder / MODEL


def write_tiny_llama(folder: Path) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        bos_token_id=1,
        eos_token_id=END,
        pad_token_id=END,
        tie_word_embeddings=True,
        initializer_range=0.5,  # of a tenth of it, every text is one token again and again
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)  # type: ignore[no-untyped-call]
    write_byte_tokenizer(folder)
    return folder


def write_byte_tokenizer(folder: Path) -> None:
    """A token for each byte, after <unk>, <s> and </s>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<unk>", "<s>", "</s>"]
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=[], unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**named, "unk_token": "<unk>"}))
