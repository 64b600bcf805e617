"""What a server is to serve follows from the manifest, from config.json and from the pool's keys."""

from __future__ import annotations

import json
import os
from math import inf
from pathlib import Path
from typing import Any

import pytest

from cloud_pool.vllm.executable import find_vllm
from cloud_pool.vllm.hugging_face_config import HuggingFaceConfig, read_hugging_face_config
from cloud_pool.vllm.served_model import DEFAULT_SLOTS, plan_server
from cloud_pool.vllm.vllm_config import VllmConfig
from tests.support.models.replayed import write_replayed_folder
from tidegate.engines.generation.limits import NO_LIMITS, GenerationLimits
from tidegate.outcome import InternalError
from tidegate.workers.process import EngineSpec


def planned(
    tmp_path: Path,
    limits: GenerationLimits = NO_LIMITS,
    *,
    folder: str = "server",
    cache_bytes: float = inf,
    keys: dict[str, Any] | None = None,
    **config: Any,
) -> tuple[Any, GenerationLimits]:
    weights = write_replayed_folder(tmp_path / "model", **config)
    own = tmp_path / folder
    own.mkdir(parents=True)
    spec = EngineSpec("m:1/bf16", "transformers", weights, (), 2, "cuda:1", generation=limits)
    return plan_server(spec, VllmConfig.model_validate(keys or {}), own, cache_bytes=cache_bytes, token_bytes=1024)


def test_what_the_manifest_leaves_out_is_the_models_own(tmp_path: Path) -> None:
    plan, limits = planned(tmp_path)
    assert limits == GenerationLimits(slots=DEFAULT_SLOTS, context=8192, stop_tokens=(2,), vocabulary_size=49152)
    assert (plan.slots, plan.context, plan.device, plan.threads) == (DEFAULT_SLOTS, 8192, "cuda:1", 2)
    assert sorted(os.listdir(plan.folder)) == ["config.json", "model.safetensors"]
    assert plan.socket.parent == tmp_path / "server"


def test_the_manifest_and_the_pools_keys_go_before_it(tmp_path: Path) -> None:
    said = GenerationLimits(slots=3, context=100, stop_tokens=(7,), vocabulary_size=50)
    plan, limits = planned(tmp_path, said, keys={"slots": 9, "gpu_memory_ratio": 0.4}, cache_bytes=50 * 1024.0)
    assert (
        limits == GenerationLimits(slots=9, context=50, stop_tokens=(7,), vocabulary_size=50)
        and plan.gpu_memory_ratio == 0.4
    )


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"cache_bytes": 1024.0}, "room for 1 tokens of context.*raise generation_cache_bytes"),
        ({"vocab_size": None}, "a vocabulary of 0"),
        ({"folder": "f" * 120}, "too long for a socket: set TMPDIR"),
    ],
)
def test_what_does_not_fit_is_told_with_the_way_out(tmp_path: Path, how: dict[str, Any], words: str) -> None:
    with pytest.raises(InternalError, match=words):
        planned(tmp_path, **how)


def test_weights_that_are_no_weights_are_not_given_to_it(tmp_path: Path) -> None:
    weights = write_replayed_folder(tmp_path / "model")
    weights.write_bytes(b"\x80\x04not safetensors at all")
    spec = EngineSpec("m:1/bf16", "transformers", weights, (), 2, "cuda", generation=NO_LIMITS)
    (tmp_path / "own").mkdir()
    with pytest.raises(InternalError, match=r"model\.safetensors"):
        plan_server(spec, VllmConfig(), tmp_path / "own", cache_bytes=inf, token_bytes=0)
    assert not (tmp_path / "own" / "model").exists()


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ({"max_position_embeddings": 64, "vocab_size": 9, "eos_token_id": [1, 2]}, HuggingFaceConfig(64, 9, (1, 2))),
        ({"vocab_size": 9, "text_config": {"vocab_size": 8, "eos_token_id": 3}}, HuggingFaceConfig(0, 8, (3,))),
        ({"max_position_embeddings": True, "vocab_size": -1, "eos_token_id": [-1, "x", True]}, HuggingFaceConfig()),
        ({"text_config": [1]}, HuggingFaceConfig()),
    ],
)
def test_a_models_configuration_is_read_as_far_as_it_says_something(
    tmp_path: Path, said: dict[str, Any], read: HuggingFaceConfig
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert read_hugging_face_config(tmp_path) == read


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "there is no such file"),
        (b"\xff", "no readable JSON"),
        (b"[]", "no JSON object"),
        (b" " * (1 << 21), "bytes"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(InternalError, match=rf"config\.json: .*{words}"):
        read_hugging_face_config(tmp_path)


def test_the_command_is_a_path_or_a_name_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "vllm"
    command.write_text("#!/bin/sh\n")
    assert find_vllm(str(command)) is None, "it cannot be run"
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_vllm("vllm") == find_vllm(str(command)) == str(command)
    assert find_vllm("no-such-vllm") is None
