"""Which process computes a generating variant on a place: a worker of our own, or vLLM's server.

vLLM takes what transformers takes, a Hugging Face folder, so it may stand in for variants with `engine: transformers`:
on CUDA devices where it is found, and where the key `vllm.use` asks for it. It opens sockets, compiles and starts
processes, which the workers' sandbox takes from a process; so it is outside of it, and not used where that is required.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Final

import structlog

from cloud_pool.core.sharing.worker_layout import WorkerPlace
from cloud_pool.vllm.executable import find_vllm
from cloud_pool.vllm.vllm_config import VllmConfig
from cloud_pool.workers.device_worker import PoolLoadable, StartProcess
from cloud_pool.workers.memory_limit import computes_on_cpu
from tidegate.engines.generation.limits import cache_limit_bytes
from tidegate.runtime.process import StartError
from tidegate.workers.incarnation import WARMUP_TIMEOUT_S
from tidegate.workers.process import WorkerProcess
from tidegate.workers.sandbox import SandboxMode

_STANDS_IN_FOR: Final = "transformers"
log = structlog.get_logger("supervisor")


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """How the workers of one variant on one place are made."""

    start_process: StartProcess
    within_s: float = WARMUP_TIMEOUT_S  # to be loaded and warm
    sandboxed: bool = True
    successor_beside: bool = True  # whether another may be started while one serves


class GeneratingStarts:
    """For each variant and place, what computes it.

    Args:
        pool: the pool's name, for logs and errors.
        cache_bytes: of the attention caches of one variant on one device; None: `cache_limit_bytes`.
    """

    def __init__(self, vllm: VllmConfig, *, pool: str, sandbox: SandboxMode, cache_bytes: int | None) -> None:
        self._vllm = vllm
        self._pool = pool
        self._sandbox = sandbox
        self._cache_bytes = cache_bytes

    def of(self, loadable: PoolLoadable, place: WorkerPlace) -> WorkerStart:
        """Raises StartError where vLLM is asked for and cannot be used, with the way out."""
        if loadable.variant.engine != _STANDS_IN_FOR or not self._wants_vllm(loadable, place):
            return WorkerStart(
                lambda life, cores: WorkerProcess(f"{self._pool}/{life}", cores=cores, sandbox=self._sandbox)
            )
        return self._vllm_start(loadable, on_cpu=computes_on_cpu(place.device))

    def _wants_vllm(self, loadable: PoolLoadable, place: WorkerPlace) -> bool:
        """Raises StartError."""
        use = self._vllm.use
        if use == "never" or (use == "auto" and computes_on_cpu(place.device)):
            return False
        missing = self._missing()
        if missing and use == "always":
            raise StartError(f"key 'vllm.use' is always: {missing}")
        if missing:
            log.info("vllm is not used", model=loadable.key, device=place.device, reason=missing)
        return not missing

    def _missing(self) -> str:
        """Why vLLM cannot be used here, and what to do; "" where it can."""
        if find_vllm(self._vllm.executable) is None:
            return (
                f"there is no command {self._vllm.executable!r} (key 'vllm.executable'): install vLLM in an "
                "environment of its own and name its bin/vllm, or set vllm.use to never"
            )
        if importlib.util.find_spec("aiohttp") is None:
            return "the pool asks vLLM over aiohttp, which is not installed: pip install 'tidegate[vllm]'"
        if self._sandbox == "require":
            return "vLLM cannot run in the sandbox, which the key 'sandbox' requires: set it to auto"
        return ""

    def _vllm_start(self, loadable: PoolLoadable, *, on_cpu: bool) -> WorkerStart:
        from cloud_pool.vllm.vllm_process import VllmProcess  # and with it aiohttp, which other pools do without

        cost = loadable.variant.generation
        cache_bytes = cache_limit_bytes(loadable.manifest, loadable.variant, self._cache_bytes)
        return WorkerStart(
            lambda life, cores: VllmProcess(
                f"{self._pool}/{life}",
                self._vllm,
                cache_bytes=cache_bytes,
                token_bytes=cost.cache_bytes if cost is not None else 0,
                on_cpu=on_cpu,
                cores=cores,
            ),
            within_s=self._vllm.start_timeout_s + WARMUP_TIMEOUT_S,
            sandboxed=False,
            successor_beside=False,  # it takes what it may of its device when it starts
        )

    def __repr__(self) -> str:
        return f"<GeneratingStarts vllm {self._vllm.use}>"
