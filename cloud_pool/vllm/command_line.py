"""The command line and the environment of `vllm serve`, from a variant's limits and the pool's configuration.

    --uds                 a socket in a folder of its own, 0700: vLLM's API key guards some of its paths only
    --tokens-only         ids in and out: no tokenizer is loaded, and no text is made
    --kv-cache-memory-…   what the pool's queue reserves from, and a page for each slot, so that vLLM never has to give
                          way to itself: a sequence takes whole pages
    --generation-config   vLLM's own defaults: what a model's folder says of sampling is not asked for
    --max-logprobs        one more than a caller may ask for (`wire.py`)

Its telemetry is off, and nothing is fetched: the weights are in the folder. What the pool's environment has of secrets
does not go on: the server needs none, and one that found VLLM_API_KEY would ask the pool for it. The configuration's
own `arguments` come before these, and the last one of a name counts.

Pure. Source: `vllm serve --help=all` of 0.32; docs.vllm.ai, "Usage stats collection".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from pathlib import Path
from typing import Final

from tidegate.generate.request import MAX_LOGPROBS

SERVED_NAME: Final = "served"
_PAGE_TOKENS: Final = 128  # the most of vLLM's own choices: 128 on a processor, 16 on most GPUs
_OUR_PREFIX: Final = "TIDEGATE_"
_SECRET: Final = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY|ACCESS_KEY|PRIVATE_KEY)(_|$)", re.I
)


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """What one server is to be."""

    folder: Path  # with config.json and the weights
    socket: Path
    context: int  # tokens of a prompt and its answer
    slots: int
    cache_bytes: float  # of all attention caches together; infinite: as vLLM likes
    token_bytes: int  # of the cache of one token; 0: not known
    device: str  # "cpu", "cuda" or "cuda:1"
    threads: int = 0  # of a computation on a processor; 0: all
    gpu_memory_ratio: float = 0.9
    arguments: tuple[str, ...] = ()
    batch_invariant: bool = False  # a text does not depend on the others beside it


def serve_command(executable: str, plan: ServerPlan) -> list[str]:
    command = [executable, "serve", str(plan.folder), *plan.arguments]
    command += ["--served-model-name", SERVED_NAME, "--uds", str(plan.socket)]
    command += ["--tokens-only", "--enable-prompt-tokens-details"]
    command += ["--max-model-len", str(plan.context), "--max-num-seqs", str(plan.slots)]
    command += ["--load-format", "safetensors", "--generation-config", "vllm"]
    command += ["--max-logprobs", str(MAX_LOGPROBS + 1), "--logprobs-mode", "raw_logprobs"]
    command += ["--gpu-memory-utilization", f"{plan.gpu_memory_ratio:g}"]
    if isfinite(plan.cache_bytes):
        spare = (plan.slots + 1) * _PAGE_TOKENS * plan.token_bytes  # a page of each, and the one of padding
        command += ["--kv-cache-memory-bytes", str(ceil(plan.cache_bytes) + spare)]
    return [*command, "--disable-log-stats", "--disable-uvicorn-access-log"]


def serve_environment(ours: Mapping[str, str], plan: ServerPlan) -> dict[str, str]:
    """Args: ours: this process's environment; what of it configures this process, or is secret, does not go on."""
    environment = {
        key: value for key, value in ours.items() if not key.startswith(_OUR_PREFIX) and not _SECRET.search(key)
    }
    environment |= {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_RPC_BASE_PATH": str(plan.socket.parent),  # its own sockets, which go with the folder
        "VLLM_HOST_IP": "127.0.0.1",
    }
    if plan.batch_invariant:
        environment["VLLM_BATCH_INVARIANT"] = "1"
    if (device := _visible_device(plan.device, ours.get("CUDA_VISIBLE_DEVICES"))) is not None:
        environment["CUDA_VISIBLE_DEVICES"] = device
    if plan.device == "cpu":
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the pool says which cores there are
        if plan.threads:
            environment["OMP_NUM_THREADS"] = str(plan.threads)
    return environment


def max_context(wanted: int, *, of_model: int, cache_bytes: float, token_bytes: int) -> int:
    """Tokens that one sequence may have: at most what the model knows, and what fits into all caches. 0: as vLLM says.

    Args:
        wanted: by the manifest; 0: whatever there is.
    """
    limits = [one for one in (wanted, of_model) if one]
    if token_bytes and isfinite(cache_bytes):
        limits.append(int(cache_bytes // token_bytes))
    return min(limits, default=0)


def _visible_device(device: str, visible: str | None) -> str | None:
    """The one GPU that the server is to see, as CUDA_VISIBLE_DEVICES has it; None: all that we see."""
    _, colon, number = device.partition(":")
    if not colon:
        return None
    seen: Sequence[str] = visible.split(",") if visible else ()
    return seen[int(number)].strip() if int(number) < len(seen) else number
