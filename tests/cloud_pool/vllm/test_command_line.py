"""How vLLM's server is called."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from cloud_pool.vllm.command_line import ServerPlan, max_context, serve_command, serve_environment

PLAN = ServerPlan(
    Path("/m"), Path("/s/http.sock"), context=4096, slots=8, cache_bytes=1e6, token_bytes=100, device="cuda"
)


def plan(**changes: object) -> ServerPlan:
    words = {name: getattr(PLAN, name) for name in ServerPlan.__slots__}
    return ServerPlan(**(words | changes))  # type: ignore[arg-type]


def value_of(command: list[str], name: str) -> str:
    """The last one, which counts."""
    at = len(command) - 1 - command[::-1].index(name)
    return command[at + 1]


def test_the_command_says_what_the_manifest_and_the_configuration_say() -> None:
    command = serve_command("/v/vllm", plan(gpu_memory_ratio=0.5))
    assert command[:3] == ["/v/vllm", "serve", "/m"] and "--tokens-only" in command
    assert value_of(command, "--uds") == "/s/http.sock"
    assert value_of(command, "--max-model-len") == "4096" and value_of(command, "--max-num-seqs") == "8"
    assert value_of(command, "--gpu-memory-utilization") == "0.5"
    # 1,000,000 bytes are reserved from, and nine pages more are there to round up into.
    assert value_of(command, "--kv-cache-memory-bytes") == str(1_000_000 + 9 * 128 * 100)
    assert value_of(command, "--max-logprobs") == "21"


def test_what_the_pool_says_goes_before_the_operators_own_arguments() -> None:
    command = serve_command("vllm", plan(arguments=("--uds", "/elsewhere", "--tensor-parallel-size=2")))
    assert value_of(command, "--uds") == "/s/http.sock" and "--tensor-parallel-size=2" in command


def test_caches_are_vllms_choice_where_nobody_says_what_a_token_takes() -> None:
    assert "--kv-cache-memory-bytes" not in serve_command("vllm", plan(cache_bytes=inf, token_bytes=0))


def test_telemetry_is_off_nothing_is_fetched_and_our_own_keys_stay_here() -> None:
    environment = serve_environment({"PATH": "/bin", "TIDEGATE_POOL_TLS__KEY": "secret", "HF_HUB_OFFLINE": "0"}, PLAN)
    assert environment["VLLM_NO_USAGE_STATS"] == environment["DO_NOT_TRACK"] == "1"
    assert environment["HF_HUB_OFFLINE"] == environment["TRANSFORMERS_OFFLINE"] == "1"
    assert environment["PATH"] == "/bin" and not any(name.startswith("TIDEGATE") for name in environment)


@pytest.mark.parametrize(
    "name",
    ["VLLM_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "OPENAI_APIKEY", "DB_PASSWORD", "token"],
)
def test_secrets_stay_here(name: str) -> None:
    assert name not in serve_environment({name: "x"}, PLAN)


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "VLLM_CPU_KVCACHE_SPACE", "NCCL_DEBUG", "LD_LIBRARY_PATH"])
def test_what_sets_a_server_up_goes_on(name: str) -> None:
    assert serve_environment({name: "x"}, PLAN)[name] == "x"


@pytest.mark.parametrize(
    ("device", "visible", "seen"),
    [
        ("cuda", None, None),
        ("cuda", "3", "3"),
        ("cuda:1", None, "1"),
        ("cuda:1", "4, 6", "6"),
        ("cuda:1", "GPU-a,GPU-b", "GPU-b"),
        ("cpu", None, None),
    ],
)
def test_the_server_sees_the_one_gpu_that_is_meant(device: str, visible: str | None, seen: str | None) -> None:
    ours = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert serve_environment(ours, plan(device=device)).get("CUDA_VISIBLE_DEVICES") == seen


def test_batch_invariance_is_vllms_own() -> None:
    assert serve_environment({}, plan(batch_invariant=True))["VLLM_BATCH_INVARIANT"] == "1"
    assert "VLLM_BATCH_INVARIANT" not in serve_environment({}, PLAN)


def test_on_a_processor_threads_are_the_pools() -> None:
    assert serve_environment({}, plan(device="cpu", threads=3))["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in serve_environment({}, plan(device="cpu"))


@pytest.mark.parametrize(
    ("wanted", "of_model", "cache_bytes", "token_bytes", "context"),
    [
        (4096, 8192, inf, 0, 4096),
        (8192, 4096, inf, 0, 4096),
        (8192, 0, inf, 100, 8192),
        (8192, 8192, 100_050.0, 100, 1000),
        (0, 4096, inf, 0, 4096),
        (0, 0, inf, 0, 0),
    ],
)
def test_the_context_is_what_all_allow(
    wanted: int, of_model: int, cache_bytes: float, token_bytes: int, context: int
) -> None:
    assert max_context(wanted, of_model=of_model, cache_bytes=cache_bytes, token_bytes=token_bytes) == context
